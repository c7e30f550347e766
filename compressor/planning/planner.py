"""What a recipe would do to a model, and what it would cost, without loading a weight or running a batch.

Shapes come from config and headers, so a plan for a model of any size answers in seconds. Bytes on disk are exact. Memory and time are
estimates: memory from the model's own forward on shapes and from the formulas of the algorithms, time from arithmetic and from small
pieces of it timed on this machine.
"""

from __future__ import annotations

import copy
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

import torch
from torch import nn

from compressor.data.datasets import check_positive, chosen_length
from compressor.data.encode import max_positions
from compressor.errors import ModelError, SchemeError, UserInputError
from compressor.lifecycle import Modifier, PlannedModule, State
from compressor.model.class_readers import check_readable, reading_notes
from compressor.model.disk_room import checkpoint_bytes
from compressor.model.evaluation import check_dtypes_around
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.folder import check_index, has_weights, resolve_folder
from compressor.model.loading.empty import load_empty
from compressor.model.loading.load import check_in_memory, resolve_device, resolve_dtype
from compressor.model.loading.sample_batches import batch_of_shapes, describe_batch, reads
from compressor.model.loading.stand_in import load_skeleton
from compressor.modifiers.gptq import Mode
from compressor.modifiers.schemes.base import SchemeModifier
from compressor.modifiers.schemes.targets import check_linear_forwards
from compressor.modifiers.transforms.rotating import RotatingModifier
from compressor.nn import weight_of
from compressor.nn.attention.kv_cache import attention_modules
from compressor.nn.build import is_quantizable
from compressor.nn.experts import UnfusedExperts
from compressor.numerics import QuantizationScheme
from compressor.pipelines import NOT_BY_LAYERS, SequentialSettings, choose_pipeline, pipeline_that_runs
from compressor.pipelines.forward_checks import calibration_mode
from compressor.pipelines.settings import around_watched, cut_at_inputs, expert_targets, whole_notes
from compressor.planning.conversion import Conversion, estimate_conversion
from compressor.planning.estimate import Estimate, Fit, fit_into, measure_speed
from compressor.planning.footprint import Footprint, measure_footprints
from compressor.planning.inner import foresee_inner
from compressor.planning.refusals import CANNOT_FOLLOW, left_to_forwards, refuse_budget, refuse_recipe, reshaped, try_forward
from compressor.planning.stages import Setting, lay_out
from compressor.planning.workload import (
    Batches,
    Beside,
    Target,
    beside_of,
    bytes_of,
    guess_footprints,
    head_of,
    join_by_input,
    stages_of,
    wants_base_stream,
)
from compressor.recipe import Recipe, load_recipe
from compressor.settings.kinds import parse_bytes
from compressor.settings.options import from_settings
from compressor.settings.verbs import PlanSettings
from compressor.tracing import Partition, partition

_STATUS = Path("/proc/self/status")  # how much memory this process has: the baseline that tensors come on top of


