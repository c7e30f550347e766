"""Where the weights of single experts lie in the fused tensors of transformers: taking those apart, and putting rows together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertLayout:
    """Where the projections of one expert lie in the fused tensors, and what they are called by themselves.

    Attributes:
        gate: name of the gate projection; None for experts without a gate.
        up: name of the up projection.
        down: name of the down projection.
        is_transposed: weights lie as [in, out].
        is_concatenated: gate and up lie one after the other; else they alternate, row by row.
        has_bias: there are `gate_up_proj_bias` (or `up_proj_bias`) and `down_proj_bias`.
    """

    gate: str | None
    up: str
    down: str
    is_transposed: bool = False
    is_concatenated: bool = True
    has_bias: bool = False

    @property
    def fused_first(self) -> str:
        """Name of the fused tensor that the hidden states meet first."""
        return "up_proj" if self.gate is None else "gate_up_proj"

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """Names of the fused weights, and of the projections that lie in each, in their order."""
        first = (self.up,) if self.gate is None else (self.gate, self.up)
        return {self.fused_first: first, "down_proj": (self.down,)}

    def fused_names(self) -> list[str]:
        """Names of all fused tensors, biases after their weights."""
        return [name for weight in self.sources for name in ((weight, f"{weight}_bias") if self.has_bias else (weight,))]


def split_weights(layout: ExpertLayout, fused_name: str, whole: Tensor) -> dict[str, Tensor]:
    """Take a fused tensor apart.

    Args:
        layout: of the module that it belongs to.
        fused_name: name of the tensor, of weights or of biases.
        whole: [E, ...], the tensor.

    Returns:
        `0.gate_proj.weight` and so on to views of the tensor.
    """
    is_bias = fused_name.endswith("_bias")
    names = layout.sources[fused_name.removesuffix("_bias")]
    found = {}
    for index, part in enumerate(whole):
        rows = part.t() if layout.is_transposed and not is_bias else part
        for place, name in enumerate(names):
            own = rows.chunk(len(names))[place] if layout.is_concatenated else rows[place :: len(names)]
            found[f"{index}.{name}.{'bias' if is_bias else 'weight'}"] = own if len(names) > 1 else rows
    return found


def joined_rows(parts: list[Tensor], layout: ExpertLayout) -> Tensor:
    """Put rows of gate and up together as they lie in the fused tensor.

    Args:
        parts: weights or biases of gate and up, or a single one.
        layout: of the fused tensor.

    Returns:
        The rows; a single part as it is.
    """
    values = [part.detach() for part in parts]
    if len(values) == 1:
        return values[0]
    return torch.cat(values) if layout.is_concatenated else torch.stack(values, dim=1).flatten(0, 1)
