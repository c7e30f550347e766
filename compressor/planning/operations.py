"""Operations on tensors of which some have values and some have only shapes.

Forwards look at some values: is a mask all ones, where does a sequence begin. What does not depend on a weight is therefore computed for
real, on the CPU, and joins the tensors of the meta device where the two meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_SMALL = 1 << 22  # elements of a tensor made from nothing, up to which its values are at hand
_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._unsafe_index)

_MADE = ("ones_like", "zeros_like", "empty_like", "full_like", "new_ones", "new_zeros", "new_empty", "new_full")
# Cheap enough to run twice: where less is live ahead of it, a recorded graph keeps that.
_LIGHT = ("pow", "mean", "rsqrt", "mul", "add", "sub", "div", "_to_copy", "var", "sqrt", "native_layer_norm", "_fused_rms_norm", "view")
LIGHT_OPERATIONS = frozenset(getattr(torch.ops.aten, name) for name in _LIGHT)
FROM_SHAPES = frozenset(getattr(torch.ops.aten, name) for name in _MADE)  # what they give depends on no value of what they are given


def tensors_in(value: Any) -> list[Tensor]:
    """Collect the tensors in a value.

    Args:
        value: containers of anything.

    Returns:
        The tensors, in their order.
    """
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run_mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation: on the CPU while all its tensors are there, else on the meta device.

    Args:
        func: an overload of an operation of torch.
        args: its arguments.
        kwargs: its named arguments.

    Returns:
        What it gives.
    """
    devices = {tensor.device.type for tensor in tensors_in((args, kwargs))}
    wanted = kwargs.get("device")
    if wanted is not None and "meta" in devices:
        kwargs = {**kwargs, "device": torch.device("meta")}  # there is nothing to copy to another device
    elif wanted is not None and torch.device(wanted).type == "meta" and _is_small(func, args):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if devices == {"cpu", "meta"}:
        args, kwargs = tree_map_only(Tensor, _on_meta, (_indices(func, args), kwargs))
    adapted = _ADAPTED.get(func._overloadpacket)
    return func(*args, **kwargs) if adapted is None else adapted(func, *args, **kwargs)


def _spread_topk(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Routers choose experts by values that nobody has here: let every expert be chosen equally often."""
    values, chosen = func(x, *args, **kwargs)
    if x.device.type != "meta" or chosen.numel() > _SMALL:
        return values, chosen
    return values, (torch.arange(chosen.numel()) % x.shape[-1]).view(chosen.shape)


def _count_floats(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Code for GPUs counts integers, which the CPU cannot."""
    return func(x if x.is_floating_point() else x.double(), *args, **kwargs).to(x.dtype)


def _multiply_groups(func: Any, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The meta device takes bfloat16 only."""
    if left.dim() == 2 and right.dim() == 3 and left.device.type == "meta":
        return left.new_empty(left.shape[0], right.shape[-1])
    return func(left, right, *args, **kwargs)


# Operations that need more than shapes, or more than the meta device has.
_ADAPTED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.topk: _spread_topk,
    torch.ops.aten.histc: _count_floats,
    torch.ops.aten._grouped_mm: _multiply_groups,
}


def _is_small(func: Any, args: Any) -> bool:
    """True for a copy of what is on the CPU, and for what is made from nothing and costs little to have."""
    size = args[0] if args and isinstance(args[0], list | tuple) and all(isinstance(side, int) for side in args[0]) else ()
    return bool(tensors_in(args)) or math.prod(size) <= _SMALL or func._overloadpacket is torch.ops.aten.arange


def _indices(func: Any, args: Any) -> Any:
    """Turn masks that select into numbers of places: how many there are is known on the CPU only."""
    if func._overloadpacket not in _INDEXING or not any(isinstance(index, Tensor) and index.device.type == "cpu" for index in args[1]):
        return args
    places: list[Tensor | None] = []
    for index in args[1]:
        is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and index.device.type == "cpu"
        places += list(index.nonzero(as_tuple=True)) if is_mask else [index]
    return (args[0], places, *args[2:])


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
