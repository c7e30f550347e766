"""The functions that stand in recorded graphs besides torch's own: constants, guards, and what rebuilds Python objects for each batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from compressor.errors import TracingError
from compressor.tracing.isolation import copy_arguments


class Constant:
    """A Python object that a graph refers to; called without arguments it gives the object."""

    def __init__(self, value: Any, name: str) -> None:
        """Keep the object under a name for the code that torch.fx prints."""
        self.value = value
        self.__name__ = self.__qualname__ = name
        self.__module__ = "constants"

    def __call__(self) -> Any:
        """Return the object."""
        return self.value

    def __deepcopy__(self, memo: dict[int, Any]) -> Constant:
        """Return itself: graphs are copied with their objects by reference."""
        return self


class Template:
    """A helper object as it was when it was first handed to a module; called with its changing parts it gives a copy."""

    def __init__(self, value: Any, model: nn.Module, name: str) -> None:
        """Copy the object at once."""
        self._model = model
        self._value = copy_arguments(value, model)
        self.__name__ = self.__qualname__ = name
        self.__module__ = "templates"

    def __call__(self, attributes: dict[str, Any]) -> Any:
        """Return a copy with these attributes."""
        made = copy_arguments(self._value, self._model)
        for name, value in attributes.items():
            object.__setattr__(made, name, value)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Template:
        """Return itself: it never changes."""
        return self


class GuardFailure(TracingError):
    """A batch gives another value than the one that was recorded."""

    def __init__(self, message: str, node_name: str = "") -> None:
        """Keep the name of the guard's node beside the message."""
        super().__init__(message)
        self.node_name = node_name


def guard(value: Any, expected: Any, where: str) -> None:
    """Check that a value which steered Python is what it was.

    Args:
        value: of this batch.
        expected: when the graph was recorded.
        where: `file.py:line`.

    Raises:
        GuardFailure: it is not.
    """
    if type(value) is not type(expected) or value != expected:
        raise GuardFailure(f"{where}: guard traced with {expected!r}, this batch gives {value!r}")


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module, as the forward did.

    Args:
        module: changed.
        name: of the attribute.
        value: new.
    """
    setattr(module, name, value)


def set_buffer(module: nn.Module, name: str, value: Any, persistent: bool) -> None:
    """Register a buffer, as the forward did.

    Args:
        module: changed.
        name: of the buffer.
        value: new.
        persistent: whether it belongs to the state dict.
    """
    module.register_buffer(name, value, persistent=persistent)


def set_attributes(helper: Any, values: dict[str, Any], removed: tuple[str, ...]) -> None:
    """Bring a helper object to the state that Python code gave it between two module calls.

    Args:
        helper: changed.
        values: attributes that are new.
        removed: attributes that are gone.
    """
    for name, value in values.items():
        object.__setattr__(helper, name, value)
    for name in removed:
        object.__delattr__(helper, name)


def replace_items(container: Any, items: Any) -> None:
    """Bring a shared list or dict to the contents that Python code gave it between two module calls.

    Args:
        container: changed.
        items: a list or dict.
    """
    container.clear()
    if isinstance(container, dict):
        container.update(items)
    else:
        container.extend(items)


def rebuild_record(kind: type, fields: dict[str, Any]) -> Any:
    """Make a dataclass, a model output or another mapping anew.

    Args:
        kind: its class.
        fields: name to value.

    Returns:
        The record.
    """
    if not dataclasses.is_dataclass(kind):
        return kind(fields)
    declared = {field.name for field in dataclasses.fields(kind) if field.init}
    made = kind(**{name: value for name, value in fields.items() if name in declared})
    for name in fields.keys() - declared:
        object.__setattr__(made, name, fields[name])
    return made


def rebuild_function(function: Callable[..., Any], cells: list[Any], defaults: list[Any]) -> Callable[..., Any]:
    """Make a function anew over other values in its closure.

    Args:
        function: a Python function.
        cells: what its closure holds.
        defaults: of its arguments.

    Returns:
        A function with the same code.
    """
    assert isinstance(function, FunctionType)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, tuple(defaults) or None, tuple(map(CellType, cells)))
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def call_mapped(function: Callable[..., Any], options: tuple[Any, ...], named: dict[str, Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call torch.vmap of a function as one step.

    Args:
        function: what is mapped.
        options: positional arguments of vmap.
        named: keyword arguments of vmap.
        args: of the mapped function.
        kwargs: of the mapped function.

    Returns:
        What the mapped function returns.
    """
    return torch.func.vmap(function, *options, **named)(*args, **kwargs)


def call_script(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a TorchScript function as one step.

    Args:
        function: scripted.
        args: its arguments.
        kwargs: its named arguments.

    Returns:
        What it returns.
    """
    return function(*args, **kwargs)
