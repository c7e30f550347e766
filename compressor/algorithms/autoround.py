"""Learned rounding: offsets of every weight and multipliers of every range, found by the signs of gradients.

    code = clamp(round(weight / scale + zero point + offset)),   offset in [-0.5, 0.5]
    range = [low * observed minimum, high * observed maximum],   low and high in [0.5, 1]

The offset decides which of its two neighbours a weight goes to, the range how wide the grid is. Gradients go straight through the rounding;
where a code is cut off, none goes to the offset. A step is the sign of the gradient times the rate, which falls to zero along a line.

Source: Cheng et al. 2023, Optimize Weight Rounding via Signed Gradient Descent, arXiv:2309.05516; differs in the scale, which is rounded as
it is stored in every forward, and in that the best step is found on fixed sequences.

Shapes: R rows (out features), C columns (in features), G groups, S columns of one group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import SchemeError
from compressor.numerics import QParams, QuantizationArgs, calculate_qparams

_NARROWEST = 0.5  # share of the observed range that a range keeps at least


class LearnedRounding:
    """The rounding of one weight, while it is learned."""

    def __init__(self, weight_RC: Tensor, args: QuantizationArgs, *, learn_range: bool, name: str) -> None:
        """Begin with rounding to the nearest in the observed range.

        Args:
            weight_RC: [R, C] float; not modified.
            args: the format.
            learn_range: whether ranges are learned, too.
            name: dotted name of the module, for errors.

        Raises:
            SchemeError: a format whose codes are no integers, or in which scales are shared by blocks.
        """
        if args.type != "int" or args.strategy not in ("group", "channel", "tensor"):
            raise SchemeError(
                f"{name}: {args.type}{args.num_bits} per {args.strategy} was given, and rounding is learned for integers per group, "
                "channel or tensor; use GPTQModifier for it"
            )
        self._args, self._shape, self._learn_range = args, weight_RC.shape, learn_range
        self._weight_RGS = _grouped(weight_RC.detach(), args)
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
        """Return the codes, [R, C] int8."""
        codes_RGS, _ = self._codes(self._qparams_RG())
        return codes_RGS.to(torch.int8).reshape(self._shape)

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return what the codes stand for, [R, C] in the dtype of the weight."""
        qparams = self._qparams_RG()
        codes_RGS, _ = self._codes(qparams)
        if qparams.zero_point is not None:
            codes_RGS = codes_RGS - qparams.zero_point.unsqueeze(-1)
        return (codes_RGS * qparams.scale.float().unsqueeze(-1)).to(self._weight_RGS.dtype).reshape(self._shape)

    @torch.no_grad()
    def step(self, gradient_RC: Tensor, rate: float, range_rate: float) -> None:
        """Go one step against a gradient. Changes offsets and ranges.

        Args:
            gradient_RC: [R, C] of the loss, with respect to `values`.
            rate: of offsets.
            range_rate: of ranges.
        """
        qparams = self._qparams_RG()
        gradient_RGS = _grouped(gradient_RC.float(), self._args)
        codes_RGS, inside_RGS = self._codes(qparams)
        if self._learn_range:
            low_RG, high_RG = self._range_gradients(gradient_RGS, codes_RGS, inside_RGS, qparams)
            self._low_RG.sub_(range_rate * low_RG.sign()).clamp_(_NARROWEST, 1.0)
            self._high_RG.sub_(range_rate * high_RG.sign()).clamp_(_NARROWEST, 1.0)
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
        return calculate_qparams(low, high, self._args)

    def _codes(self, qparams: QParams) -> tuple[Tensor, Tensor]:
        """The codes, float32, and where they were not cut off."""
        rounded = self._weight_RGS.float() / qparams.scale.float().unsqueeze(-1) + self._offset_RGS
        if qparams.zero_point is not None:
            rounded += qparams.zero_point.unsqueeze(-1)
        rounded.round_()
        codes = rounded.clamp(*self._args.code_range)
        return codes, codes == rounded

    def _range_gradients(self, gradient: Tensor, codes: Tensor, inside: Tensor, qparams: QParams) -> tuple[Tensor, Tensor]:
        """Gradients of both multipliers, [R, G]: through the scale, and through the zero point where there is one."""
        scale = qparams.scale.float()
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


def _grouped(weight_RC: Tensor, args: QuantizationArgs) -> Tensor:
    """View as [R, G, S]; [1, 1, R * C] where one scale serves all."""
    if args.strategy == "tensor":
        return weight_RC.reshape(1, 1, -1)
    return weight_RC.unflatten(-1, (-1, args.group_size if args.strategy == "group" and args.group_size else weight_RC.shape[-1]))
