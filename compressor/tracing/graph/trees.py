"""Walking through nested values: containers, model outputs and dataclasses, and what a nested value looks like from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compressor.tracing.graph.symbolic import is_symbolic, plain

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
