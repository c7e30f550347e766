"""Decoys: tensors that are wrong in a way nobody would accept. A limit that lets one through measures nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from harness.tolerance.bits import differs, from_bytes, to_bytes
from harness.tolerance.comparison import compare
from harness.tolerance.tiers import T0, T3, T4, Tier


def decoys_of(expected: Tensor, others: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return what must not pass for a tensor: all zeros, halved, rolled by one, and another layer's tensor of the same form.

    Args:
        expected: the right tensor.
        others: tensors of other layers, by name; those of another dtype or shape are left out.

    Returns:
        The decoys by name; one that happens to equal `expected` bit by bit is left out.
    """
    expected = expected.detach().cpu()
    shape = tuple(expected.shape)
    raw = to_bytes(expected)
    made = {
        "all zeros": from_bytes(torch.zeros_like(raw), expected.dtype, shape),
        "halved": _halved(expected),
        "rolled by one": from_bytes(raw.roll(1, dims=0), expected.dtype, shape),
    }
    for name, other in (others or {}).items():
        if other.dtype == expected.dtype and other.shape == expected.shape:
            made[f"the tensor {name!r}"] = other.detach().cpu()
    return {name: decoy for name, decoy in made.items() if decoy is not None and bool(differs(decoy, expected).any())}


def vacuous_decoys(
    expected: Tensor, tier: Tier, *, others: Mapping[str, Tensor] | None = None, context: Mapping[str, Tensor] | None = None
) -> tuple[str, ...]:
    """Return the decoys that a tier lets through for this tensor; any of them condemns the tier.

    Args:
        expected: the right tensor.
        tier: what is judged.
        others: tensors of other layers, by name.
        context: what `compare` needs for T2.

    Returns:
        Names of decoys; none for a limit that measures something.
    """
    if isinstance(tier, T0):
        return ()
    decoys = decoys_of(expected, others)
    if _is_about_means(tier):
        decoys.pop("rolled by one", None)
    return tuple(name for name, decoy in decoys.items() if compare(decoy, expected, tier, context=context).ok)


def _is_about_means(tier: Tier) -> bool:
    """A mean does not change with the order of its terms, and a tier that only speaks of means does not claim to see it."""
    if isinstance(tier, T3):
        return tier.min_sqnr_db is None and tier.max_relative_error is None and tier.max_kl is None
    return isinstance(tier, T4)


def _halved(expected: Tensor) -> Tensor | None:
    dtype = expected.dtype
    if dtype == torch.bool:
        return ~expected
    if dtype.is_complex:
        with warnings.catch_warnings():  # torch calls half-precision complex numbers experimental
            warnings.simplefilter("ignore", UserWarning)
            return (expected.to(torch.complex128) / 2).to(dtype)
    if dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2:
        return (expected.to(torch.float64) / 2).to(dtype)
    try:
        return (expected.to(torch.int64) // 2).to(dtype)
    except (NotImplementedError, RuntimeError):  # packed or without arithmetic: the other decoys remain
        return None
