"""WandaPruningModifier: small weights that meet small inputs go; the arithmetic is in `compressor.algorithms.pruning.wanda`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from compressor.algorithms.costs import FLOAT32_BYTES, Memory, Work
from compressor.algorithms.pruning.magnitude import removed_share
from compressor.algorithms.pruning.wanda import prune_wanda
from compressor.lifecycle import CalibrationNeed, Event, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.lifecycle.state import StageValue
from compressor.modifiers.own_forwards import mean_squares
from compressor.modifiers.pruning.calibrated import CalibratedPruningModifier, dead_input
from compressor.modifiers.pruning.masks import weight_rows


class WandaPruningModifier(CalibratedPruningModifier):
    """Set to zero, in every row, the weights whose size times that of their input is least (Wanda); the others stay as they are.

    Inputs are those of the uncompressed model: one pass over the data does for all layers, before anything else flows.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "sums"
    calibration: ClassVar[CalibrationNeed] = "own"

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Look at all inputs, and prune. Changes the model."""
        del event
        squares = mean_squares(state, self._modules, type(self).__name__)
        if self.sparsity_profile is not None:
            self.share_by_outliers(state, squares)
        with torch.no_grad():
            for name, square in squares.items():
                if square.num_tokens == 0:
                    self.prune_by_size(state, name)
                    continue
                weight_RC, mean_C = weight_rows(self._pending[name]), square.value()
                if not mean_C.any():  # all scores are equal, so that places would decide
                    self.prune_by_size(state, name, *dead_input(square.num_tokens))
                    continue
                gone_RC = prune_wanda(weight_RC, mean_C, self.share_of(name), self.structure, name=name)
                error = float(removed_share(weight_RC, gone_RC, mean_C))
                self.place(state, name, weight_RC.masked_fill(gone_RC, 0.0), error, square.num_tokens, {})

    def forwards_of_training(self, num_samples: int) -> float:
        """Say what it costs beside the stages: one pass over the data."""
        return float(num_samples)

    def own_memory(self, work: Work) -> Memory:
        """Say what it takes: weights of its own; of the largest scores, in order, places in 8 bytes twice, and what goes."""
        return Memory(working_bytes=work.changed_bytes + (2 * FLOAT32_BYTES + 2 * 8 + 1) * max(work.sizes))

    def stage_memory(self, modules: Sequence[str]) -> Mapping[str, StageValue]:
        """Nothing: a resumed run prunes again, to the same bytes."""
        del modules
        return {}
