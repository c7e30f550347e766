"""WandaPruningModifier: small weights that meet small inputs go; the arithmetic is in `compressor.algorithms.pruning.wanda`."""

from __future__ import annotations

from pydantic import PrivateAttr
from torch import Tensor

from compressor.algorithms.pruning.wanda import prune_wanda
from compressor.lifecycle import Event, State
from compressor.modifiers.pruning.calibrated import CalibratedPruningModifier, MeanSquare
from compressor.modifiers.pruning.masks import weight_rows
from compressor.modifiers.schemes.input_statistics import InputHook, mask_of_input, real_tokens


class WandaPruningModifier(CalibratedPruningModifier):
    """Set to zero, in every row, the weights whose size times that of their input is least (Wanda); the others stay as they are."""

    _squares: dict[str, MeanSquare] = PrivateAttr(default_factory=dict)

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Start to count; then as all of them."""
        self._squares = {}
        super().on_calibration_start(state, event)

    def accumulating(self, state: State, name: str) -> InputHook:
        """Sum the squares of real tokens, in the compressed model."""

        def add(x: Tensor) -> None:
            if state.base_stream:
                return
            tokens_NC = real_tokens(x, mask_of_input(state, name), name)
            if len(tokens_NC):
                self._squares.setdefault(name, MeanSquare()).add(tokens_NC)

        return add

    def prune(self, state: State, names: list[str]) -> None:
        """Prune one module after another."""
        for name in names:
            square = self._squares.pop(name, None)
            if square is None:
                self.prune_by_size(state, name)
                continue
            weight_RC, mean_C = weight_rows(self._pending[name]), square.value()
            gone_RC = prune_wanda(weight_RC, mean_C, self.share_of(name), self.pattern)
            energy_RC = weight_RC.float().square() * mean_C
            error = float((energy_RC * gone_RC).sum() / energy_RC.sum().clamp_min(1e-30))
            self.place(state, name, weight_RC.masked_fill(gone_RC, 0.0), error, square.num_tokens)