def resident_bytes() -> int:
    """Return the resident memory of this process.

    Returns:
        Bytes now; where the system does not say, the most so far.
    """
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines() if ":" in line)
        return 1024 * int(lines["VmRSS"].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@runtime_checkable
class _Resolving(Protocol):
    def resolve(self, model: nn.Module) -> dict[str, QuantizationScheme]:
        """Decide which module gets which scheme."""


@runtime_checkable
class _Holding(Protocol):
    def hold_weights(self, state: State) -> None:
        """Note when it alone decides what becomes of weights."""


@runtime_checkable
class _Training(Protocol):
    def forwards_of_training(self, num_samples: int) -> float:
        """How many forwards of one sequence its training costs; a backward counts as two."""


@dataclass(frozen=True)
class Plan:
    """The resolved recipe: modules that change, linear layers that stay and why, and the cost.

    Attributes:
        modules: what each targeted module gets.
        skipped: linear layers that stay as they are, with the reason.
        pipeline: `data_free`, `basic` or `sequential`.
        sequential_targets: names of the layers, or of the modules in them, that would be calibrated one after another.
        forwards: how often a layer runs, in words.
        estimate: what the run would cost.
        modes: what it would cost in each mode, where the recipe has modes: estimates by name.
        online: FLOPs for each token of rotations in the forward, by layer: what the result pays whenever it is used. Layers that read
            one tensor may turn it once for all, as ours do under `torch.no_grad`.
        online_share: of that in the products of all linear layers.
        ranks: processes that would share the run; the estimates are those of one of them.
        alone_seconds: what one process would take, at the same speeds; None where one was asked for.
        timed_on: kind of the device whose speed counts.
        fit: what of it fits into the memory of the GPU that was named.
        attention: what of attention would be quantized; None where nothing would.
        unwritable: why a run that is to write a checkpoint would be refused; None where it would not.
        untried: why not all that a run looks at before its first forward was tried; None where it was.
        notes: what a run would say of settings that change nothing, and of who reads the checkpoint; and what it would find, or refuse, in
            forwards, which a plan does not run.
        conversion: what `convert` would take, with as many workers as ranks; None where the recipe or the model in memory needs a run.
    """

    modules: list[PlannedModule]
    skipped: list[PlannedModule]
    pipeline: str
    sequential_targets: list[str]
    forwards: str
    estimate: Estimate
    modes: dict[str, Estimate] = field(default_factory=dict)
    online: dict[str, float] = field(default_factory=dict)
    online_share: float = 0.0
    ranks: int = 1
    alone_seconds: float | None = None
    timed_on: str = "cpu"
    fit: Fit | None = None
    attention: str | None = None
    unwritable: str | None = None
    untried: str | None = None
    notes: tuple[str, ...] = ()
    conversion: Conversion | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""

        def plain(module: PlannedModule) -> dict[str, Any]:
            return {**asdict(module), "details": dict(module.details)}

        return {
            "modules": [plain(module) for module in self.modules],
            "skipped": [plain(module) for module in self.skipped],
            "pipeline": self.pipeline,
            "sequential_targets": self.sequential_targets,
            "forwards": self.forwards,
            "estimate": self.estimate.to_dict(),
            "modes": {name: _figures(estimate) for name, estimate in self.modes.items()},
            "online": self.online,
            "online_share": self.online_share,
            "ranks": self.ranks,
            "alone_seconds": self.alone_seconds,
            "timed_on": self.timed_on,
            "fit": None if self.fit is None else self.fit.to_dict(),
            "attention": self.attention,
            "unwritable": self.unwritable,
            "untried": self.untried,
            "notes": list(self.notes),
            "conversion": None if self.conversion is None else self.conversion.to_dict(),
        }


@from_settings(PlanSettings)
def plan(model: str | Path | nn.Module, settings: PlanSettings) -> Plan:
    """Resolve a recipe against a model and estimate the run; nothing is run and nothing is changed.

    Args:
        model: folder with a config.json, or its name on the hub (weights are not needed; of those that are all in the folder headers are
            read), or a model in memory.
        settings: the choices of the run that is planned.

    Returns:
        The plan.

    Raises:
        UserInputError: whatever `oneshot` would refuse of recipe, choices and model.
    """
    parsed = load_recipe(settings.recipe, args=settings.recipe_args, run_type="oneshot", mode=settings.mode)
    unread = parsed.check_oneshot(settings.ranks)
    made = plan_recipe(model, parsed, settings)
    return replace(made, notes=(*unread, *left_to_forwards(parsed.modifiers), *made.notes))


def plan_recipe(model: str | Path | nn.Module, parsed: Recipe, settings: PlanSettings) -> Plan:
    """Plan a recipe that may be for a training: what a run in one shot would take of it.

    Args:
        model: see `plan`.
        parsed: the recipe.
        settings: the choices of the run.

    Returns:
        The plan.
    """
    check_dtypes_around(plan)
    granted = None if settings.activation_memory is None else parse_bytes(settings.activation_memory, "activation_memory")
    device_bytes = _device_bytes(settings)
    asked = choose_pipeline(parsed.modifiers, settings.pipeline, SequentialSettings.of(settings))
    chosen = pipeline_that_runs(asked, parsed.modifiers)
    (skeleton, found), in_memory = _skeleton(model, settings), isinstance(model, nn.Module)
    check_positive(num_calibration_samples=settings.num_calibration_samples, batch_size=settings.batch_size)
    length = chosen_length(settings.max_seq_length, max_positions(skeleton))
    device = resolve_device(settings.device)
    on_gpu = device.type != "cpu" or device_bytes is not None
    given = (settings.num_calibration_samples, length, settings.batch_size, torch.device("cuda") if on_gpu else device)
    batches, of_all = (Batches.of(*given, ranks) for ranks in (settings.ranks, 1))
    with unfused_experts(skeleton, hold=True) as experts:
        try:
            speed = measure_speed(device, next((p.dtype for p in skeleton.parameters()), torch.float32))
            ahead = None if in_memory else int(on_gpu)  # on a GPU the next layer is on its way
            suspends = settings.engine == "suspend"
            foresee_inner(skeleton, parsed.modifiers)
            turning = [one for one in parsed.modifiers if isinstance(one, RotatingModifier)]
            held = bytes_of(skeleton) + sum(one.added_bytes(skeleton) for one in turning)
            setting = Setting(held, not on_gpu or in_memory, suspends, granted, batches, speed, num_ahead=ahead)
            attention = _attention(skeleton, parsed.modifiers)
            unwritable, notes = _readers(skeleton, parsed.modifiers, model if isinstance(model, nn.Module) else skeleton)
            made = _estimated(skeleton, parsed, chosen, settings, setting, of_all, None if in_memory else device)
            if not on_gpu:  # which takes a part of them that a plan cannot know
                refuse_budget(settings, made.estimate.offload_bytes)
            tried = try_forward(skeleton, parsed.modifiers, lambda: _Following(skeleton, batches)((), ()))
        finally:
            experts.restore()
    fit = None if device_bytes is None else fit_into(device_bytes, made.estimate)
    unlike = (f"{NOT_BY_LAYERS}, so they are not run so",) if asked != chosen else ()
    made = replace(made, attention=attention, unwritable=unwritable, notes=(*found, *tried, *unlike, *notes, *made.notes))
    return replace(made, ranks=settings.ranks, timed_on=device.type, fit=fit)


def _device_bytes(settings: PlanSettings) -> int | None:
    if settings.device_memory is None:
        return None
    found = parse_bytes(settings.device_memory, "device_memory")
    if found == 0:
        raise UserInputError(f"device_memory: {settings.device_memory!r} holds nothing; give the memory of a GPU, such as 80GB")
    return found


def _skeleton(model: str | Path | nn.Module, settings: PlanSettings) -> tuple[nn.Module, tuple[str, ...]]:
    """The model without its weights, in the dtype that it would be compressed in, and what a run would note of its files.

    Of these, where they are there, only headers are read, and the values of two tensors that have one place.
    """
    given: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code_model, "model_class": settings.model_class}
    skeleton = load_skeleton(model, revision=settings.model_revision, **given)
    if isinstance(model, nn.Module):
        check_in_memory(model, dtype=settings.dtype)
        return without_values(model), ()
    folder = resolve_folder(model, settings.model_revision, weights=False, code=settings.trust_remote_code_model).path
    if has_weights(folder):
        check_index(folder)
        loaded = load_empty(folder, dtype=settings.dtype, reads_values=False, **given).loaded
        return loaded.model, loaded.notes
    return (skeleton if settings.dtype == "auto" else skeleton.to(resolve_dtype(settings.dtype))), ()


