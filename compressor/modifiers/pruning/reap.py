"""REAPPruningModifier: experts that add least to what is sent to them go; the arithmetic is in `compressor.algorithms.pruning.reap`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor, nn

from compressor.algorithms.costs import Memory, Work
from compressor.algorithms.pruning.reap import ExpertSaliency, kept_experts, lost_share
from compressor.atomic import check_output_file, write_whole
from compressor.data.collate import ALL_COUNTED
from compressor.errors import CalibrationError, RecipeError, TargetError
from compressor.lifecycle import CalibrationNeed, Event, Modifier, ModuleRecord, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.lifecycle.state import Detail, StageValue
from compressor.model.checkpoints.format import stored_keys
from compressor.model.targets import check_patterns, matches
from compressor.modifiers.own_forwards import calibration_data, run_batches
from compressor.modifiers.pruning.expert_count import (
    ExpertCount,
    check_enough,
    choose_experts,
    count_experts,
    expert_layers,
    experts_seen,
    num_groups,
    possible_groups,
    try_routing,
)
from compressor.modifiers.pruning.expert_refit import SeenLayer, blocks_of, kept_frac, layer_seen, refit_layer, refit_memory
from compressor.nn.experts import UnfusedExperts


class REAPPruningModifier(Modifier):
    """Take out, in every layer of a mixture, the experts that add least to the tokens that are sent to them (REAP, arXiv 2510.13999).

    The result is an ordinary, smaller model. It happens when the run is initialized, in forwards of its own, so that every modifier behind
    it sees the smaller model.

    Attributes:
        sparsity: share of the experts of each layer that go; rounded down to whole experts, of each group of the router alike.
        ignore: patterns of layers of experts that are not to be pruned: all or none, for a config has one number for all.
        refit: move the last projections of the experts that stay so that each layer gives what all experts gave, by least squares.
        report_path: a JSON file that gets the numbers of the experts that stay, by layer.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "repeats"
    calibration: ClassVar[CalibrationNeed] = "own"
    reshapes: ClassVar[bool] = True

    sparsity: float = Field(gt=0, lt=1)
    ignore: list[str] = Field(default_factory=list)
    refit: bool = True
    report_path: str | None = None

    _kept: dict[str, list[int]] = PrivateAttr(default_factory=dict)
    _planned: Callable[[int], Memory] | None = PrivateAttr(default=None)  # by the tokens of the data

    @field_validator("ignore", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        patterns = [] if value is None else [value] if isinstance(value, str) else value
        check_patterns(patterns, required=False)
        return patterns

    @field_validator("report_path", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("report_path", mode="after")
    @classmethod
    def _is_json(cls, value: str | None) -> str | None:
        if value is not None:
            check_output_file(Path(value), ".json")
        return value

    def on_initialize(self, state: State) -> bool:
        """Measure the experts, and leave those that stay. Changes the model."""
        self.check_first(state)
        data = calibration_data(state, self.label)
        count = self._count(state.model)
        groups = num_groups(state.model, count, data.fullest, state.device, state.seed)
        count = self._in_groups(state.model, count, groups)
        try_routing(state.model, count, data.fullest, state.device, groups)
        seen = self._to_refit(state.model, count)
        saliencies = self._saliencies(state, count, seen)
        values = {layer: saliency.value(layer) for layer, saliency in saliencies.items()}
        dropped = count.num_experts - count.fewer
        self._kept = {layer: kept_experts(value_E, dropped, groups) for layer, value_E in values.items()}
        choose_experts(state, count, self._kept)
        errors = self._refitted(state, seen)
        self._report(state, count, saliencies, values, errors)
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Let the memory of the experts go that are gone. Changes the model."""
        del event
        if state.keep_originals:
            return
        for layer in self._kept:
            for parameter in state.model.get_submodule(layer).parameters():
                parameter.data = parameter.data.clone()  # they were parts of one tensor

    def on_finalize(self, state: State) -> bool:
        """Write the report."""
        del state
        if self.report_path is not None:
            write_whole(Path(self.report_path), (json.dumps(self._kept, indent=2) + "\n").encode())
        return True

    def reshape(self, state: State) -> None:
        """Take as many experts out of a model without values as would go; which, nobody knows yet. Changes the model.

        Args:
            state: of a plan.

        Raises:
            RecipeError: none would go.
            TargetError: no layer can lose experts.
            ModelError: fewer would stay than routers choose.
        """
        count = self._count(state.model)
        groups = possible_groups(state.model.config, count)  # which of them the routers have shows on a forward; rather too large a model
        dropped = [number for one in groups if (number := self._num_dropped(count.num_experts, one))]
        count = count_experts(state.model, count.num_experts - min(dropped))
        check_enough(state.model, count)
        self._to_refit(state.model, count)
        choose_experts(state, count, {layer: range(count.fewer) for layer in count.layers})
        self._planned = partial(refit_memory, state.model, count) if self.refit else None

    def own_memory(self, work: Work) -> Memory:
        """Say what it takes beside forwards, once a plan has reshaped the model: what a refit keeps of all layers, and one layer of it."""
        return Memory() if self._planned is None else self._planned(work.num_samples * work.num_tokens)

    def forwards_of_training(self, num_samples: int) -> float:
        """Say what it costs beside the stages.

        Args:
            num_samples: calibration sequences.

        Returns:
            Forwards of one sequence: one pass over the data.
        """
        return float(num_samples)

    def stage_memory(self, modules: Sequence[str]) -> Mapping[str, StageValue]:
        """Nothing: the same experts go again when a run is resumed."""
        del modules
        return {}

    def check_first(self, state: State) -> None:
        """Refuse to come behind a modifier that changes something.

        Args:
            state: of the session, or of a plan.

        Raises:
            RecipeError: one does.
        """
        others = [*state.claims, *state.touched]
        if others:
            raise RecipeError(f"{self.label}: {others[0]} is changed by a modifier before it; let it stand first in the recipe")

    def _count(self, model: nn.Module) -> ExpertCount:
        layers = expert_layers(model)
        if not layers:
            raise TargetError(f"{self.label}: the model has no layer of experts that can be taken apart; leave it out")
        for pattern in self.ignore:
            if not any(matches(name, model.get_submodule(name), pattern) for name in layers):
                raise TargetError(f"{self.label}: ignore {pattern!r} matches no layer of experts, such as {next(iter(layers))}; remove it")
        ignored = [name for name in layers if any(matches(name, model.get_submodule(name), pattern) for pattern in self.ignore)]
        if ignored:
            what = "all layers of experts" if len(ignored) == len(layers) else f"{ignored[0]}, and its config has one number for all layers"
            raise TargetError(f"{self.label}: ignore names {what}; leave it out, or the modifier")
        number = max(layers.values())
        dropped = self._num_dropped(number, 1)
        if dropped == 0:
            raise RecipeError(f"{self.label}: sparsity={self.sparsity} of {number} experts is none; give {1 / number:.3g} at least")
        return count_experts(model, number - dropped)

    def _num_dropped(self, number: int, groups: int) -> int:
        return groups * int(number // groups * self.sparsity)

    def _to_refit(self, model: nn.Module, count: ExpertCount) -> dict[str, SeenLayer]:
        """The layers whose experts are refitted; refuses those that cannot be."""
        if not self.refit:
            return {}
        for layer in count.layers:
            if getattr(model.get_submodule(layer), "has_post_expert_norm", False):
                raise TargetError(f"{self.label}: experts of {layer} end with a norm, so that they cannot be refitted; set refit: false")
        return {layer: SeenLayer(block) for layer, block in blocks_of(count).items()}

    def _in_groups(self, model: nn.Module, count: ExpertCount, groups: int) -> ExpertCount:
        """Take as many from each group of the router."""
        if groups == 1:
            return count
        size = count.num_experts // groups
        dropped = self._num_dropped(count.num_experts, groups)
        if dropped == 0:
            raise RecipeError(
                f"{self.label}: sparsity={self.sparsity} of {size} experts in each of {groups} groups is none; give {1 / size:.3g} at least"
            )
        return count_experts(model, count.num_experts - dropped)

    def _saliencies(self, state: State, count: ExpertCount, seen: Mapping[str, SeenLayer]) -> dict[str, ExpertSaliency]:
        found = {layer: ExpertSaliency(count.num_experts) for layer in count.layers}
        frac = kept_frac(state.model, count, calibration_data(state, self.label).num_tokens)

        def watch(stack: ExitStack) -> None:
            for layer, saliency in found.items():
                stack.enter_context(experts_seen(state.model, layer, _real(state, layer, saliency)))
            for layer, kept in seen.items():
                stack.enter_context(layer_seen(state, layer, kept, frac))

        run_batches(state, tuple(found), watch, type(self).__name__, everywhere=True)
        unseen = [layer for layer, saliency in found.items() if not int(saliency.num_tokens_E.sum())]
        if unseen:
            raise CalibrationError(f"{self.label}: no token reached the experts of {unseen[0]}; give data that exercises them")
        return found

    def _refitted(self, state: State, seen: Mapping[str, SeenLayer]) -> dict[str, tuple[float, float]]:
        """Move what stays; return the relative error of each layer on held-out tokens, before and after."""
        errors = {}
        with state.progress.task("refit experts", total=len(seen)) as task:
            for layer, one in seen.items():
                errors[layer] = refit_layer(state, layer, one)
                task.advance()
        if errors:
            before, after = (sum(error[place] for error in errors.values()) / len(errors) for place in (0, 1))
            state.report.notes.append(
                f"{self.label}: the experts that stay were refitted in {sum(one > other for one, other in errors.values())} of "
                f"{len(errors)} layers; relative error of their outputs on held-out tokens {before:.3g} -> {after:.3g}"
            )
        return errors

    def _report(
        self,
        state: State,
        count: ExpertCount,
        saliencies: Mapping[str, ExpertSaliency],
        values: Mapping[str, Tensor],
        errors: Mapping[str, tuple[float, float]],
    ) -> None:
        name = type(self).__name__
        refitted = {layer for layer, (before, after) in errors.items() if after < before}
        for layer, kept in self._kept.items():
            lost, tokens_E = lost_share(values[layer], kept), saliencies[layer].num_tokens_E
            unreached = int((tokens_E == 0).sum())
            details: dict[str, Detail] = {"experts": len(kept), "experts_before": count.num_experts, "experts_without_tokens": unreached}
            if layer in errors:
                details |= dict(zip(("error_before_refit", "error_after_refit"), errors[layer], strict=True))
            scheme = f"{len(kept)} of {count.num_experts} experts"
            state.report.modules[layer] = ModuleRecord(layer, name, scheme, lost, int(tokens_E.sum()), details)
        state.report.transforms.append(_transform(state.model, name, count, self._kept, refitted))
        state.report.notes.append(
            f"{self.label}: {count.fewer} of {count.num_experts} experts stay in each of {len(count.layers)} layers "
            f"({'.'.join(count.path)} in the config)"
        )


def _real(state: State, layer: str, saliency: ExpertSaliency) -> Any:
    def take(expert: int, rows_N: Tensor, num_rows: int, weights_N: Tensor, outputs_NC: Tensor) -> None:
        if state.token_mask is not None:
            if num_rows != state.token_mask.numel():
                raise CalibrationError(
                    f"{layer}: was handed {num_rows} rows for a batch of {state.token_mask.numel()} tokens, not all of which count; "
                    f"{ALL_COUNTED}"
                )
            real_N = state.token_mask.flatten().to(rows_N.device)[rows_N]
            weights_N, outputs_NC = weights_N[real_N], outputs_NC[real_N]
        saliency.add(expert, weights_N, outputs_NC)

    return take


def _transform(
    model: nn.Module, modifier: str, count: ExpertCount, kept: Mapping[str, Sequence[int]], refitted: Collection[str]
) -> dict[str, Any]:
    """What a reader of compression.json needs to do the same to the base; names are those of its files."""
    inside = {layer: _a_tensor(model, layer) for layer in count.layers}
    stored = stored_keys(model, [*inside.values(), *count.tensors])
    routers = {layer: {stored[name]: axis for name, (owner, axis) in count.tensors.items() if owner == layer} for layer in count.layers}

    def prefix(layer: str) -> str:
        return stored[inside[layer]].rsplit(".", 3)[0]

    def moved(layer: str) -> list[str]:
        """The last projection as files have it, one by one and fused."""
        return sorted({stored[inside[layer]].split(".")[-2], "down_proj"}) if layer in refitted else []

    layers = [
        {"experts": prefix(layer), "kept": list(kept[layer]), "tensors": routers[layer], "refit": moved(layer)} for layer in count.layers
    ]
    return {"kind": "experts", "modifier": modifier, "setting": list(count.path), "num_experts": count.num_experts, "layers": layers}


def _a_tensor(model: nn.Module, layer: str) -> str:
    experts = model.get_submodule(layer)
    assert isinstance(experts, UnfusedExperts)
    return f"{layer}.0.{experts.layout.down}.weight"
