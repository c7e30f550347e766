"""Learned rounding: offsets of every weight and multipliers of every range, found by the signs of gradients.

    code = clamp(step * round(weight / scale / step + zero point + offset)),   offset in [-0.5, 0.5]
    range = [low * observed minimum, high * observed maximum],   low and high in [0.5, 1]

The offset decides which of its two neighbours a weight goes to, the range how wide the grid is; `step` is the distance of the neighbours, 1
for integers. Gradients go straight through the rounding, that of scales included; where a code is cut off, none goes to the offset. A step
of learning is the sign of the gradient times the rate, which falls to zero along a line. A weight that is zero stays zero.

Source: Cheng et al. 2023, Optimize Weight Rounding via Signed Gradient Descent, arXiv:2309.05516; differs in the scale, which is rounded as
it is stored in every forward, and in that the best step is found on fixed sequences.

Shapes: R rows (out features), C columns (in features), G groups, S elements of one group. Of formats whose scale serves several rows, R
counts what shares none: blocks, or the one tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.numerics import QParams, QuantizationArgs, calculate_qparams
from compressor.numerics.formats import local_steps

_NARROWEST = 0.5  # share of the observed range that a range keeps at least


class LearnedRounding:
    """The rounding of one weight, while it is learned."""

    def __init__(self, weight_RC: Tensor, args: QuantizationArgs, global_scale: Tensor | None = None, *, learn_range: bool) -> None:
        """Begin with rounding to the nearest in the observed range.

        Args:
            weight_RC: [R, C] float; not modified.
            args: the format.
            global_scale: float32 [1] for a format that has one (NVFP4), else None; stays as it is.
            learn_range: whether ranges are learned, too.
        """
        self._args, self._shape, self._learn_range, self._global_scale = args, weight_RC.shape, learn_range, global_scale
        self._weight_RGS = self._grouped(weight_RC.detach())
        self._min_RG, self._max_RG = torch.aminmax(self._weight_RGS, dim=-1)
        self._offset_RGS = torch.zeros_like(self._weight_RGS, dtype=torch.float32)
        self._low_RG, self._high_RG = (torch.ones_like(self._min_RG, dtype=torch.float32) for _ in range(2))

    @torch.no_grad()
    def qparams(self) -> QParams:
        """Return scale and zero point, as they are stored."""
        found = self._qparams_RG()
        return found.map(lambda part: part.reshape(1)) if self._args.strategy == "tensor" else found

    @torch.no_grad()
    def codes(self) -> Tensor:
        """Return the codes, [R, C] int8, or float8_e4m3fn for floats."""
        codes_RGS, _ = self._codes(self._qparams_RG())
        return self._ungrouped(codes_RGS.to(self._args.storage_dtype))

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return what the codes stand for, [R, C] in the dtype of the weight."""
        qparams = self._qparams_RG()
        codes_RGS, _ = self._codes(qparams)
        if qparams.zero_point is not None:
            codes_RGS = codes_RGS - qparams.zero_point.unsqueeze(-1)
        return self._ungrouped((codes_RGS * _whole_scale(qparams).unsqueeze(-1)).to(self._weight_RGS.dtype))

    @torch.no_grad()
    def step(self, gradient_RC: Tensor, rate: float, range_rate: float) -> None:
        """Go one step against a gradient. Changes offsets and ranges.

        Args:
            gradient_RC: [R, C] of the loss, with respect to `values`.
            rate: of offsets.
            range_rate: of ranges.
        """
        qparams = self._qparams_RG()
        gradient_RGS = self._grouped(gradient_RC.float())
        codes_RGS, inside_RGS = self._codes(qparams)
        if self._learn_range:
            low_RG, high_RG = self._range_gradients(gradient_RGS, codes_RGS, inside_RGS, qparams)
            self._low_RG.sub_(range_rate * low_RG.sign()).clamp_(_NARROWEST, 1.0)
            self._high_RG.sub_(range_rate * high_RG.sign()).clamp_(_NARROWEST, 1.0)
        # A zero lies on the grid, and there is nowhere better to go: halves round to even, so that an odd zero point would let go of it.
        inside_RGS &= self._weight_RGS != 0
        self._offset_RGS.sub_(rate * gradient_RGS.sign().mul_(inside_RGS)).clamp_(-0.5, 0.5)

    def state(self) -> tuple[Tensor, ...]:
        """Return copies of what is learned."""
        return self._offset_RGS.clone(), self._low_RG.clone(), self._high_RG.clone()

    def restore(self, state: tuple[Tensor, ...]) -> None:
        """Go back to what `state` gave."""
        for own, kept in zip((self._offset_RGS, self._low_RG, self._high_RG), state, strict=True):
            own.copy_(kept)

    def _qparams_RG(self) -> QParams:
        dtype = self._min_RG.dtype
        low, high = (self._min_RG.float() * self._low_RG).to(dtype), (self._max_RG.float() * self._high_RG).to(dtype)
        return calculate_qparams(low, high, self._args, self._global_scale)

    def _codes(self, qparams: QParams) -> tuple[Tensor, Tensor]:
        """The codes, float32, and where they were not cut off."""
        rounded = self._weight_RGS.float() / _whole_scale(qparams).unsqueeze(-1)
        steps = local_steps(rounded, self._args.type, self._args.num_bits)
        rounded.div_(steps).add_(self._offset_RGS)
        if qparams.zero_point is not None:
            rounded += qparams.zero_point.unsqueeze(-1)
        rounded.round_().mul_(steps)
        codes = rounded.clamp(*self._args.code_range)
        return codes, codes == rounded

    def _range_gradients(self, gradient: Tensor, codes: Tensor, inside: Tensor, qparams: QParams) -> tuple[Tensor, Tensor]:
        """Gradients of both multipliers, [R, G]: through the scale, and through the zero point where there is one."""
        scale = _whole_scale(qparams)
        steps = codes if qparams.zero_point is None else codes - qparams.zero_point.unsqueeze(-1)
        by_scale = (gradient * (steps - inside * (self._weight_RGS.float() / scale.unsqueeze(-1)))).sum(-1)
        # A range reaches to zero at least: an end on the other side of it does nothing.
        low, high = self._min_RG.float().clamp(max=0.0), self._max_RG.float().clamp(min=0.0)
        first, last = self._args.code_range
        if qparams.zero_point is None:
            from_low = -low * self._low_RG > high * self._high_RG
            half = (last - first) / 2
            return by_scale * torch.where(from_low, -low, 0.0) / half, by_scale * torch.where(from_low, 0.0, high) / half
        by_zero = -(gradient * ~inside).sum(-1) * scale
        by_scale = by_scale + by_zero * low * self._low_RG / scale.square()
        return -by_scale * low / (last - first) - by_zero * low / scale, by_scale * high / (last - first)

    def _grouped(self, tensor_RC: Tensor) -> Tensor:
        """View as [R, G, S]; [1, 1, R * C] where one scale serves all, [rows, columns, S] of blocks, the last of which zeros fill up."""
        if self._args.strategy == "tensor":
            return tensor_RC.reshape(1, 1, -1)
        if self._args.block_structure is not None:
            height, width = self._args.block_structure
            padded = pad(tensor_RC, (0, -tensor_RC.shape[1] % width, 0, -tensor_RC.shape[0] % height))
            return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
        return tensor_RC.unflatten(-1, (-1, self._args.group_size or -1 if self._args.is_grouped else tensor_RC.shape[-1]))

    def _ungrouped(self, tensor_RGS: Tensor) -> Tensor:
        if self._args.block_structure is not None:
            blocks = tensor_RGS.unflatten(2, self._args.block_structure).transpose(1, 2)
            return blocks.flatten(2).flatten(0, 1)[: self._shape[0], : self._shape[1]].contiguous()
        return tensor_RGS.reshape(self._shape)


def _whole_scale(qparams: QParams) -> Tensor:
    scale = qparams.scale.float()
    return scale if qparams.global_scale is None else scale / qparams.global_scale
