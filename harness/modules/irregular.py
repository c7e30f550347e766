"""Numbers without any pattern that a load could keep by chance: with full mantissas, of both signs, large and small, in no order."""

from __future__ import annotations

import functools
from contextlib import suppress

import torch
from torch import Tensor, nn

from harness.modules.tensors import all_tensors

STARTS = (0, 2)
"""Where two sets of them begin: a tensor of one number gets two that differ in sign and size, and one of two numbers two orders."""

_PERIOD = 4099  # they come again then; a prime, so that no two rows of a table are alike
_SEED = 18675  # the first four integers of each dtype have both signs, and the two pairs of them fall and rise
# Sign, and range of the exponent, of each number in turn: beyond what 8 bits hold, and below what is often taken for nothing.
_TURNS = ((-1, 8, 11), (-1, 12, 14), (1, -12, -8), (1, 8, 11))


def overwrite_irregularly(module: nn.Module, start: int) -> None:
    """Give every tensor of a module irregular values. Changes the module.

    Those that are not saved get some too: an extra state may be made of them. What cannot be written, as an expanded tensor, stays.

    Args:
        module: the module; its descendants are changed, too.
        start: where the values begin, one of `STARTS`.
    """
    tensors = {id(tensor): tensor for tensor in all_tensors(module).values()}
    with torch.no_grad():
        for number, tensor in enumerate(tensors.values()):
            with suppress(RuntimeError):
                plain = tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor  # fp4 cannot be copied
                plain.copy_(irregular(plain, start + len(_TURNS) * number))


def irregular(like: Tensor, start: int) -> Tensor:
    """Make irregular values; the same for the same arguments, whatever has been drawn.

    Args:
        like: has their shape and dtype.
        start: number of the first of them.

    Returns:
        Finite ones, on the CPU. Integers are of the whole range of their dtype, but one alone is of 16 bits: it may be a count, of which
        a load makes as many things.
    """
    if like.is_complex():
        return torch.view_as_complex(irregular(torch.view_as_real(like), start).contiguous())
    is_count = like.numel() == 1 and like.dtype.itemsize > 2 and not like.is_floating_point()
    period = _sequence(torch.int16 if is_count else like.dtype).roll(-start)
    values = period.repeat(like.numel() // _PERIOD + 1)[: like.numel()].view(like.shape)
    return (values if like.dtype.is_signed else values.abs()).to(like.dtype) if is_count else values


@functools.cache
def _sequence(dtype: torch.dtype) -> Tensor:
    """All values of a dtype, in their order."""
    generator = torch.Generator().manual_seed(_SEED)
    turns = torch.tensor(_TURNS, device="cpu").repeat(_PERIOD, 1)[:_PERIOD]
    if dtype is torch.bool:
        return turns[:, 1] == _TURNS[0][1]
    if dtype.is_floating_point and dtype.itemsize > 1:
        sign, lowest, highest = turns.to(torch.float64).unbind(1)
        mantissas, shares = torch.rand(2, _PERIOD, dtype=torch.float64, generator=generator, device="cpu")
        return (sign * (1 + mantissas) * 2 ** (lowest + shares * (highest - lowest)).round()).to(dtype)
    codes = torch.randint(256, (_PERIOD * dtype.itemsize,), dtype=torch.uint8, generator=generator, device="cpu").view(dtype)
    if dtype.is_floating_point:  # 8 bits, of which some are no number
        numbers = codes.to(torch.float32)
        return torch.where(numbers.isfinite(), numbers, 1).to(dtype)
    return codes
