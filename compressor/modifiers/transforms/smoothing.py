"""SmoothQuantModifier and LogarithmicEqualizationModifier: the arithmetic is in `compressor.algorithms.smoothing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor

from compressor.algorithms.smoothing import equalizing_scales, smooth_scales
from compressor.errors import CalibrationError, RecipeError
from compressor.lifecycle import State
from compressor.lifecycle.interface import AcrossRanks
from compressor.mappings import ScalePair
from compressor.modifiers.transforms.moving_scales import ScaleMovingModifier, reader_weight


class SmoothQuantModifier(ScaleMovingModifier):
    """Move the ranges of activations from norms into the layers that read them (SmoothQuant), for inputs that are quantized.

    Attributes:
        smoothing_strength: share of the range that weights take over.
        algorithm: `smoothquant`, or `log_equalization`, which looks at activations only.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "sums"

    smoothing_strength: float = Field(default=0.5, ge=0, le=1)
    num_calibration_steps: int | None = None
    calibration_function: Any = None
    algorithm: Literal["smoothquant", "log_equalization"] = "smoothquant"

    _largest: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    @field_validator("num_calibration_steps", "calibration_function", mode="after")
    @classmethod
    def _not_here(cls, value: Any) -> Any:
        if value is not None:
            raise RecipeError("it is not done here, where all calibration data count and flow through the model; leave it out")
        return value

    @model_validator(mode="after")
    def _strength_counts(self) -> SmoothQuantModifier:
        strength = self.smoothing_strength
        if self.algorithm == "log_equalization" and strength != type(self).model_fields["smoothing_strength"].default:
            raise ValueError(f"smoothing_strength={strength} counts for nothing where only activations are looked at; leave it out")
        return self

    def wants(self, state: State, pair: ScalePair) -> bool:
        """Norms, whose readers' inputs are quantized; all whose readers are, where no scheme quantizes inputs."""
        if state.model.get_submodule(pair.source).get_parameter("weight").dim() != 1:
            return False
        return any(name in state.schemes for name in pair.readers) or not state.schemes

    def statistics_bytes(self, num_columns: int) -> int:
        """One float32 for each channel."""
        return 4 * num_columns

    def watch_input(self, pair: ScalePair, tokens_NK: Tensor, part: int) -> None:
        """Take the largest absolute values."""
        del part
        largest_K = tokens_NK.abs().amax(0).float()
        known = self._largest.get(pair.source)
        self._largest[pair.source] = largest_K if known is None else torch.maximum(known, largest_K)

    def add_up(self, state: State, pairs: Sequence[ScalePair]) -> list[int]:
        """Take the largest of all ranks; each looks for all scales, which is quickly done."""
        for own in state.ranks.gather(self._largest) if state.ranks.size > 1 else ():
            for source, largest_K in own.items():
                self._largest[source] = torch.maximum(self._largest.get(source, largest_K), largest_K)
        return [0] * len(pairs)

    def scales(self, state: State, pair: ScalePair) -> tuple[Tensor, dict[str, float]]:
        """By the paper's formula, or by that of logarithmic equalization."""
        seen_K = self._largest.pop(pair.source, None)
        if seen_K is None or not bool(torch.isfinite(seen_K).all()):
            what = "no token" if seen_K is None else "NaN or infinity"
            raise CalibrationError(f"{self.label}: {what} reached {pair.readers[0]}; give data that exercises it, or ignore {pair.source}")
        act_C = pair.gather(seen_K)
        readers = [name for name in pair.readers if name in state.schemes] or list(pair.readers)
        weights = [reader_weight(state.model.get_submodule(name)).abs().amax(0).float() for name in readers]
        weight_C = pair.gather(torch.stack(weights).amax(0))
        if self.algorithm == "log_equalization":
            return equalizing_scales(act_C, weight_C), {}
        return smooth_scales(act_C, weight_C, self.smoothing_strength), {}


class LogarithmicEqualizationModifier(SmoothQuantModifier):
    """SmoothQuantModifier with `algorithm: log_equalization`."""

    algorithm: Literal["smoothquant", "log_equalization"] = "log_equalization"
