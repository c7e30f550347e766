"""How a model would be followed layer by layer, looked at before anything is compressed: what `compressor trace` prints and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from compressor.data import load_dataset_source
from compressor.errors import DatasetError, ModelError, TargetError, TracingError
from compressor.lifecycle import State
from compressor.model.evaluation import check_dtypes_around
from compressor.model.folder import one_line
from compressor.model.loading.load import load_tokenizer
from compressor.model.loading.sample_batches import MODALITIES, Modality, SampleBatches, describe_batch, reads, sample_batches
from compressor.model.loading.stand_in import StandIn, stand_in
from compressor.model.targets import resolve_targets
from compressor.pipelines.forward_checks import calibration_mode
from compressor.settings.options import from_settings
from compressor.settings.verbs import TraceSettings
from compressor.tracing import Plan, partition, trace
from compressor.tracing.flow import Stop, measure_flow
from compressor.tracing.footprint import Footprint
from compressor.tracing.graph.nodes import Unreached
from compressor.tracing.picture import Picture, make_picture, shortened, size
from compressor.tracing.targets.call_order import called

_NUM_SAMPLES = 2  # of a dataset
_OTHERWISE = "give a --dataset that reaches them, or --ignore them"
_MAX_TOKENS = 128  # of each: enough to see how they flow


@dataclass(frozen=True)
class TraceReport:
    """What tracing found out.

    Attributes:
        model_class: class of the model.
        weights: what its weights are.
        batches: what ran.
        plan: how batches flow.
        reason: why these targets.
        stops: the stages, with what crosses into them.
        after: modules with weights of their own that run behind the last stage.
        ignored: names of the modules that `ignore` matches.
        num_left_out: layers that the model lacks because they repeat others.
        reached_by: targets that none of the batches calls, and the modality whose batches call them; "" where none was found.
        untried: why no batch could be made of a modality that the model reads, and that may reach the others.
    """

    model_class: str
    weights: str
    batches: str
    plan: Plan
    reason: str
    stops: list[Stop]
    after: list[str]
    ignored: list[str]
    num_left_out: int
    reached_by: dict[str, str]
    untried: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The first line of every report; what comes behind the last stage counts as a subgraph, too."""
        num = len(self.stops) + 1
        return f"traced into {num} subgraphs" + (f" ({self.num_left_out} more repeat them and were left out)" if self.num_left_out else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        plan = self.plan
        return {
            "model_class": self.model_class,
            "weights": self.weights,
            "batches": self.batches,
            "num_subgraphs": len(self.stops) + 1,
            "num_left_out": self.num_left_out,
            "engine": plan.engine,
            "why": plan.why,
            "targets": list(plan.partition.targets),
            "reason": self.reason,
            "num_variants": len(plan.variants),
            "planning": self.planning,
            "guards": [{**asdict(guard), "expected": repr(guard.expected)} for guard in plan.guards if guard.is_value],
            "leaves": [asdict(leaf) for leaf in plan.leaves],
            "stages": [{**asdict(stop), "live_in": list(stage.live_in)} for stop, stage in zip(self.stops, plan.stages, strict=True)],
            "after": self.after,
            "ignored": self.ignored,
            "unreached": self.reached_by,
        }

    @property
    def planning(self) -> str:
        """How many forwards planning ran, and how many batches were verified; empty for the suspend engine."""
        said = (line.removeprefix("planning: ") for line in self.plan.report().splitlines() if line.startswith("planning: "))
        return next(said, "")

    def picture(self) -> Picture:
        """Return what is drawn of it."""
        plan = self.plan
        facts = f"engine {plan.engine}, {len(plan.variants) or 'no'} recorded graphs, {sum(guard.is_value for guard in plan.guards)} guards"
        title = (f"{self.model_class}: {self.headline}", f"{facts}; targets: {self.reason}", f"weights: {self.weights}")
        return make_picture(title, self.batches.partition("; then")[0], self.stops, self.after, self.ignored)

    def lines(self) -> list[str]:
        """Return the report for people, a line per fact."""
        plan = self.plan
        peak = max(self.stops, key=lambda stop: stop.live_bytes)
        lines = [
            self.headline,
            f"model:    {self.model_class}; weights: {self.weights}",
            f"batches:  {self.batches}",
            f"engine:   {plan.engine} ({plan.why})",
            f"targets:  {self.reason}",
            f"variants: {len(plan.variants) or '-'}{self.planning and '; '}{self.planning}",
            f"between:  up to {size(peak.live_bytes)} of one batch live at subgraph {peak.index + 1} ({peak.targets[0] or 'the model'})",
        ]
        if self.ignored:
            lines.append(f"ignored:  {shortened(self.ignored)}")
        for modality in dict.fromkeys(self.reached_by.values()):
            names = [name for name, found in self.reached_by.items() if found == modality]
            remedy = f"--modality {modality} reaches them" if modality else "; ".join((*self.untried, _OTHERWISE))
            lines.append(f"unreached: {shortened(names)}: no batch calls them; {remedy}")
        if plan.widened:
            lines.append(f"proof:    all batches, for {plan.widened}")
        if plan.kept:
            lines.append(f"state:    {shortened(plan.kept)} would pass from batch to batch; every batch starts with the state of the model")
        lines += [f"leaf:     {leaf.name}: {leaf.reason}" for leaf in plan.leaves]
        guards = [guard for guard in plan.guards if guard.is_value]
        lines += [f"guard:    {guard}" for guard in dict.fromkeys(map(str, guards))]
        return lines

    def stage_lines(self) -> list[str]:
        """Return what crosses into every subgraph, and its graph where one was recorded."""
        lines = []
        segments = self.plan.variants[0].program.segments[1:] if self.plan.variants else []
        for place, stop in enumerate(self.stops):
            lines.append(f"subgraph {stop.index + 1}: {', '.join(stop.targets) or 'the model'} ({', '.join(dict.fromkeys(stop.classes))})")
            lines += [f"  runs before it: {shortened(stop.between)}"] if stop.between else []
            lines.append(f"  live when it begins: {size(stop.live_bytes)}")
            lines += [f"  in:  {value}, {size(value.num_bytes)}, {_origin(value.source, value.since, stop.index)}" for value in stop.inputs]
            lines += [f"  out: {value}, {size(value.num_bytes)}" for value in stop.outputs]
            if place < len(segments):
                lines += [f"  | {line}" for line in str(segments[place].graph).splitlines()]
        return lines


def _given(stood: StandIn, settings: TraceSettings) -> SampleBatches:
    if settings.dataset is None:
        with Footprint(stood.model):
            return sample_batches(stood.model, settings.modality)
    return _real_batches(stood, settings.dataset, settings.modality)


def _origin(source: int, since: int, stage: int) -> str:
    made = f"given out by subgraph {source + 1}" if source >= 0 else "made outside of the targets"
    return made if since >= stage else f"{made}, and handed to subgraph {since + 1} already"


@from_settings(TraceSettings)
def trace_model(model: str | Path | nn.Module, settings: TraceSettings) -> TraceReport:
    """Trace a model on small batches; nothing is compressed or written.

    Args:
        model: folder with at least a config.json, or a model in memory.
        settings: the choices of the trace.

    Returns:
        The report.

    Raises:
        UserInputError: model, patterns or data cannot be used.
        TracingError: the engine cannot follow the model.
    """
    check_dtypes_around(trace_model)
    stood = stand_in(
        model,
        model_class=settings.model_class,
        trust_remote_code=settings.trust_remote_code_model,
        revision=settings.model_revision,
    )
    with calibration_mode(State(model=stood.model)), Footprint(stood.model):
        given = _given(stood, settings)
        ignored = list(resolve_targets(stood.model, list(settings.ignore), called="--ignore")) if settings.ignore else []
        targets, reason = _targets(stood.model, settings.sequential_targets, ignored)
        try:
            plan = trace(
                stood.model,
                given.batches,
                targets=targets,
                leaves=settings.leaves,
                engine=settings.engine,
                max_variants=settings.max_variants,
                verify=settings.verify,
                targets_per_stage=settings.targets_per_subgraph,
            )
        except Unreached as error:
            found, _ = _reached_by(stood.model, list(partition(stood.model, targets).targets), given.modality)
            better = next((modality for modality in found.values() if modality), None)
            if better is None:
                raise
            raise TracingError(f"{error}; --modality {better} reaches some") from error
        reached_by, untried = _reached_by(stood.model, plan.uncalled, given.modality)
        stops, after = measure_flow(stood.model, plan.stages, given.batches[0])
    return TraceReport(
        model_class=type(stood.model).__name__,
        weights=stood.how,
        batches=given.how,
        plan=plan,
        reason=reason,
        stops=stops,
        after=list(after),
        ignored=ignored,
        num_left_out=stood.num_left_out,
        reached_by=reached_by,
        untried=untried,
    )


def _reached_by(model: nn.Module, names: Sequence[str], tried: Modality) -> tuple[dict[str, str], tuple[str, ...]]:
    """Find for each of these targets a modality whose batches call it; and why there are no batches of a modality that the model reads."""
    found: dict[str, str] = dict.fromkeys(names, "")
    untried = []
    for modality in MODALITIES if names else ():
        if modality != tried and reads(model, modality):
            try:
                batches = sample_batches(model, modality).batches
            except ModelError as error:
                untried.append(f"--modality {modality} is not possible ({str(error).partition('; ')[0]})")
                continue
            found |= dict.fromkeys(called(model, [name for name in names if not found[name]], batches[0]), modality)
    return found, tuple(untried)


def _targets(model: nn.Module, named: Sequence[str] | None, ignored: list[str]) -> tuple[list[str] | None, str]:
    """Targets less those that are ignored whole, and why these; an ignored one that was named is an error."""
    cut = partition(model, named)
    kept = [name for name in cut.targets if not any(_is_in(name, outer) for outer in ignored)]
    if len(kept) == len(cut.targets):
        return None if named is None else list(named), cut.reason
    if named is not None:
        both = [name for name in cut.targets if name not in kept]
        raise TargetError(f"sequential_targets: {shortened(both)} are ignored as well; take them out of one of the two")
    if not kept:
        raise TargetError("ignore: every layer that could be a target is ignored; ignore fewer modules, or name --sequential-targets")
    return kept, f"{cut.reason}; {len(cut.targets) - len(kept)} of these are ignored"


def _is_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _real_batches(stood: StandIn, dataset: Any, modality: Modality | None) -> SampleBatches:
    chosen: Modality = modality or "text"
    if isinstance(dataset, str | Path) and str(dataset).endswith(".safetensors"):
        try:
            arrays = load_file(dataset)
        except (OSError, SafetensorError) as error:
            raise DatasetError(f"{dataset}: cannot be read ({one_line(error)}); give a whole safetensors file") from error
        batch = {name: value.long() if value.dtype == torch.int32 else value for name, value in arrays.items()}
        empty = next((name for name, value in batch.items() if not value.numel()), None)
        if empty is not None:
            raise DatasetError(f"{dataset}: {empty} is empty, of shape {list(batch[empty].shape)}; give at least one row")
        return SampleBatches([_few_rows(batch)], chosen, f"from {Path(dataset).name}: {describe_batch(_few_rows(batch))}")
    if chosen != "text":
        raise DatasetError(f"{dataset}: holds text, and --modality {chosen} was asked for; give a .safetensors file of the model's inputs")
    tokenizer = None if stood.folder is None else load_tokenizer(stood.folder)
    data = load_dataset_source(dataset, tokenizer=tokenizer, num_calibration_samples=_NUM_SAMPLES, max_seq_length=_MAX_TOKENS, batch_size=1)
    batches = [batch for batch in data.batches if isinstance(batch, dict)]
    return SampleBatches(batches, chosen, f"{len(batches)} samples of the dataset: {describe_batch(batches[0])}")


def _few_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first rows of token ids where nothing else is given; other inputs belong together and are taken whole."""
    return {"input_ids": batch["input_ids"][:_NUM_SAMPLES, :_MAX_TOKENS]} if batch.keys() == {"input_ids"} else batch
