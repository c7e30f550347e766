"""What is known about torch's functions by name: which answer from the type alone, which leave torch, and how each becomes a node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor

from compressor.tracing.graph.trees import tree_leaves

# Answers that follow from dtype, device and layout, which the signature of a batch fixes.
_CONSTANT = frozenset(
    (
        *("dtype", "device", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_hpu", "is_xla"),
        *("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "names", "grad_fn", "grad", "is_leaf", "retains_grad"),
        *("itemsize", "is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "is_inference", "has_names"),
        *("__hash__", "is_tensor"),
    )
)
# Values that leave torch in a form that cannot be followed.
_LEAVES_TORCH = frozenset(
    (
        *("numpy", "__array__", "__array_wrap__", "__dlpack__", "__cuda_array_interface__", "untyped_storage", "storage"),
        *("_typed_storage", "__reduce_ex__", "backward", "register_hook"),
    )
)
# Python insists on a plain number from these.
_PLAIN_RESULT = frozenset(("__int__", "__float__", "__index__", "__complex__", "__len__", "__bool__", "__contains__"))
_OPERATORS: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
}
_IN_PLACE = ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING_OPERATORS = frozenset(("__setitem__", "__delitem__", *(f"__i{name}__" for name in _IN_PLACE)))
# Modes are noted beside every node instead.
_SETS_MODES = frozenset(("_set_grad_enabled", "set_autocast_enabled", "set_autocast_dtype", "set_autocast_cache_enabled"))
# Their outputs' shapes depend on values.
DATA_SIZED = frozenset(("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "bincount", "unique_dim"))


def call_name(func: Any) -> str:
    """Return the name of a torch function; for an attribute, the attribute's.

    Args:
        func: as a torch function mode gets it.

    Returns:
        Such as `view`, `__getitem__`, `shape`.
    """
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def constant_query(func: Any, args: tuple[Any, ...]) -> bool:
    """Say whether a call only asks for what the types of the inputs decide.

    Args:
        func: torch function.
        args: its arguments.

    Returns:
        True if it needs no node.
    """
    name = call_name(func)
    if getattr(func, "__name__", "") == "__set__":
        return False
    return name in _CONSTANT or name in _SETS_MODES or (name == "type" and len(args) == 1)


def refused_call(func: Any, args: Any, kwargs: Any) -> str | None:
    """Say why a call cannot be recorded.

    Args:
        func: torch function.
        args: its arguments.
        kwargs: its named arguments.

    Returns:
        What and why, and the remedy; None if it can be.
    """
    name = call_name(func)
    if name in _LEAVES_TORCH:
        return (
            f"Tensor.{name} takes values out of torch, where they cannot be followed (numpy round trip?); freezing them would reuse this "
            'sample\'s values; wrap the function around it with leaf(fn) or use engine="suspend"'
        )
    if any(isinstance(item, torch.Generator) for item in tree_leaves((args, kwargs))):
        return (
            f"{name} draws from a random generator of its own, whose state the passes of a stage would share; use torch's default "
            'generator, or engine="suspend"'
        )
    return None


def pins_result(func: Any) -> bool:
    """Say whether Python needs the plain number that a call returns.

    Args:
        func: torch function.

    Returns:
        True for `int(tensor)` and its like.
    """
    return call_name(func) in _PLAIN_RESULT


def writes_by_name(func: Any, kwargs: dict[str, Any]) -> bool:
    """Say whether a call writes to its arguments, as far as names tell.

    Args:
        func: torch function.
        kwargs: its named arguments.

    Returns:
        True for `add_`, `out=`, assignments.
    """
    if getattr(func, "__name__", "") == "__set__" or kwargs.get("out") is not None:
        return True
    name = call_name(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING_OPERATORS


def call_form(func: Any, args: Any, kwargs: Any) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """Find the kind of node for a torch call.

    Args:
        func: torch function.
        args: its arguments as nodes and plain values.
        kwargs: its named arguments, the same.

    Returns:
        Operation, target, arguments and named arguments of the node.
    """
    own, name = getattr(func, "__name__", ""), call_name(func)
    if own == "__get__":
        return "call_function", getattr, (args[0], name), {}
    if own == "__set__":
        return "call_function", setattr, (args[0], name, args[1]), {}
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args, kwargs
    if isinstance(func, MethodDescriptorType | WrapperDescriptorType | FunctionType) and getattr(Tensor, name, None) is func:
        return "call_method", name, args, kwargs
    return "call_function", func, args, kwargs
