"""The recorder: runs beside one real forward and turns every torch call of the code between targets into a node of a torch.fx graph.

Tensors are real, so Python sees what it always sees. Modules without a target inside are one node. Sizes and `.item()` values are
symbolic numbers; what Python decides by them becomes a guard. A tensor that no recorded call made is refused: to freeze it would be to
use this sample's values for all others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from compressor.data.layouts import has_memory, num_bytes, shape_of
from compressor.tracing.foreign_weights import ForeignWeights
from compressor.tracing.graph.encoder import Encoder, Numbers
from compressor.tracing.graph.nested_values import (
    BY_REFERENCE,
    Modes,
    call_form,
    constant_query,
    is_named_tuple,
    is_record,
    pins_result,
    plain_tree,
    read_field,
    record_fields,
    refused_call,
    structure,
    tree_leaves,
    writes_by_name,
)
from compressor.tracing.graph.nodes import Refusal, SwallowedTarget, current_frames, current_place, guard, set_attribute, set_buffer
from compressor.tracing.graph.shared_objects import RunObjects, Surroundings, modules_around
from compressor.tracing.graph.symbolic import is_symbolic, plain

# From the result of a recorded call back to Python: tensors are remembered, numbers become symbolic, what steers Python gets a guard.

_PLAIN = (NoneType, *BY_REFERENCE)


class Binder:
    """Gives the values that a recorded forward goes on with."""

    def __init__(self, recorder: Recorder) -> None:
        """Keep the recorder."""
        self._recorder = recorder

    def bind_checked(self, node: fx.Node, value: Any) -> Any:
        """Bind the result of a module or leaf, whose build may differ from batch to batch.

        Args:
            node: of the call.
            value: its result.

        Returns:
            What Python goes on with.
        """
        if not isinstance(value, Tensor) or node.op == "call_function":
            shape = self._recorder.emit("call_function", output_structure, (node,), size=True)
            self._recorder.guard(shape, output_structure(value), "structure")
        return self.bind(node, value)

    def bind(self, node: fx.Node, value: Any) -> Any:
        """Attach nodes to a result, to whatever depth.

        Args:
            node: of the call.
            value: its result.

        Returns:
            The result with symbolic numbers in the place of plain ones.

        Raises:
            Refusal: it holds what cannot be followed.
        """
        recorder = self._recorder
        if isinstance(value, Tensor):
            recorder.encoder.note(value, node)
            node.meta["tensor"] = describe(value)
            return value
        if is_symbolic(value) or isinstance(value, _PLAIN) or id(value) in recorder.encoder.objects:
            return value
        if isinstance(value, bool | int | float | complex):
            return recorder.number(value, node)
        if isinstance(value, str | bytes):
            recorder.guard(node, value)
            return value
        if isinstance(value, tuple | list):
            return self._bind_sequence(node, value)
        if type(value) is dict or is_record(value):
            return self._bind_record(node, value)
        if isinstance(value, Iterator | np.ndarray | np.generic | torch.UntypedStorage):
            raise recorder.refuse(
                f"a call returned a {type(value).__name__}, whose contents cannot be followed; return tensors, wrap the function around it "
                'with leaf(fn), or use engine="suspend"'
            )
        recorder.run_objects.adopt(node, value)
        return value

    def _item(self, node: fx.Node, key: Any, size: bool) -> fx.Node:
        return self._recorder.emit("call_function", operator.getitem, (node, key), size=size)

    def _bind_sequence(self, node: fx.Node, value: Any) -> Any:
        recorder = self._recorder
        is_size = node.meta["number"] = type(value) is torch.Size
        if type(value) in (tuple, list) and not is_size:
            recorder.guard(recorder.emit("call_function", len, (node,), size=True), len(value))
        bound = [self.bind(self._item(node, index, True), item) for index, item in enumerate(value)]
        if is_size:
            return torch.Size(bound)
        if type(value) is list:
            value[:] = bound
            return value
        return tuple(bound) if type(value) is tuple else type(value)(*bound) if is_named_tuple(value) else value

    def _bind_record(self, node: fx.Node, value: Any) -> Any:
        if type(value) is dict:
            for key, item in value.items():
                value[key] = self.bind(self._item(node, key, True), item)
            return value
        for name, item in record_fields(value).items():
            if item is not None:
                made = self._recorder.emit("call_function", read_field, (node, name), size=True)
                bound = self.bind(made, item)
                if bound is not item:
                    object.__setattr__(value, name, bound)
        return value


def output_structure(value: Any) -> Any:
    """Describe how the result of a module or leaf is built.

    Args:
        value: the result.

    Returns:
        Types, lengths and keys; numbers, which stay symbolic, are left out.
    """
    return structure(value, numbers=False)


def describe(tensor: Tensor) -> tuple[Any, ...]:
    """Note what planning needs to know of a tensor.

    Args:
        tensor: not kept.

    Returns:
        Shape, dtype, identity and bytes of its storage.
    """
    if not has_memory(tensor):
        return shape_of(tensor), tensor.dtype, id(tensor), num_bytes(tensor)
    storage = tensor.untyped_storage()
    return tuple(tensor.shape), tensor.dtype, storage._cdata, storage.nbytes()


class Recorder(Numbers, TorchFunctionMode):
    """Records one forward.

    Attributes:
        graph: grows node by node, in program order.
        inside: above 0 while code runs that is not recorded.
        calls: every module call inside a node: module name, target or "" around it, number of nodes before it.
        busy: code of the functions that called a target; none of them can become a leaf.
        written: storages that recorded calls have written to.
        surroundings: what the forward does besides calling torch and modules.
        weights: whether it uses weights outside of their targets.
        reads: is shown every torch call.
    """

    def __init__(self, model: nn.Module, targets: Mapping[str, nn.Module]) -> None:
        """Learn the modules; nothing is recorded yet."""
        super().__init__()
        self.model = model
        self.graph = fx.Graph()
        self.inside = 0
        self.calls: list[tuple[str, str | None, int]] = []
        self.busy: set[Any] = set()
        self.written: set[int] = set()
        self.names: dict[int, str] = {}
        for name, module in model.named_modules():
            self.names.setdefault(id(module), name)
        self.targets = {id(module): name for name, module in targets.items()}
        self.encoder = Encoder(self)
        self.binder = Binder(self)
        self.run_objects = RunObjects(self)
        self._taken_apart = modules_around(model, self.targets)
        self._owner: str | None = None
        self._leaf = ""
        self._pinned: set[tuple[fx.Node, str]] = set()
        self._ambient = Modes.current()
        self.surroundings = Surroundings(model)
        self.weights = ForeignWeights(model, targets, pauses=False)
        self.reads: Callable[..., None] = lambda *call: None

    # Making nodes

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

    # Recording calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a torch call of the code between targets; run every other one as it is."""
        kwargs = kwargs or {}
        if not self.inside or self._owner is not None:
            self.weights.inside = self._owner
            self.weights.look(func, args, kwargs)
            self.reads(func, args, kwargs)
        if self.inside:
            return func(*args, **kwargs)
        with self.opaque():
            plain_args, plain_kwargs = plain_tree(args), plain_tree(kwargs)
            if constant_query(func, plain_args):
                return func(*plain_args, **plain_kwargs)
            why = refused_call(func, plain_args, plain_kwargs)
            if why is not None:
                raise self.refuse(why)
            encoded = self.encoder.encode(args), self.encoder.encode(kwargs)
            before = self.versions((plain_args, plain_kwargs))
            output = self._run(func, plain_args, plain_kwargs, None)
            by_name = writes_by_name(func, plain_kwargs)
            wrote = self.note_writes(before, by_name)
            op, target, node_args, node_kwargs = call_form(func, *encoded)
            node = self.emit(op, target, node_args, node_kwargs, writes=wrote, effect=by_name)
            bound = self.binder.bind(node, output)
        return plain_tree(self._pin_all(bound)) if pins_result(func) else bound

    def _pin_all(self, value: Any) -> Any:
        for item in tree_leaves(value):
            if is_symbolic(item):
                item.pinned()
        return value

    def versions(self, value: Any) -> list[tuple[Tensor, int]]:
        """Note how often the tensors of a value have been written to.

        Args:
            value: arguments of a call.

        Returns:
            Tensor and version.
        """
        return [(item, item._version) for item in tree_leaves(value) if isinstance(item, Tensor) and not item.is_inference()]

    def note_writes(self, before: list[tuple[Tensor, int]], everywhere: bool = False) -> frozenset[int]:
        """Remember the storages that a call has written to.

        Args:
            before: versions before the call.
            everywhere: take it that the call has written to all its tensors.

        Returns:
            The storages.
        """
        changed = [tensor for tensor, version in before if everywhere or tensor._version != version]
        storages = frozenset(tensor.untyped_storage()._cdata for tensor in changed if has_memory(tensor))
        self.written |= storages
        return storages

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any, owner: str | None) -> Any:
        """Run code that is not recorded; remember if it raises, since the model may catch that."""
        outer, self._owner = self._owner, owner
        try:
            return function(*args, **kwargs)
        except Exception as error:  # goes on as it is
            self.surroundings.caught = f"{current_place()}: {type(error).__name__} ({error}) was raised and caught"
            raise
        finally:
            self._owner = outer

    def call_module(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of a module, unless targets lie inside it.

        Args:
            call: the plain `nn.Module.__call__`.
            module: that is called.
            args: its arguments.
            kwargs: its named arguments.

        Returns:
            What it returns.
        """
        name = self.names.get(id(module))
        if self.inside:
            self._note_inner(module, name)
        if self.inside or name is None or module in self._taken_apart:
            return call(module, *args, **kwargs)
        target = self.targets.get(id(module))
        if target is not None:
            self.weights.enter(target)
            self.busy |= {frame.code for frame in current_frames()}
        self.calls.append((name, target, len(self.graph.nodes)))
        path = name or "_root"
        emit = lambda a, k, writes: self.emit("call_module", path, a, k, writes=writes)  # noqa: E731
        return self._call_whole(lambda *a, **k: call(module, *a, **k), args, kwargs, emit, name if target is None else target)

    def _note_inner(self, module: nn.Module, name: str | None) -> None:
        if name is None or self._owner is None:
            return
        owner = self._owner
        if id(module) in self.targets and self.targets[id(module)] != owner:
            raise SwallowedTarget(
                f"{current_place()}: {self.targets[id(module)]} is a sequential target and is called inside {owner}, which is one node; "
                'choose other sequential targets, or pipeline="basic"; if the leaf is yours, do not make it one',
                self._leaf,
            )
        self.calls.append((name, owner if owner in self.targets.values() else None, len(self.graph.nodes)))

    def call_leaf(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Record the call of a function as one node.

        Args:
            function: what the node calls.
            args: its arguments.
            kwargs: its named arguments.
            run: what is called now.

        Returns:
            What it returns.
        """
        emit = lambda a, k, writes: self.emit("call_function", function, a, k, writes=writes)  # noqa: E731
        outer, self._leaf = self._leaf, getattr(function, "__qualname__", repr(function))
        try:
            return self._call_whole(run, args, kwargs, emit, f"leaf {self._leaf}")
        finally:
            self._leaf = outer

    def _call_whole(self, run: Any, args: Any, kwargs: Any, emit: Callable[[Any, Any, frozenset[int]], fx.Node], owner: str) -> Any:
        """Record a call whose inside is not recorded, with the helper objects that it may change."""
        with self.opaque():
            self.weights.inside = None
            self.weights.look(None, args, kwargs)
            plain_args, plain_kwargs = plain_tree(args), plain_tree(kwargs)
            self.run_objects.before((args, kwargs), (plain_args, plain_kwargs))
            context = self.surroundings.context(self)
            encoded = self.encoder.encode(args, sizes=True), self.encoder.encode(kwargs, sizes=True)
            before = self.versions((plain_args, plain_kwargs))
            output = self._run(run, plain_args, plain_kwargs, owner)
            if self.run_objects.found_shared():
                encoded = self.encoder.encode(args, sizes=True), self.encoder.encode(kwargs, sizes=True)
            node = emit(*encoded, self.note_writes(before))
            node.meta["context"] = context
            self.run_objects.after()
            return self.binder.bind_checked(node, output)

    def note_attribute(self, module: nn.Module, name: str, value: Any, persistent: bool | None = None) -> None:
        """Record that the code between targets sets an attribute or a buffer of a module.

        Args:
            module: of the model.
            name: of the attribute.
            value: new.
            persistent: of a buffer; None for an attribute.
        """
        with self.opaque():
            old = module.__dict__.get(name)
            if isinstance(value, int | float | str) and isinstance(old, int | float | str) and plain(old) != plain(value):
                raise self.refuse(
                    f"{self.names[id(module)] or 'the model'}.{name} goes from {plain(old)!r} to {plain(value)!r}: state that one "
                    'batch leaves to the next cannot be in a graph; keep it out of forward, or use engine="suspend"'
                )
            target, args = (set_attribute, ()) if persistent is None else (set_buffer, (persistent,))
            self.emit("call_function", target, (self.encoder.constant(module), name, self.encoder.encode(value), *args), effect=True)
