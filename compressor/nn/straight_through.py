"""Rounding that lets gradients through: zero for values that are cut off (Bengio et al. 2013, arXiv:1308.3432)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import fake_quantize, inside_range
from compressor.numerics.scheme import QuantizationArgs


def through_rounding(x: Tensor, qparams: QParams, args: QuantizationArgs) -> Tensor:
    """Compute `fake_quantize`, with gradients straight through where somebody asks for them.

    Args:
        x: [R, C] weight, or an activation [..., C]; not modified.
        qparams: scale and zero point, as the strategy shapes them.
        args: the format.

    Returns:
        The values that the codes stand for, bit for bit those of `fake_quantize`.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return fake_quantize(x, qparams, args)
    return straight_through(x, lambda values: (fake_quantize(values, qparams, args), inside_range(values, qparams, args)))


def straight_through(x: Tensor, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Replace values by rounded ones whose gradient is that of the values themselves, or zero.

    Args:
        x: floating point.
        rounded: gives the new values, and where the gradient passes (bool), from x.

    Returns:
        The new values.
    """
    return _StraightThrough.apply(x, rounded)


def through_product(x: Tensor, product: Callable[[Tensor], Tensor], gradient: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Compute a product of codes, which autograd cannot follow, with the gradient of the product of the values.

    Args:
        x: floating point [..., C].
        product: gives [..., R] of x.
        gradient: gives dL/dx of x and dL/dy.

    Returns:
        The product.
    """
    made: Tensor = _ThroughProduct.apply(x, product, gradient)
    return made


class _ThroughProduct(torch.autograd.Function):
    """Forward by one function, backward by another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Callable[[Tensor], Tensor], gradient: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        return product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Give the gradient of the values."""
        (x,) = ctx.saved_tensors
        return ctx.gradient(x, gradients[0]), None, None


class _StraightThrough(torch.autograd.Function):
    """dL/dx = dL/dy where a value passes, else 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Round."""
        values, passes = rounded(x)
        ctx.save_for_backward(passes)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Let the gradient through."""
        (passes,) = ctx.saved_tensors
        return gradients[0].masked_fill(~passes, 0.0), None
