"""AWQModifier: scales that protect the weights which meet large activations; the search is in `compressor.algorithms.smoothing`."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from compressor.algorithms.hessian import Hessian
from compressor.algorithms.smoothing import DuoScaling, search_awq
from compressor.errors import CalibrationError, RecipeError
from compressor.lifecycle import Event, State
from compressor.mappings import ScalePair
from compressor.modifiers.transforms.moving_scales import ScaleMovingModifier, reader_weight


class AWQModifier(ScaleMovingModifier):
    """Move scales into weights where their rounding then costs the outputs least (AWQ); a modifier behind it quantizes.

    Each candidate is judged by the second moments of the layer's inputs, which say its error on all calibration tokens without a forward.

    Attributes:
        duo_scaling: look at the weights' sizes beside the activations'; `both` tries with and without.
        n_grid: candidates between no scaling and all of the activations' sizes.
    """

    duo_scaling: DuoScaling = True
    n_grid: int = Field(default=20, gt=0)
    offload_device: Any = None  # of llm-compressor, for outputs that it caches; nothing is cached here

    _hessians: dict[str, Hessian] = PrivateAttr(default_factory=dict)
    _sums: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Refuse a recipe that rounds no weights; then as all that move scales."""
        if not any(scheme.weights is not None for scheme in state.schemes.values()) and state.data is not None:
            raise RecipeError(f"{self.label}: no modifier behind it quantizes weights, and it chooses scales for their format; add one")
        super().on_calibration_start(state, event)

    def wants(self, state: State, pair: ScalePair) -> bool:
        """All whose readers are quantized."""
        return any(name in state.schemes for name in pair.readers)

    def statistics_bytes(self, num_columns: int) -> int:
        """The second moments, in float32."""
        return 4 * num_columns * num_columns

    def watch_input(self, pair: ScalePair, tokens_NK: Tensor) -> None:
        """Add to second moments and absolute values."""
        if pair.source not in self._hessians:
            self._hessians[pair.source] = Hessian(tokens_NK.shape[1], tokens_NK.device)
            self._sums[pair.source] = torch.zeros(tokens_NK.shape[1], dtype=torch.float64, device=tokens_NK.device)
        self._hessians[pair.source].add(tokens_NK)
        self._sums[pair.source] += tokens_NK.float().abs().sum(0)

    def scales(self, state: State, pair: ScalePair) -> tuple[Tensor, dict[str, float]]:
        """Search over all readers that are quantized."""
        hessian, sums_K = self._hessians.pop(pair.source, None), self._sums.pop(pair.source, None)
        if hessian is None or sums_K is None:
            raise CalibrationError(
                f"{self.label}: no token reached {pair.readers[0]}; give data that exercises it, or ignore {pair.source}"
            )
        readers = [name for name in pair.readers if name in state.schemes and state.schemes[name].weights is not None]
        mean_K = (sums_K / hessian.num_tokens).float()
        formats = [state.schemes[name].weights for name in readers]
        found = search_awq(
            [reader_weight(state.model.get_submodule(name)) for name in readers],
            [args for args in formats if args is not None],
            hessian.matrix(pair.readers[0]),
            mean_K,
            n_grid=self.n_grid,
            duo_scaling=self.duo_scaling,
            names=readers,
            tie=lambda scales_K: pair.spread(pair.gather(scales_K)),
        )
        scales_C = pair.gather(found.scales_C)
        return scales_C, {"error_before": found.error_before, "error": found.error}
