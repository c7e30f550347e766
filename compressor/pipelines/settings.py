"""How the sequential pipeline traces and propagates, in one frozen record that is passed along, and where it stops."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from torch import nn

from compressor.errors import TargetError, TracingError
from compressor.lifecycle import Modifier
from compressor.model.folder import some
from compressor.model.targets import outward
from compressor.nn.attention.kv_cache import attention_modules
from compressor.nn.experts import Expert, UnfusedExperts
from compressor.pipelines.offload.activation_store import check_offload_dir
from compressor.settings.kinds import parse_bytes
from compressor.settings.verbs import CostSettings, Passes
from compressor.tracing import Partition
from compressor.tracing.targets.partition import infer_targets
from compressor.tracing.targets.records import Engine, Verify, check_tracing_options

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
        activation_device_memory: the same of a GPU, which is filled first; None: two fifths of what is free, or a tenth where layers come
            there one by one.
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
            TracingError: no such engine or way to verify, less than one variant, or passes or a budget that something else rules out.
            UserInputError: a size that is none.
            OutputError: the folder is missing or not writable.
        """
        check_tracing_options(self.engine, self.verify, self.max_variants)
        _check_passes(self)
        if self.engine == "suspend":
            self.refuse_budgets("engine='suspend' was asked for")
        for name in ("activation_memory", "activation_device_memory"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), name)
        if self.offload_dir is not None:
            check_offload_dir(self.offload_dir)

    @classmethod
    def of(cls, settings: CostSettings) -> SequentialSettings:
        """Return the part of the choices of a run that is about this pipeline; a plan has less of them."""
        own = {one.name: getattr(settings, one.name) for one in fields(cls) if one.name in type(settings).model_fields}
        return cls(settings.sequential_targets, **(own | {"leaves": tuple(own.get("leaves", ()))}))

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

    def refuse_budgets(self, why: str) -> None:
        """Refuse choices about activations, for an engine that cannot move them.

        Args:
            why: the suspend engine runs, in a line.

        Raises:
            TracingError: something was chosen.
        """
        for name, value in self.activation_choices.items():
            raise TracingError(
                f"{name}: {str(value)!r} was given, but the suspend engine keeps activations in paused forwards, where they cannot be "
                f"moved ({why}); leave it out, or choose what the graph engine can follow"
            )

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


