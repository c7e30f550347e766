"""Which scales of an attention that quantizes its keys and values, and queries, are to blame: each is tried by itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from compressor.modifiers.schemes.targets import scheme_label
from compressor.nn.attention.kv_cache import detach_kv_quantizer, kv_args, kv_qparams, quantized_parts, with_view
from compressor.numerics.quantize import fake_quantize

MOST, LITTLE = 0.75, 0.25
"""Shares of a difference: who makes more than the first made it; who makes less than the second had no part in it."""
_STATES: Mapping[str, str] = MappingProxyType({"q": "queries", "k": "keys", "v": "values"})


def kv_format(attention: nn.Module) -> str | None:
    """Name the format of a module's keys and values.

    Args:
        attention: any module.

    Returns:
        As compression.json names formats; None where they are not quantized.
    """
    args = kv_args(attention)
    return None if args is None else scheme_label(args)


def guilty_states(attention: nn.Module, base: nn.Module, alone: float, instead: Callable[[nn.Module], float]) -> str | None:
    """Say which of queries, keys and values make the difference.

    Args:
        attention: the compressed one.
        base: the base's.
        alone: difference that the compressed one makes by itself.
        instead: difference with a module in its place.

    Returns:
        Those that make most of it; where none does, those that make more than a little, joined by "and"; None where there are none.
    """
    shares = {part: instead(_with_states_of(attention, base, part)) for part in quantized_parts(attention)}
    for share in (MOST, LITTLE):
        bound = math.inf if math.isinf(alone) else share * alone
        guilty = [_STATES[part] for part, value in shares.items() if value >= bound]
        if guilty:
            return " and ".join(guilty)
    return None


def _with_states_of(attention: nn.Module, base: nn.Module, part: str) -> nn.Module:
    """A copy of the base's attention that quantizes one part as the compressed one does, and the others as the base does, if at all."""
    sources = {which: attention if which == part else base for which in _STATES}
    twin = copy.deepcopy(base)
    detach_kv_quantizer(twin)

    def quantized(which: str, states: Tensor) -> Tensor:
        args = kv_args(sources[which])
        if args is None or which not in quantized_parts(sources[which]):
            return states
        return fake_quantize(states, kv_qparams(sources[which], which, states, args), args)

    def on_the_way(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return with_view(module, given, named, quantized, queries="q" in quantized_parts(sources["q"]))

    twin.register_forward_pre_hook(on_the_way, with_kwargs=True)
    return twin
