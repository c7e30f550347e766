"""Nodes: the functions that stand in recorded graphs besides torch's own, and the builder that adds nodes and guards to a graph."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from compressor.errors import TracingError
from compressor.tracing.graph.nested_values import Modes
from compressor.tracing.targets.records import short_file
from compressor.tracing.targets.sample_state import copy_arguments

# Refusing to record, and where in the model's source something happened.

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_MOST_SAID = 300  # characters of a foreign message
ROOT = "_root"  # how graphs name the model itself, whose dotted name is empty
_OUTERMOST = (str(Path(__file__).with_name("planner.py")), "_run")  # the frame that calls the model


class Place(NamedTuple):
    """A line of the model's source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return `file.py:line`."""
        return f"{short_file(self.file)}:{self.line}"


class Frame(NamedTuple):
    """A running function of the model: its code, its globals and what it is a method of."""

    code: CodeType
    module_globals: dict[str, Any]
    owner: Any


class Refusal(TracingError):
    """The recorder cannot follow the model here."""

    def __init__(self, message: str, frames: tuple[Frame, ...] = ()) -> None:
        """Keep the running functions, outermost first, beside the message."""
        super().__init__(message)
        self.frames = frames


class Unrepeatable(TracingError):
    """No engine can run it in stages: a forward changes what all share, uses weights outside of their targets, or orders contradict."""


class Unreached(Unrepeatable):
    """No batch calls any of the targets."""


class SwallowedTarget(Refusal):
    """A function that is recorded as one node calls a sequential target."""

    def __init__(self, message: str, leaf: str) -> None:
        """Keep the name of the function beside the message."""
        super().__init__(message)
        self.leaf = leaf


def one_line(error: BaseException) -> str:
    """Say what somebody else's exception says, which may be a page.

    Args:
        error: any exception.

    Returns:
        Its class and the beginning of its message, in one line.
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _MOST_SAID else text[:_MOST_SAID] + ' ...'}"


def raised(error: BaseException) -> str:
    """Say where the code of a model raised, and what; of the insides of torch and the recorder only whose they are.

    Args:
        error: that was raised.

    Returns:
        Line of the model's code, and the error in one line.
    """
    frames = [*walk_tb(error.__traceback__)]
    own = [(frame, line) for frame, line in frames if _package(frame) not in ("torch", "compressor")]
    what, inner = one_line(error), frames[-1][0] if frames else None
    if inner is not None and _package(inner) in ("torch", "compressor"):
        where = f" in {inner.f_globals['__name__']}" if _package(inner) == "torch" else ""
        what = f"{type(error).__name__}{where} (what is recorded has symbolic sizes, and results are taken apart)"
    place = f"{short_file(own[-1][0].f_code.co_filename)}:{own[-1][1]}" if own else "forward"
    return f"{place}: recording it raised {what}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?")).partition(".")[0]


def _model_frames() -> Iterator[FrameType]:
    """Give the running frames of the forward that belong neither to torch nor to the recorder, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if (file, frame.f_code.co_name) == _OUTERMOST:
            return
        if not file.startswith((_TORCH, _OURS)):
            yield frame
        frame = frame.f_back


def current_place() -> Place:
    """Find the line of the model's code that runs.

    Returns:
        The innermost line outside of torch and the recorder.
    """
    frame = next(_model_frames(), None)
    return Place("?", 0, "?") if frame is None else Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def current_frames() -> tuple[Frame, ...]:
    """List the running functions of the model.

    Returns:
        Outermost first.
    """
    found = [Frame(frame.f_code, frame.f_globals, frame.f_locals.get("self", frame.f_locals.get("cls"))) for frame in _model_frames()]
    return tuple(reversed(found))


class Constant:
    """A Python object that a graph refers to; called without arguments it gives the object.

    Attributes:
        value: the object.
        place: dotted name of a module of the model: another one may stand there when the graph is replayed.
    """

    def __init__(self, value: Any, name: str, place: str | None = None) -> None:
        """Keep the object under a name for the code that torch.fx prints."""
        self.value, self.place = value, place
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


class GraphBuilder:
    """The graph of one forward while it is recorded, and who adds to it; shared by all parts of a recorder.

    Attributes:
        model: whose forward it is.
        names: id of a module to its dotted name.
        graph: grows node by node, in program order.
        inside: above 0 while code runs that is not recorded.
        written: storages that recorded calls have written to.
    """

    def __init__(self, model: nn.Module) -> None:
        """Learn the modules' names, and the modes that no node needs to note; the graph is empty."""
        self.model = model
        self.names: dict[int, str] = {}
        for name, module in model.named_modules():
            self.names.setdefault(id(module), name)
        self.graph = fx.Graph()
        self.inside = 0
        self.written: set[int] = set()
        self._pinned: set[tuple[fx.Node, str]] = set()
        self._ambient = Modes.current()

    def emit(
        self,
        op: str,
        target: Any,
        args: Any = (),
        kwargs: Any = None,
        *,
        size: bool = False,
        effect: bool = False,
        writes: frozenset[int] = frozenset(),
    ) -> fx.Node:
        """Add a node whose arguments are encoded already.

        Args:
            op: kind of node.
            target: what it calls.
            args: nodes and plain values.
            kwargs: nodes and plain values by name.
            size: the node computes a number and may go if nothing needs it.
            effect: the node writes to something.
            writes: the storages that it writes to.

        Returns:
            The node.
        """
        node = self.graph.create_node(op, target, args, kwargs or {})
        node.meta["place"] = current_place()
        state = Modes.current()
        node.meta["state"] = None if state == self._ambient else state
        node.meta["size"], node.meta["effect"], node.meta["writes"] = size, effect or bool(writes), writes
        return node

    def guard(self, node: fx.Node, expected: Any, kind: str = "value") -> None:
        """Record that a value must be what it is now.

        Args:
            node: of the value.
            expected: the value.
            kind: `value`, or `structure` for what only says that a result is built as it was.
        """
        key = (node, f"{type(expected).__name__} {expected!r}")
        if key not in self._pinned:
            self._pinned.add(key)
            made = self.emit("call_function", guard, (node, expected, str(current_place())))
            made.meta["guard"], made.meta["frames"] = kind, current_frames()

    @contextmanager
    def opaque(self) -> Iterator[None]:
        """Let code run that is not recorded."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def refuse(self, message: str) -> Refusal:
        """Make an error that knows the running functions.

        Args:
            message: what, why, and the remedy; the place is put before it.

        Returns:
            The error, for raising.
        """
        return Refusal(f"{current_place()}: {message}", current_frames())
