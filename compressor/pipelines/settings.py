"""How the sequential pipeline traces and propagates: everything a user may choose about it, in one frozen record that is passed along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from compressor.errors import TargetError, TracingError
from compressor.pipelines.offload.activation_store import check_offload_dir
from compressor.settings.kinds import parse_bytes
from compressor.settings.verbs import OneshotSettings, Passes
from compressor.tracing.plan import check_tracing_options
from compressor.tracing.targets.records import Engine, Verify

PASSES = get_args(get_args(Passes)[0])


@dataclass(frozen=True)
class SequentialSettings:
    """What a user may choose about the sequential pipeline.

    Attributes:
        targets: patterns of the layers to stop at; None infers them.
        passes: `two`: each layer runs before and after its compression; `one`: its modules are compressed on the way; `auto`: one where the
            graph engine can cut layers at the inputs of their modules and nobody named targets, else two.
        propagate_error: False propagates through the layers as they were before compression.
        engine: `graph` replays a recorded graph, `suspend` pauses plain forwards, `auto` takes the graph where it can be had.
        max_variants: recorded graphs at most, for batches that take other ways through the model's Python.
        leaves: functions that are recorded as one node; `package.module:qualified.name`.
        verify: batches on which the plan is held against the plain model: none, the first few (all where these are seen to be no proof for
            the others), or all; what they show is right or refused.
        activation_memory: main memory for what is live between stages, in bytes or as text (`4GB`); None: three quarters of what is free.
        activation_device_memory: the same of a GPU, which is filled first; None: two fifths of what is free.
        offload_dir: folder for what does not fit; None makes that an error.
    """

    targets: Sequence[str] | None = None
    passes: Passes = "auto"
    propagate_error: bool = True
    engine: Engine = "auto"
    max_variants: int = 8
    leaves: Sequence[str] = ()
    verify: Verify = "first"
    activation_memory: int | str | None = None
    activation_device_memory: int | str | None = None
    offload_dir: str | Path | None = None

    def __post_init__(self) -> None:
        """Check the choices.

        Raises:
            TracingError: no such engine or way to verify, less than one variant, or passes that something else rules out.
            UserInputError: a size that is none.
            OutputError: the folder is missing or not writable.
        """
        check_tracing_options(self.engine, self.verify, self.max_variants)
        _check_passes(self)
        for name in ("activation_memory", "activation_device_memory"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), name)
        if self.offload_dir is not None:
            check_offload_dir(self.offload_dir)

    @classmethod
    def of(cls, settings: OneshotSettings) -> SequentialSettings:
        """Return the part of the choices of a run that is about this pipeline."""
        own = {one.name: getattr(settings, one.name) for one in fields(cls) if one.name != "targets"}
        return cls(settings.sequential_targets, **(own | {"leaves": tuple(settings.leaves)}))

    @property
    def num_passes(self) -> int:
        """1 where layers shall run once, if that is possible; else 2."""
        rules_out = self.targets is not None or self.engine == "suspend" or not self.propagate_error
        return 1 if self.passes == "one" or (self.passes == "auto" and not rules_out) else 2

    @property
    def activation_choices(self) -> dict[str, int | str | Path]:
        """What the user chose about activations, without what was left to us."""
        chosen = {name: getattr(self, name) for name in ("activation_memory", "activation_device_memory", "offload_dir")}
        return {name: value for name, value in chosen.items() if value is not None}

    def refuse_without_use(self, pipeline: str) -> None:
        """Refuse choices for a pipeline that has no sequential targets.

        Args:
            pipeline: name of the pipeline that was chosen.

        Raises:
            TargetError: something was chosen that would do nothing.
        """
        if pipeline == "sequential" or self == SequentialSettings():
            return
        if self.targets is not None:
            raise TargetError(f"sequential_targets: {list(self.targets)} were given, but the {pipeline} pipeline has none; leave them out")
        plain = SequentialSettings()
        changed = [name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(plain, name)]
        raise TargetError(
            f"{changed[0]}: {getattr(self, changed[0])!r} was given, but the {pipeline} pipeline traces nothing; leave it out or choose "
            'pipeline="sequential"'
        )


def _check_passes(settings: SequentialSettings) -> None:
    if settings.passes not in PASSES:
        raise TracingError(f"passes: {settings.passes!r} does not exist; choose one of {', '.join(PASSES)}")
    if settings.passes == "one" and settings.engine == "suspend":
        raise TracingError("passes: 'one' cuts layers open, and engine='suspend' cannot; leave one of them out")
    if settings.passes == "one" and not settings.propagate_error:
        raise TracingError(
            "passes: 'one' shows every module the error of those before it, and propagate_error=False none; leave one of them out"
        )