def _estimated(
    skeleton: nn.Module, parsed: Recipe, chosen: str, settings: PlanSettings, setting: Setting, of_all: Batches, device: torch.device | None
) -> Plan:
    """The plan of a run beside its costs otherwise: in one process, in the other modes, and from file to file on `device` (None: never)."""
    batches = setting.batches
    with reshaped(skeleton, parsed.modifiers):
        untried = refuse_recipe(skeleton, parsed.modifiers, chosen, settings.engine)
        follow = _Following(skeleton, batches)
        planned = _targets(skeleton, parsed.modifiers)
        made = _made(skeleton, parsed, chosen, settings, setting, follow, planned)
        alone = None
        if settings.ranks > 1:
            follow_all = follow if batches.batch_size == of_all.batch_size else _Following(skeleton, of_all)
            alone = _made(skeleton, parsed, chosen, settings, replace(setting, batches=of_all), follow_all, planned).estimate.seconds
        modes = {
            mode: made.estimate
            if other.modifiers == parsed.modifiers
            else _made(skeleton, other, chosen, settings, setting, follow, _targets(skeleton, other.modifiers)).estimate
            for mode, other in _other_modes(parsed, settings).items()
        }
        conversion = None
        if device is not None:
            changed, written = list(planned[0].values()), made.estimate.checkpoint_bytes
            conversion = estimate_conversion(skeleton, parsed, changed, written, settings.ranks, device)
    return replace(made, modes=modes, alone_seconds=alone, conversion=conversion, untried=untried)