def check_base_stream(modifiers: Iterable[Modifier], engine: Engine, why: str) -> None:
    """Refuse modifiers that need the uncompressed model beside the other where the engine cannot run it.

    Args:
        modifiers: of the run, initialized.
        engine: that runs it; `auto` may still become either.
        why: this engine, in a line.

    Raises:
        TracingError: one of them needs it.
    """
    asking = next((modifier.label for modifier in modifiers if modifier.base_stream == "required"), None)
    if asking is not None and engine == "suspend":
        raise TracingError(
            f"{asking}: target 'base' runs the uncompressed model beside the other, which the suspend engine cannot ({why}); leave it out, "
            "or choose what the graph engine can follow"
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


# Where the sequential pipeline stops: at layers, at the inputs of their modules, or at every single expert.
#
# Two passes: all samples through a layer as it is, all of its modules compressed, all samples through the compressed layer. One pass: the
# layer is cut at the inputs of its own modules. Those that read one input (q/k/v, gate/up) are shown it, compressed, and then called for
# the first time, so that nothing runs twice, and each module sees the error of those before it in the same layer, too. What waits between
# two cuts is more than between two layers: the input of the modules beside the residual stream.
#
# Layers with many experts are calibrated piece by piece, so that the Hessians of one expert live at a time, not those of all of them. As
# one stage, a layer of DeepSeek-V3's shape would need 57 GB of Hessians. Where they would pass a fixed size, which depends on the model
# alone, the stages are instead what lies around the experts (attention, shared experts) and every single expert. Samples wait at each of
# them as at a layer, and an expert's statistics go as soon as it is solved.

HESSIAN_BYTES = 1 << 31  # of the experts of one layer; beyond, they are calibrated one by one


def cut_at_inputs(model: nn.Module, watched: Collection[str], layers: Partition) -> Partition:
    """Name the places at which a forward stops when layers run once.

    Args:
        model: of the run.
        watched: dotted names of the modules that carry calibration hooks.
        layers: the sequential targets of a run in two passes.

    Returns:
        The watched modules themselves; where those lie in experts, which are called for other tokens in every batch, the layer of experts,
        and where one lies inside another the outer one. Both run twice.
    """
    chosen = set(_stops(model, watched).values())
    targets = {name: module for name, module in model.named_modules() if name in chosen}
    return Partition(targets, f"the inputs of what is compressed, in one pass ({layers.reason})", layers.inferred)


def _stops(model: nn.Module, watched: Collection[str]) -> dict[str, str]:
    """Find for each watched module the outermost one, around it or itself, that can only be calibrated whole."""
    stops = {name for name, module in model.named_modules() if isinstance(module, UnfusedExperts)} | set(watched)
    return {name: [outer for outer in outward(name) if outer in stops][-1] for name in watched}


def calibrated_whole(model: nn.Module, watched: Collection[str]) -> dict[str, list[str]]:
    """Find the modules which one pass shows no error of those before them in their layer, since one around them is watched, too.

    Args:
        model: of the run.
        watched: dotted names of the modules that carry calibration hooks.

    Returns:
        The module around, by its dotted name, to the watched ones inside; without layers of experts, which run twice in any case.
    """
    found: dict[str, list[str]] = {}
    for name, around in _stops(model, watched).items():
        if name != around and around in watched:
            found.setdefault(around, []).append(name)
    return found


def whole_notes(model: nn.Module, watched_by: Mapping[str, Collection[str]]) -> list[str]:
    """Say which modules see nothing of the error of those before them in their layer in one pass, and which modifier has it so.

    Args:
        model: of the run.
        watched_by: dotted names of the modules that carry calibration hooks, by the label of the modifier.

    Returns:
        A note, or none.
    """
    whole = calibrated_whole(model, set().union(*watched_by.values()))
    if not whole:
        return []
    asking = [label for label, names in watched_by.items() if not whole.keys().isdisjoint(names)]
    return [
        f"{' and '.join(asking)}: {some(whole)} were calibrated as a whole, for what they take or give is learned from, too; what was "
        f"learned of {some([name for inside in whole.values() for name in inside])} in there saw no error of those before them in it"
    ]


def around_watched(model: nn.Module, watched: Collection[str], layers: Partition) -> Partition:
    """Put attention that learns from its own call in the place of targets inside it: a stage that stops in there never makes that call.

    Args:
        model: of the run.
        watched: dotted names of the modules that carry calibration hooks, attention among them whose keys and values are quantized.
        layers: the sequential targets.

    Returns:
        The targets, such attention in the place of its own.
    """
    attention = attention_modules(model).keys() & watched
    chosen = {[outer for outer in outward(name) if outer == name or outer in attention][-1] for name in layers.targets}
    if chosen == set(layers.targets):
        return layers
    targets = {name: module for name, module in model.named_modules() if name in chosen}
    return Partition(targets, f"{layers.reason}, and what is calibrated around them", layers.inferred)


def expert_targets(
    model: nn.Module, claimed: Collection[str], pipeline: str, named: Sequence[str] | None = None, limit: int | None = None
) -> Sequence[str] | None:
    """Choose sequential targets for a model with large layers of experts.

    Args:
        model: with its experts taken apart.
        claimed: dotted names of the modules that will be compressed.
        pipeline: only `sequential` has targets.
        named: patterns of the user, which are not touched.
        limit: bytes of Hessians that one layer of experts may need in one stage; HESSIAN_BYTES by default.

    Returns:
        Dotted names in the order of the model; `named` where the usual targets will do.
    """
    sizes = [_hessian_bytes(module) for module in model.modules() if isinstance(module, UnfusedExperts)]
    if named is not None or pipeline != "sequential" or max(sizes, default=0) <= (HESSIAN_BYTES if limit is None else limit):
        return named
    names = [piece for layer, module in infer_targets(model).targets.items() for piece in _pieces(layer, module)]
    holding = {outer for name in claimed for outer in outward(name)}
    return [name for name in names if name in holding]


def _hessian_bytes(experts: UnfusedExperts) -> int:
    """One Hessian per expert for gate and up, which share their input, and one for down; float32."""
    projections = [expert.get_submodule(name) for expert in experts.experts() for name in (experts.layout.up, experts.layout.down)]
    return sum(4 * layer.in_features**2 for layer in projections if isinstance(layer, nn.Linear))


def _pieces(name: str, module: nn.Module) -> Iterator[str]:
    """The module itself where it holds no experts; else its parts, down to every expert."""
    if isinstance(module, Expert) or not any(isinstance(below, UnfusedExperts) for below in module.modules()):
        if any(True for _ in module.parameters()):
            yield name
        return
    for child_name, child in module.named_children():
        yield from _pieces(f"{name}.{child_name}" if name else child_name, child)
