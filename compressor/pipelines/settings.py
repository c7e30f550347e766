"""How the sequential pipeline traces and propagates: everything a user may choose about it, in one frozen record that is passed along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.errors import TargetError
from compressor.tracing.plan import check_tracing_options
from compressor.tracing.records import Engine, Verify


@dataclass(frozen=True)
class SequentialSettings:
    """What a user may choose about the sequential pipeline.

    Attributes:
        targets: patterns of the layers to stop at; None infers them.
        propagate_error: False propagates through the layers as they were before compression.
        engine: `graph` replays a recorded graph, `suspend` pauses plain forwards, `auto` takes the graph where it can be had.
        max_variants: recorded graphs at most, for batches that take other ways through the model's Python.
        leaves: functions that are recorded as one node; `package.module:qualified.name`.
        verify: batches on which the recorded graph is compared with the plain model: `off`, `first` or `all`.
    """

    targets: Sequence[str] | None = None
    propagate_error: bool = True
    engine: Engine = "auto"
    max_variants: int = 8
    leaves: Sequence[str] = ()
    verify: Verify = "first"

    def __post_init__(self) -> None:
        """Check the choices.

        Raises:
            TracingError: no such engine or way to verify, or less than one variant.
        """
        check_tracing_options(self.engine, self.verify, self.max_variants)

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