def _attention(skeleton: nn.Module, modifiers: Sequence[Modifier]) -> str | None:
    quantizing = [one for one in modifiers if isinstance(one, SchemeModifier) and one.kv_format is not None]
    return quantizing[0].describe_kv(len(attention_modules(skeleton))) if quantizing else None


def _readers(skeleton: nn.Module, modifiers: Sequence[Modifier], model: nn.Module) -> tuple[str | None, tuple[str, ...]]:
    """What a run says where nobody could read the checkpoint, and of who reads it otherwise.

    Without a checkpoint the model may be used as it is.
    """
    quantizing = [one for one in modifiers if isinstance(one, SchemeModifier)]
    schemes = {name: scheme for one in quantizing for name, scheme in one.resolve(skeleton).items()}
    check_linear_forwards({name: module for name, module in model.named_modules() if name in schemes})  # with values, where there are
    kv = next((one.kv_format for one in quantizing if one.kv_format is not None), None)
    notes = reading_notes(skeleton, schemes, kv, queries=any(one.attention_patterns for one in quantizing))
    turning = [(one, list(one.turned_online(skeleton))) for one in modifiers if isinstance(one, RotatingModifier)]
    notes += [note for one, turned in turning for note in one.online_notes((name, group) for name, _, group in turned)]
    try:
        check_readable(schemes, skeleton, kv)
    except (SchemeError, ModelError) as error:
        return str(error), tuple(notes)
    return None, tuple(notes)


def _other_modes(parsed: Recipe, settings: PlanSettings) -> dict[str, Recipe]:
    """The recipe in every mode, where it was given as text or data and has modes."""
    if not any("mode" in type(modifier).model_fields for modifier in parsed.modifiers) or not isinstance(
        settings.recipe, str | Path | Mapping
    ):
        return {}
    return {mode: load_recipe(settings.recipe, args=settings.recipe_args, mode=mode) for mode in get_args(Mode)}


class _Following:
    """Follows a forward of the model on shapes; modes that stop and look at the same places share one."""

    def __init__(self, skeleton: nn.Module, batches: Batches) -> None:
        self._skeleton, self._batches = skeleton, batches
        self._found: dict[tuple[str, ...], list[Footprint]] = {}
        self.basis = ""

    def __call__(self, layers: Sequence[str], watched: Sequence[str], *, trains: bool = False) -> list[Footprint]:
        places = (*layers, "", *watched, *(("", "") if trains else ()))
        if places not in self._found:
            batch = batch_of_shapes(self._skeleton, self._batches.batch_size, self._batches.num_tokens)
            with calibration_mode(State(model=self._skeleton)):
                self._found[places] = measure_footprints(self._skeleton, batch, layers, watched, trains=trains)
            has_more = "input_ids" in batch and (reads(self._skeleton, "vision") or reads(self._skeleton, "audio"))
            inputs = f": {describe_batch(batch)}" if has_more or [*batch] != ["input_ids"] else ""
            self.basis = f"one forward followed on shapes{inputs}" + (", no images and no sound" if has_more else "")
        return self._found[places]


