"""One module alone, in float64: what it is called with, what it gives, and how close two answers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from compressor.mappings.pairs import scale_source
from compressor.tracing.graph.replay import copy_alone

_CLOSE = 1e-6  # relative, in float64: norms may compute in float32 whatever they are given


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Find what a layer works on among the arguments of a call.

    Args:
        args: positional ones.
        kwargs: those by keyword.

    Returns:
        The first one, if it is a tensor of floats with a dimension.
    """
    given = args[0] if args else next(iter(kwargs.values()), None)
    return given if isinstance(given, Tensor) and given.is_floating_point() and given.dim() > 0 else None


def input_first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put what a layer works on among the positional arguments.

    Args:
        args: positional ones.
        kwargs: those by keyword.

    Returns:
        The arguments of the same call.
    """
    if args:
        return args, dict(kwargs)
    name = next(iter(kwargs))
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


def doubled_arguments(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with all floats in float64.

    Args:
        arguments: positional ones and those by keyword.

    Returns:
        The same, copies.
    """

    def widened(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, widened, arguments)
    return found


def double(module: nn.Module) -> nn.Module:
    """Copy a module without its hooks.

    Args:
        module: that has no others inside; not modified.

    Returns:
        A copy in float64.
    """
    return copy_alone(module, with_hooks=False).double()


def outputs_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Call a module.

    Args:
        module: a copy in float64.
        args: of the call.
        kwargs: of the call.

    Returns:
        All tensors of floats that it gives; none where its code insists on another dtype.
    """
    try:
        return [leaf for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    except (RuntimeError, TypeError, ValueError):
        return []


def output_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Call a module.

    Args:
        module: a copy in float64.
        args: of the call.
        kwargs: of the call.

    Returns:
        The first tensor of floats that it gives; None where there is none.
    """
    return next(iter(outputs_of(module, args, kwargs)), None)


def close(one: Tensor | None, other: Tensor) -> bool:
    """Tell whether two answers are the same but for rounding.

    Args:
        one: an answer, or None.
        other: another one.

    Returns:
        True where no number differs by more than 1e-6 of the largest.
    """
    if one is None or one.shape != other.shape:
        return False
    return float((one - other).abs().max()) <= _CLOSE * float(other.abs().max())


def scaling_offset(module: nn.Module, width: int, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> float | None:
    """Find out whether the weight of a module scales its output channel by channel, as that of a norm or a linear layer does.

    Args:
        module: with a weight; not modified.
        width: channels of its output.
        arguments: of a call.

    Returns:
        What is added to the weight before it multiplies; None where it does something else.
    """
    args, kwargs = doubled_arguments(arguments)
    weight = module.get_parameter("weight")
    factor_C = torch.linspace(0.5, 2.0, width, dtype=torch.float64, device=weight.device)
    plain = output_of(double(module), args, kwargs)
    for offset in (0.0, 1.0) if weight.dim() == 1 else (0.0,):
        changed = double(module)
        scale_source(changed, factor_C, offset)
        if plain is not None and plain.shape[-1:] == (width,) and close(output_of(changed, args, kwargs), plain * factor_C):
            return offset
    return None
