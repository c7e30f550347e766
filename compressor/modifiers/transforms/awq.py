"""AWQModifier: scales that protect the weights which meet large activations; the search is in `compressor.algorithms.smoothing`.

Older recipes of llm-compressor give it schemes, for AWQ rounded there as well: it is then this modifier and a QuantizationModifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, Field, PrivateAttr
from torch import Tensor, nn

from compressor.algorithms.clipping import Clipping, search_clipping
from compressor.algorithms.costs import FLOAT32_BYTES
from compressor.algorithms.hessian import Hessian, panel_bytes
from compressor.algorithms.smoothing import DuoScaling, search_awq
from compressor.errors import CalibrationError, RecipeError
from compressor.lifecycle import Event, Modifier, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.mappings import ScalePair
from compressor.modifiers.own_forwards import show_inputs
from compressor.modifiers.quantization import QuantizationModifier
from compressor.modifiers.schemes.hessians import count_all, join_hessians
from compressor.modifiers.schemes.settings import SchemeSettings
from compressor.modifiers.transforms.moving_scales import ScaleMovingModifier, in_portions, reader_weight
from compressor.numerics.part_sums import PartSum
from compressor.settings.kinds import DEVICE


def _device(value: Any) -> Any:
    if value is not None and not DEVICE.holds(value):
        raise ValueError(f"{value!r} was given, where {DEVICE.words} belongs; correct it")
    return value


class AWQModifier(ScaleMovingModifier, SchemeSettings):
    """Move scales into weights where their rounding then costs the outputs least (AWQ); a modifier behind it quantizes.

    Each candidate is judged by the second moments of the layer's inputs, which say its error on all calibration tokens without a forward.
    Settings of schemes go to a QuantizationModifier right behind it, and with them `ignore`.

    Attributes:
        duo_scaling: look at the weights' sizes beside the activations'; `both` tries with and without.
        n_grid: candidates between no scaling and all of the activations' sizes.
        clip: choose the share of its range that each group of weights keeps, too, as in the paper; None: where that can be, which is for
            integers in groups or rows that a QuantizationModifier rounds, with an observer that takes the whole range.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "sums"
    borrows: ClassVar[bool] = True

    duo_scaling: DuoScaling = True
    n_grid: int = Field(default=20, gt=0)
    clip: bool | None = None
    # Of llm-compressor, for outputs that it caches and for portions of weights; nothing is cached here.
    offload_device: Annotated[Any, AfterValidator(_device)] = None
    max_chunk_memory: int | None = Field(default=None, gt=0)

    _hessians: dict[str, Hessian] = PrivateAttr(default_factory=dict)
    _sums: dict[str, PartSum] = PrivateAttr(default_factory=dict)
    _clippings: dict[str, Clipping] = PrivateAttr(default_factory=dict)
    _last: dict[str, Clipping] = PrivateAttr(default_factory=dict)

    @property
    def lacks_schemes(self) -> bool:
        """True where it only moves scales, of which `ignore` names sources then."""
        given = self.scheme, self.config_groups, self.kv_cache_scheme, self.weight_observer, self.input_observer
        return self.targets == ["Linear"] and not any(value is not None for value in given)

    def check_settings(self) -> None:
        """Let schemes be: they are the business of what quantizes."""

    def parts(self) -> list[Modifier]:
        """Hand the settings of schemes to a QuantizationModifier.

        Returns:
            Itself, and the other where there are such settings.
        """
        if self.lacks_schemes:
            return [self]
        names = [name for name in SchemeSettings.model_fields if name in self.model_fields_set]
        rounding = QuantizationModifier(**{name: getattr(self, name) for name in names})
        for name in names:
            setattr(self, name, type(self).model_fields[name].get_default(call_default_factory=True))
        return [self, rounding]

    def check_recipe(self, state: State) -> None:
        """Refuse a recipe that rounds no weights, or none whose ranges `clip` could narrow; all modifiers have been initialized.

        Args:
            state: of the session, or of a plan.

        Raises:
            RecipeError: it does.
        """
        if not any(scheme.weights is not None for scheme in state.schemes.values()):
            raise RecipeError(f"{self.label}: no modifier behind it quantizes weights, and it chooses scales for their format; add one")
        if self.clip and not state.narrowable:
            raise RecipeError(
                f"{self.label}.clip: True was given, and no QuantizationModifier behind it rounds integers in groups or rows "
                "with an observer that takes the whole range; leave it out"
            )

    def on_calibration_start(self, state: State, event: Event) -> None:
        """As all that move scales; then narrow the ranges of layers that no scale moved into."""
        if state.data is not None:
            self.check_recipe(state)
        self._clippings, self._last = {}, {}
        super().on_calibration_start(state, event)
        if self.clip is not False:
            self._clip_others(state)
            self._note_clipping(state)

    def wants(self, state: State, pair: ScalePair) -> bool:
        """All whose readers are quantized."""
        return any(name in state.schemes for name in pair.readers)

    def search_flops(self, rows: Sequence[int], columns: int, num_tokens: int) -> float:
        """Say what the second moments of one input and the search over its readers take, as if scales moved into all of them.

        Args:
            rows: out features of each reader.
            columns: in features of all of them.
            num_tokens: calibration tokens.

        Returns:
            FLOPs of matrix products.
        """
        candidates = 2 + self.n_grid * (2 if self.duo_scaling == "both" else 1)
        return float(columns) ** 2 * (num_tokens + 2 * candidates * sum(rows))

    def statistics_bytes(self, num_columns: int) -> int:
        """The second moments, in float32, in panels."""
        return panel_bytes(num_columns)

    def search_bytes(self, stack: Sequence[tuple[int, int, int]]) -> int:
        """The matrix, and divided by scales; of the largest weight what it becomes, how far off, and products; narrow ones in float32.

        Args:
            stack: rows, columns and bytes of an element of each.

        Returns:
            Bytes beyond weights and statistics.
        """
        columns, largest = stack[0][1], max(rows * columns for rows, columns, _ in stack)
        copies = sum(rows * columns for rows, columns, element in stack if element < FLOAT32_BYTES)
        return FLOAT32_BYTES * (2 * columns**2 + 7 * largest + copies)

    def watch_input(self, pair: ScalePair, tokens_NK: Tensor, part: int) -> None:
        """Add to second moments and absolute values."""
        if pair.source not in self._hessians:
            self._hessians[pair.source] = Hessian(tokens_NK.shape[1], tokens_NK.device)
            self._sums[pair.source] = PartSum()
        self._hessians[pair.source].add(tokens_NK, part)
        added_K = tokens_NK.float().abs().sum(0).double()
        self._sums[pair.source].of_part(part, lambda: [torch.zeros_like(added_K)])[0].add_(added_K)

    def add_up(self, state: State, pairs: Sequence[ScalePair]) -> list[int]:
        """Bring the second moments of each pair to one rank, which searches."""
        weights = {pair.source: [reader_weight(state.model.get_submodule(name)) for name in pair.readers] for pair in pairs}
        columns = {source: own[0].shape[1] for source, own in weights.items()}
        hessians = [self._hessians.setdefault(source, Hessian(size, state.device)) for source, size in columns.items()]
        sums = [self._sums.setdefault(source, PartSum()) for source in columns]
        owners = state.ranks.share_out(
            [self.search_flops([len(one) for one in own], columns[source], 0) for source, own in weights.items()]
        )
        count_all(state.ranks, hessians)
        join_hessians(state.ranks, hessians, owners)
        state.ranks.add_up(sums, owners)
        return owners

    def found_beside(self) -> dict[str, Any]:
        """The ranges of the last search."""
        found, self._last = self._last, {}
        return {name: [one.kept_RG, one.error, one.error_before] for name, one in found.items()}

    def keep_beside(self, state: State, found: Mapping[str, Any]) -> None:
        """Keep ranges for the modifier that rounds."""
        for name, (kept_RG, error, before) in found.items():
            self._clippings[name] = Clipping(kept_RG, error, before)
            state.kept_ranges[name] = kept_RG

    def scales(self, state: State, pair: ScalePair) -> tuple[Tensor, dict[str, float]]:
        """Search over all readers that are quantized."""
        hessian, sums = self._hessians.pop(pair.source, None), self._sums.pop(pair.source, PartSum()).total()
        if hessian is None or sums is None or not hessian.num_tokens:
            raise CalibrationError(
                f"{self.label}: no token reached {pair.readers[0]}; give data that exercises it, or ignore {pair.source}"
            )
        readers = [name for name in pair.readers if name in state.schemes and state.schemes[name].weights is not None]
        mean_K = (sums[0] / hessian.num_tokens).float()
        formats = [state.schemes[name].weights for name in readers]
        hessian_CC = hessian.matrix(pair.readers[0])
        found = search_awq(
            [reader_weight(state.model.get_submodule(name)) for name in readers],
            [args for args in formats if args is not None],
            hessian_CC,
            mean_K,
            n_grid=self.n_grid,
            duo_scaling=self.duo_scaling,
            names=readers,
            tie=lambda scales_K: pair.spread(pair.gather(scales_K)),
        )
        if self.clip is not False:
            balanced_CC = hessian_CC / found.scales_C.outer(found.scales_C)
            for name in readers:
                self._clip_one(state, name, reader_weight(state.model.get_submodule(name)) * found.scales_C, balanced_CC)
        scales_C = pair.gather(found.scales_C)
        return scales_C, {"error_before": found.error_before, "error": found.error}

    def _clip_one(self, state: State, name: str, weight_RK: Tensor, hessian_KK: Tensor) -> None:
        """Choose ranges of one weight, which the modifier that rounds it will keep to."""
        args = state.schemes[name].weights
        if name in state.narrowable and args is not None:
            self._last[name] = search_clipping(weight_RK, args, hessian_KK, name)

    def _clip_others(self, state: State) -> None:
        """Layers that no scale moved into have statistics of their own."""
        model = state.model
        others = {name: model.get_submodule(name) for name in state.schemes if name in state.narrowable - self._clippings.keys()}
        widths = {name: reader_weight(module).shape[1] for name, module in others.items() if not isinstance(module, nn.Embedding)}
        for taken in in_portions(widths, lambda name: self.statistics_bytes(widths[name])):
            hessians = [Hessian(widths[name], state.device) for name in taken]
            show_inputs(state, [(name, hessian.add) for name, hessian in zip(taken, hessians, strict=True)], type(self).__name__)
            count_all(state.ranks, hessians)
            owners = state.ranks.share_out([float(reader_weight(others[name]).numel()) for name in taken])
            join_hessians(state.ranks, hessians, owners)

            def found(place: int, names: Sequence[str] = taken, hessians: Sequence[Hessian] = hessians) -> dict[str, Any]:
                if hessians[place].num_tokens:
                    name = names[place]
                    self._clip_one(state, name, reader_weight(others[name]), hessians[place].matrix(name))
                return self.found_beside()

            for one in state.ranks.solved(owners, found, ()):
                self.keep_beside(state, one)

    def _note_clipping(self, state: State) -> None:
        found = self._clippings.values()
        before = sum(clipping.error_before for clipping in found)
        if before > 0:
            now = sum(clipping.error for clipping in found) / before
            state.report.notes.append(
                f"{self.label}: ranges of {len(found)} weights were narrowed, which leaves {now:.0%} of the groups' squared errors"
            )