def _made(
    skeleton: nn.Module,
    parsed: Recipe,
    chosen: str,
    settings: PlanSettings,
    setting: Setting,
    follow: _Following,
    planned: tuple[dict[str, Target], list[PlannedModule]],
) -> Plan:
    targets, skipped = planned
    patterns = expert_targets(skeleton, {name: "" for name in targets}, chosen, settings.sequential_targets)
    named = SequentialSettings(patterns, passes=settings.passes, engine=settings.engine)
    watched = list(dict.fromkeys(name for one in parsed.modifiers for name in one.watches(skeleton)))
    runs_once = chosen == "sequential" and named.num_passes == 1 and bool(watched)
    has_base_stream = chosen == "sequential" and wants_base_stream(list(targets.values()), runs_once)
    needs = {one.calibration_need for one in parsed.modifiers}
    flows = bool(watched) if chosen == "sequential" else not needs <= {"none", "own"}
    cut = partition(skeleton, patterns)
    stops = (cut_at_inputs if runs_once else around_watched)(skeleton, watched, cut) if chosen == "sequential" else None
    layers = [] if stops is None else list(stops.targets)
    setting = replace(setting, runs_once=runs_once, has_base_stream=has_base_stream, flows=flows, head=head_of(skeleton))
    if chosen == "sequential" and setting.num_ahead is not None:
        setting = replace(setting, stretches={name: bytes_of(layer) for name, layer in cut.targets.items()})
    batches = setting.batches
    sequences = {
        one.label: one.forwards_of_training(batches.num_samples * (batches.ranks if one.across_ranks == "repeats" else 1))
        for one in parsed.modifiers
        if isinstance(one, _Training)
    }
    trained = {one.label: beside_of(one, sequences[one.label] / batches.batch_size) for one in parsed.modifiers if sequences.get(one.label)}
    estimate = _estimate(skeleton, setting, chosen, layers, list(targets.values()), trained, follow)
    turning = [one for one in parsed.modifiers if isinstance(one, RotatingModifier)]
    beside = sum(one.online_bytes(skeleton) + one.added_bytes(skeleton) for one in turning)
    beside += sum(one.kv_bytes(skeleton, one.ignore) for one in parsed.modifiers if isinstance(one, SchemeModifier))
    estimate = replace(estimate, checkpoint_bytes=estimate.checkpoint_bytes + beside)
    modules = [target.module for target in targets.values()]
    online: dict[str, float] = {}
    for modifier in turning:
        for name, flops in modifier.online_flops(skeleton).items():
            online[name] = online.get(name, 0.0) + flops
    notes = whole_notes(skeleton, {one.label: one.watches(skeleton) for one in parsed.modifiers}) if runs_once else []
    words = _in_words(chosen, stops, setting, looks_itself=bool(trained))
    share = _share_of_products(skeleton, online)
    return Plan(modules, skipped, chosen, layers, words, estimate, online=online, online_share=share, notes=tuple(notes))


def _share_of_products(skeleton: nn.Module, online: Mapping[str, float]) -> float:
    """What these take beside the products of all linear layers, of every expert as if each token went to it."""
    linears = (module for module in skeleton.modules() if is_quantizable(module) and not isinstance(module, nn.Embedding))
    return sum(online.values()) / max(1.0, 2.0 * sum(weight_of(module).numel() for module in linears))


def _figures(estimate: Estimate) -> dict[str, float]:
    return {"seconds": estimate.seconds, "peak_bytes": estimate.peak_bytes, "peak_extra_bytes": estimate.peak_extra_bytes}


