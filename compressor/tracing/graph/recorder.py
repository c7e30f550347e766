"""The recorder: runs beside one real forward and turns every torch call of the code between targets into a node of a torch.fx graph.

Tensors are real, so Python sees what it always sees. Modules without a target inside are one node. Sizes and `.item()` values are
symbolic numbers; what Python decides by them becomes a guard. A tensor that no recorded call made is refused: to freeze it would be to
use this sample's values for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from compressor.data.layouts import has_memory
from compressor.tracing.graph.encoder import Binder, Encoder, Numbers
from compressor.tracing.graph.nested_values import (
    call_form,
    constant_query,
    pins_result,
    plain_tree,
    refused_call,
    tree_leaves,
    writes_by_name,
)
from compressor.tracing.graph.nodes import ROOT, GraphBuilder, SwallowedTarget, current_frames, current_place, set_attribute, set_buffer
from compressor.tracing.graph.shared_objects import SharedObjects, SideEffects, modules_around
from compressor.tracing.reads import ForeignWeights, Unnoticed
from compressor.tracing.symbolic import is_symbolic, plain


class Recorder(Unnoticed):
    """Records one forward.

    Attributes:
        builder: of the graph.
        encoder: knows the nodes of values.
        binder: gives nodes to results.
        calls: every module call inside a node: module name, target or "" around it, number of nodes before it.
        busy: code of the functions that called a target; none of them can become a leaf.
        side_effects: what the forward does besides calling torch and modules.
        weights: whether it uses weights outside of their targets.
        reads: is shown every torch call.
        left: where a node uses a number of the code between targets that it was not given; empty where none does.
    """

    def __init__(self, model: nn.Module, targets: Mapping[str, nn.Module]) -> None:
        """Learn the modules; nothing is recorded yet."""
        super().__init__()
        self.builder = GraphBuilder(model)
        self.encoder = Encoder(self.builder)
        numbers = Numbers(self.builder, self.encoder, self._note_number)
        # The one recursion: what a call returns may be an object of the run, and what such an object holds is bound like a result.
        self._objects = SharedObjects(self.builder, self.encoder, bind=lambda node, value: self.binder.bind(node, value))
        self.binder = Binder(self.builder, self.encoder, numbers, adopt=self._objects.adopt)
        self.calls: list[tuple[str, str | None, int]] = []
        self.busy: set[Any] = set()
        self.targets = {id(module): name for name, module in targets.items()}
        # Their code is recorded call by call, since targets are called in the midst of it.
        self._taken_apart = modules_around(model, self.targets)
        self._owner: str | None = None
        self._leaf = ""
        self.side_effects = SideEffects(model)
        self.weights = ForeignWeights(model, targets, pauses=False)
        self.reads: Callable[..., None] = lambda *call: None
        self.left = ""

    def _note_number(self) -> None:
        """Nodes are given plain numbers; one that remembers where it came from has come another way."""
        if self._owner is not None and not self.left:
            self.left = f"{current_place()} uses a number that code between layers has left outside of arguments"

    @property
    def inside(self) -> int:
        """Above 0 while code runs that is not recorded."""
        return self.builder.inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a torch call of the code between targets; run every other one as it is."""
        kwargs = kwargs or {}
        # Inside of nodes, too: a layer may use the weight of another one, or read a value off its data.
        if not self.builder.inside or self._owner is not None:
            self.weights.inside = self._owner
            self.weights.look(func, args, kwargs)
            self.reads(func, args, kwargs)
        if self.builder.inside:
            return func(*args, **kwargs)
        with self.builder.opaque():
            plain_args, plain_kwargs = plain_tree(args), plain_tree(kwargs)
            if constant_query(func, plain_args):
                return func(*plain_args, **plain_kwargs)
            why = refused_call(func, plain_args, plain_kwargs)
            if why is not None:
                raise self.builder.refuse(why)
            encoded = self.encoder.encode(args), self.encoder.encode(kwargs)
            before = self.versions((plain_args, plain_kwargs))
            output = self._run(func, plain_args, plain_kwargs, None)
            by_name = writes_by_name(func, plain_kwargs)
            wrote = self.note_writes(before, by_name)
            op, target, node_args, node_kwargs = call_form(func, *encoded)
            node = self.builder.emit(op, target, node_args, node_kwargs, writes=wrote, effect=by_name)
            bound = self.binder.bind(node, output)
        # What int(tensor) returns must be an int to Python itself; a guard holds it to this value.
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
        self.builder.written |= storages
        return storages

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any, owner: str | None) -> Any:
        """Run code that is not recorded; remember if it raises, since the model may catch that."""
        outer, self._owner = self._owner, owner
        try:
            return function(*args, **kwargs)
        except Exception as error:  # goes on as it is
            self.side_effects.caught = f"{current_place()}: {type(error).__name__} ({error}) was raised and caught"
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
        name = self.builder.names.get(id(module))
        if self.builder.inside:
            self._note_inner(module, name)
        if self.builder.inside or name is None or module in self._taken_apart:
            return call(module, *args, **kwargs)
        target = self.targets.get(id(module))
        if target is not None:
            self.weights.enter(target)
            self.busy |= {frame.code for frame in current_frames()}
        self.calls.append((name, target, len(self.builder.graph.nodes)))
        path = name or ROOT
        emit = lambda a, k, writes: self.builder.emit("call_module", path, a, k, writes=writes)  # noqa: E731
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
        self.calls.append((name, owner if owner in self.targets.values() else None, len(self.builder.graph.nodes)))

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
        emit = lambda a, k, writes: self.builder.emit("call_function", function, a, k, writes=writes)  # noqa: E731
        outer, self._leaf = self._leaf, getattr(function, "__qualname__", repr(function))
        try:
            return self._call_whole(run, args, kwargs, emit, f"leaf {self._leaf}")
        finally:
            self._leaf = outer

    def _call_whole(self, run: Any, args: Any, kwargs: Any, emit: Callable[[Any, Any, frozenset[int]], fx.Node], owner: str) -> Any:
        """Record a call whose inside is not recorded, with the helper objects that it may change."""
        with self.builder.opaque():
            self.weights.inside = None
            self.weights.look(None, args, kwargs)
            plain_args, plain_kwargs = plain_tree(args), plain_tree(kwargs)
            self._objects.before((args, kwargs), (plain_args, plain_kwargs))
            context = self.side_effects.context(self.builder, self.encoder)
            encoded = self.encoder.encode(args, sizes=True), self.encoder.encode(kwargs, sizes=True)
            before = self.versions((plain_args, plain_kwargs))
            output = self._run(run, plain_args, plain_kwargs, owner)
            # A container that the call has changed is an object of the run only now, and the node must refer to it.
            if self._objects.found_shared():
                encoded = self.encoder.encode(args, sizes=True), self.encoder.encode(kwargs, sizes=True)
            node = emit(*encoded, self.note_writes(before))
            node.meta["context"] = context
            self._objects.after()
            return self.binder.bind_checked(node, output)

    def note_attribute(self, module: nn.Module, name: str, value: Any, persistent: bool | None = None) -> None:
        """Record that the code between targets sets an attribute or a buffer of a module.

        Args:
            module: of the model.
            name: of the attribute.
            value: new.
            persistent: of a buffer; None for an attribute.
        """
        with self.builder.opaque():
            old = module.__dict__.get(name)
            if isinstance(value, int | float | str) and isinstance(old, int | float | str) and plain(old) != plain(value):
                raise self.builder.refuse(
                    f"{self.builder.names[id(module)] or 'the model'}.{name} goes from {plain(old)!r} to {plain(value)!r} outside of "
                    'targets, where batches take turns and another would see it; keep it out of forward, or use engine="suspend"'
                )
            target, args = (set_attribute, ()) if persistent is None else (set_buffer, (persistent,))
            given = (self.encoder.constant(module), name, self.encoder.encode(value), *args)
            self.builder.emit("call_function", target, given, effect=True)
