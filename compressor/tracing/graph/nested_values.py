"""Walking through nested values: containers, model outputs and dataclasses, and what a nested value looks like from outside."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Container, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compressor.numerics.precision import KERNEL_SETTINGS, float32_precisions, set_float32_precisions
from compressor.tracing.symbolic import is_symbolic, plain

# The modes of torch that a call is made in: they steer what it computes, and are noted beside every node.

_AUTOCAST_DEVICES = ("cpu", "cuda")


def parametrizations_cached() -> int:
    """How many `parametrize.cached()` are open: in one of them a parametrized weight is computed once."""
    return parametrize._cache_enabled


def set_parametrizations_cached(number: int) -> None:
    """Say how many are open. What has been kept is let go: it may be that of a weight from before compression."""
    parametrize._cache_enabled, parametrize._cache = number, {}


# What context managers of torch exchange for the whole process: how to ask, and how to set it.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (float32_precisions, set_float32_precisions),
    *KERNEL_SETTINGS.values(),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (parametrizations_cached, set_parametrizations_cached),
)


class Modes(NamedTuple):
    """Modes of the thread and settings of the process, without the random states, which belong to a sample and not to a node."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    settings: tuple[Any, ...]

    @staticmethod
    def current() -> Modes:
        """Return the modes as they are now."""
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES)
        settings = tuple(ask() for ask, _ in SETTINGS)
        return Modes(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), settings)

    def restore(self) -> None:
        """Make these the modes."""
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for (ask, put), value in zip(SETTINGS, self.settings, strict=True):
            if ask() != value:
                put(value)


_MAX_DEPTH = 8
_SCALARS = (bool, int, float, complex, str, bytes)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
BY_REFERENCE = (nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, *_OF_TORCH)


def as_size(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make the size of a tensor, where all of its items are numbers.

    Args:
        items: numbers, or what stands in the place of numbers.

    Returns:
        A torch.Size, or the items as they are.
    """
    return torch.Size(items) if all(isinstance(item, int) for item in items) else items


def map_tree(
    function: Callable[[Any], Any], value: Any, whole: Container[int] = (), size: Callable[[tuple[Any, ...]], Any] = as_size
) -> Any:
    """Rebuild lists, tuples, dicts and slices with each leaf replaced.

    Args:
        function: gives what stands in the place of a leaf.
        value: containers of exactly these types are looked into; everything else is a leaf.
        whole: ids of containers that are leaves, too.
        size: makes what stands in the place of a torch.Size, of its items.

    Returns:
        New containers.
    """
    kind = type(value)
    if id(value) in whole:
        return function(value)
    if kind is list:
        return [map_tree(function, item, whole, size) for item in value]
    if kind is tuple or kind is torch.Size:
        items = tuple(map_tree(function, item, whole, size) for item in value)
        return items if kind is tuple else size(items)
    if kind is dict:
        return {plain(key): map_tree(function, item, whole, size) for key, item in value.items()}
    if kind is slice:
        return slice(*(map_tree(function, part, whole, size) for part in (value.start, value.stop, value.step)))
    if is_named_tuple(value):
        return kind(*(map_tree(function, item, whole, size) for item in value))
    return function(value)


def is_named_tuple(value: Any) -> bool:
    """Say whether a value is a named tuple.

    Args:
        value: anything.

    Returns:
        True for instances of classes made by NamedTuple or namedtuple.
    """
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def tree_leaves(value: Any) -> list[Any]:
    """List the leaves that `map_tree` would visit.

    Args:
        value: anything.

    Returns:
        In order.
    """
    found: list[Any] = []
    map_tree(found.append, value)
    return found


def plain_tree(value: Any) -> Any:
    """Replace symbolic numbers by plain ones.

    Args:
        value: anything.

    Returns:
        New containers where there is one inside, else the value itself, so that callers see the objects they passed.
    """
    if type(value) is torch.Size:
        return torch.Size([plain(item) for item in value])
    if not any(is_symbolic(item) for item in tree_leaves(value)):
        return value
    return map_tree(plain, value)


def is_record(value: Any) -> bool:
    """Say whether a value is made of named fields: a dataclass, a model output, a mapping with a class of its own.

    Args:
        value: anything.

    Returns:
        False for plain dicts.
    """
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or (isinstance(value, dict) and type(value) is not dict)


def record_fields(value: Any) -> dict[str, Any]:
    """Return the named fields of a record.

    Args:
        value: `is_record` holds for it.

    Returns:
        Name to value, with what was set beyond the declared fields.
    """
    if not dataclasses.is_dataclass(value):
        return dict(value.items())
    declared = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return declared | {name: item for name, item in vars(value).items() if not name.startswith("_")}


def read_field(value: Any, name: str) -> Any:
    """Read a field of a record.

    Args:
        value: a record.
        name: of the field.

    Returns:
        Its value.
    """
    return getattr(value, name) if dataclasses.is_dataclass(value) else value[name]


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """List what an object holds: items, fields, attributes, closure cells.

    Args:
        value: anything.

    Yields:
        Key and part.
    """
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        yield from enumerate(value)
    elif isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        yield from ((f"cell {number}", cell.cell_contents) for number, cell in enumerate(cells) if not _is_empty(cell))
        yield from enumerate(value.__defaults__ or ())
    elif hasattr(value, "__self__") and hasattr(value, "__func__"):
        yield "self", value.__self__
    elif hasattr(value, "func") and hasattr(value, "keywords"):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, FunctionType):
        yield from vars(value).items()


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:  # a cell without contents says so by raising
        return True


def find_tensor(value: Any, skip: Callable[[Any], bool], depth: int = 0, seen: set[int] | None = None) -> Any:
    """Find a tensor or symbolic number inside an object.

    Args:
        value: anything.
        skip: True for objects that are not looked into.
        depth: how deep this already is.
        seen: ids of objects above.

    Returns:
        The first that is found, else None.
    """
    if isinstance(value, Tensor) or is_symbolic(value):
        return value
    seen = set() if seen is None else seen
    if depth == _MAX_DEPTH or id(value) in seen or isinstance(value, (*_SCALARS, nn.Module, type, ModuleType)) or skip(value):
        return None
    seen.add(id(value))
    found = (find_tensor(part, skip, depth + 1, seen) for _, part in list(parts_of(value)))
    return next((one for one in found if one is not None), None)


def structure(value: Any, numbers: bool = True, depth: int = 0, above: tuple[int, ...] = ()) -> Any:
    """Describe a value without its tensors: types, lengths, keys and plain values.

    Args:
        value: anything.
        numbers: False leaves whole and real numbers out.
        depth: how deep this already is.
        above: ids of the objects around it.

    Returns:
        Nested tuples that compare equal for values that steer Python the same way.
    """
    if isinstance(value, Tensor):
        return "tensor"
    if value is None or is_symbolic(value) or isinstance(value, _SCALARS):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return plain(value) if numbers or not is_number else "number"
    if depth == _MAX_DEPTH or id(value) in above or isinstance(value, BY_REFERENCE):
        return type(value).__name__
    inside = (*above, id(value))
    inner = tuple((key if isinstance(key, _SCALARS) else "", structure(part, numbers, depth + 1, inside)) for key, part in parts_of(value))
    return (type(value).__name__, *inner)


# What is known about torch's functions by name: which answer from the type alone, which leave torch, and how each becomes a node.

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