def _targets(skeleton: nn.Module, modifiers: Sequence[Modifier]) -> tuple[dict[str, Target], list[PlannedModule]]:
    """What each module would get, by name, and what stays."""
    planned: dict[str, Target] = {}
    state = State(model=skeleton)
    for modifier in modifiers:
        modules = modifier.plan(skeleton)
        schemes = modifier.resolve(skeleton) if isinstance(modifier, _Resolving) else {}
        if isinstance(modifier, _Holding):
            modifier.hold_weights(state)
        if schemes:  # a weight is quantized once; pruned it may be, too
            state.claim([module.name for module in modules if module.reason is None], modifier.label)
        for module in modules:
            known = planned.get(module.name)
            # A module that one modifier changes is not "skipped" because another leaves it.
            if known is None or known.module.reason is not None:
                planned[module.name] = Target(module, schemes.get(module.name), modifier)
            elif module.reason is None:
                both = replace(module if schemes else known.module, scheme=f"{known.module.scheme}, {module.scheme}")
                scheme = schemes.get(module.name, known.scheme)
                last, other = (modifier, known.modifier) if schemes else (known.modifier, modifier)
                planned[module.name] = Target(both, scheme, last, (*known.others, other))
    changed = {name: target for name, target in planned.items() if target.module.reason is None}
    return changed, [target.module for target in planned.values() if target.module.reason is not None]


def _in_words(pipeline: str, stops: Partition | None, setting: Setting, *, looks_itself: bool) -> str:
    """How often a layer runs, but for the first batches and, where there are stages, what modifiers compute beside them."""
    if stops is None:
        return "one" if pipeline == "basic" and (setting.flows or looks_itself) else "none"
    if not setting.flows:
        return "none, for nothing learns from what flows"
    twice = [module for module in stops.targets.values() if any(True for _ in module.children())]  # these are not cut open
    often = "two" if not setting.runs_once or len(twice) == len(stops.targets) else "one"
    if often == "one" and twice:
        experts = all(isinstance(module, UnfusedExperts) for module in twice)
        often += f", of {'layers of experts' if experts else 'what is calibrated as a whole'} two"
    return often + (", and one beside in the uncompressed model" if setting.has_base_stream else "")


def _estimate(
    skeleton: nn.Module,
    setting: Setting,
    pipeline: str,
    layers: Sequence[str],
    targets: Sequence[Target],
    trained: Mapping[str, Beside],
    follow: _Following,
) -> Estimate:
    stages = stages_of(layers, targets)
    footprints, basis = _footprints(setting, pipeline, stages, follow, trains=any(one.trains for one in trained.values()))
    timeline = lay_out(setting, pipeline, footprints, stages, trained)
    made = sum(target.number("bytes_after") for target in targets)
    coded = {target.module.name: target.number("bytes_after") for target in targets if target.scheme is not None}
    dropped = sum(target.number("bytes_before") - target.number("bytes_after") for target in targets if target.scheme is None)
    return Estimate(
        checkpoint_bytes=checkpoint_bytes(skeleton, coded) - dropped,
        journal_bytes=0 if pipeline == "data_free" else made,
        offload_bytes=timeline.offload_bytes,
        model_bytes=setting.model_bytes,
        process_bytes=resident_bytes(),
        stages=timeline.stages,
        seconds=sum(stage.seconds for stage in timeline.stages),
        flops_per_second=setting.speed.model_flops,
        column_seconds=setting.speed.column_seconds,
        rounding_seconds=setting.speed.rounding_seconds,
        basis=basis,
    )


def _footprints(
    setting: Setting, pipeline: str, stages: Mapping[str, Sequence[Target]], follow: _Following, *, trains: bool
) -> tuple[list[Footprint], str]:
    """Follow one forward, or guess where that cannot be done, and say which."""
    if pipeline == "data_free":
        return [], "shapes of the weights; no data flows"
    watched = [target.module.name for targets in stages.values() for target in targets]
    layers = [layer for layer in stages if layer]
    try:
        found = follow(layers, watched, trains=trains)
        return join_by_input(found) if setting.runs_once else found, follow.basis
    except CANNOT_FOLLOW as error:
        reason = " ".join(str(error).split())[:160]
        return guess_footprints(stages, setting.batches), f"a guess from the shapes of the weights; no forward could be followed ({reason})"


def without_values(model: nn.Module) -> nn.Module:
    """Copy a model, with tensors that have shapes and no bytes."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo).eval()
