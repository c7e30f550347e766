"""From Python values to the arguments of nodes: a tensor or a size becomes the node that made it, and what no node made is refused."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import EllipsisType, FunctionType, NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from compressor.data.layouts import has_memory, shape_of
from compressor.tracing.graph.nested_values import as_size, find_tensor, is_record, map_tree, parts_of, record_fields
from compressor.tracing.graph.nodes import Constant, rebuild_function, rebuild_record
from compressor.tracing.graph.symbolic import SymbolicFloat, SymbolicInt, is_symbolic, plain

if TYPE_CHECKING:
    from compressor.tracing.graph.recorder import Recorder


_AS_IS = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, EllipsisType)


class _Known(NamedTuple):
    """The node of a tensor, the tensor while it lives, and its version when the node was noted."""

    node: fx.Node
    tensor: weakref.ref[Tensor]
    version: int


class Encoder:
    """Knows the node of every tensor and object of the running forward.

    Attributes:
        objects: id of a helper object or shared container to its node and to itself, which keeps the id valid.
    """

    def __init__(self, recorder: Recorder) -> None:
        """Learn parameters, buffers and configurations of the model."""
        self.objects: dict[int, tuple[fx.Node, Any]] = {}
        self._recorder = recorder
        self._tensors: dict[int, _Known] = {}
        model = recorder.model
        self._state = {id(tensor): (tensor, name) for name, tensor in (*model.named_buffers(), *model.named_parameters())}
        configs = [vars(module).get("config") for module in model.modules()]
        owned = [value for module in model.modules() for value in vars(module).values()]
        owned += [value for config in configs if hasattr(config, "__dict__") for value in vars(config).values()]
        self._owned = {id(value): value for value in [*configs, *owned] if not isinstance(value, Tensor | int | float | str)}

    def owns(self, value: Any) -> bool:
        """Say whether an object belongs to the model and not to one forward.

        Args:
            value: anything.

        Returns:
            True for what modules and their configurations hold.
        """
        return id(value) in self._owned

    def note(self, tensor: Tensor, node: fx.Node) -> None:
        """Remember the node that made a tensor.

        Args:
            tensor: weakly kept.
            node: its node.
        """
        version = 0 if tensor.is_inference() else tensor._version
        self._tensors[id(tensor)] = _Known(node, weakref.ref(tensor), version)

    def encode(self, value: Any, *, sizes: bool = False) -> Any:
        """Turn a value into what stands among a node's arguments.

        Args:
            value: nested containers of anything.
            sizes: a torch.Size stays one, for those who can tell it from a tuple.

        Returns:
            The same containers over nodes and plain values.

        Raises:
            Refusal: it holds a tensor that no recorded call made.
        """
        return map_tree(self._encode_leaf, value, self.objects, self._encode_size if sizes else as_size)

    def _encode_size(self, items: tuple[Any, ...]) -> Any:
        return self._recorder.emit("call_function", torch.Size, (items,), size=True)  # fx makes a tuple of one among arguments

    def constant(self, value: Any) -> fx.Node:
        """Return the node of an object that all batches share.

        Args:
            value: kept alive.

        Returns:
            A node that gives the object.
        """
        if id(value) not in self.objects:
            raw = getattr(value, "__name__", None) or type(value).__name__
            name = self._recorder.names.get(id(value)) or raw
            target = Constant(value, re.sub(r"\W", "_", f"{name or 'model'}") + f"_{len(self.objects)}")
            self.objects[id(value)] = (self._recorder.emit("call_function", target, size=True), value)
        return self.objects[id(value)][0]

    def _encode_leaf(self, value: Any) -> Any:
        if is_symbolic(value):
            if value.recorder is not self._recorder:
                raise self._recorder.refuse('a size or number of an earlier forward is used; it was kept somewhere; use engine="suspend"')
            return value.source
        if type(value) in _AS_IS:
            return value
        if isinstance(value, Tensor):
            return self._encode_tensor(value)
        if id(value) in self.objects:
            return self.objects[id(value)][0]
        if isinstance(value, nn.Module) or self.owns(value) or find_tensor(value, self.owns) is None:
            return self.constant(value)
        return self._encode_composite(value)

    def _encode_composite(self, value: Any) -> Any:
        if is_record(value):
            fields = self.encode(record_fields(value))
            return self._recorder.emit("call_function", rebuild_record, (self.constant(type(value)), fields))
        if isinstance(value, FunctionType):
            parts = dict(parts_of(value))
            cells = [self.encode(part) for key, part in parts.items() if str(key).startswith("cell ")]
            defaults = [self.encode(part) for part in value.__defaults__ or ()]
            if len(cells) == len(value.__closure__ or ()) and find_tensor(list(vars(value).values()), self.owns) is None:
                return self._recorder.emit("call_function", rebuild_function, (self.constant(value), cells, defaults))
        raise self._recorder.refuse(
            f"a {type(value).__name__} that holds tensors goes into a call, and it cannot be made anew for each batch; pass the tensors "
            'themselves, wrap the function around it with leaf(fn) or use engine="suspend"'
        )

    def _encode_tensor(self, tensor: Tensor) -> fx.Node:
        known = self._tensors.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            self._check_version(tensor, known)
            return known.node
        node = self._state_node(tensor)
        if node is None:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise self._recorder.refuse(
                f"tensor {shape_of(tensor)} {kind} was not made by a recorded call (numpy round trip?); freezing it would reuse this "
                'sample\'s values; wrap the producer with leaf(fn) or use engine="suspend"'
            )
        self.note(tensor, node)
        return node

    def _check_version(self, tensor: Tensor, known: _Known) -> None:
        if tensor.is_inference() or tensor._version == known.version:
            return
        if not has_memory(tensor) or tensor.untyped_storage()._cdata not in self._recorder.written:
            raise self._recorder.refuse(
                f"tensor {shape_of(tensor)} was written to by code that was not recorded; wrap that code with leaf(fn) or use "
                'engine="suspend"'
            )
        self.note(tensor, known.node)

    def _state_node(self, tensor: Tensor) -> fx.Node | None:
        """Find a tensor among parameters, buffers and whatever else stands on modules at the moment."""
        held, name = self._state.get(id(tensor), (None, ""))
        module, _, own = name.rpartition(".")
        model = self._recorder.model
        if held is tensor and getattr(model.get_submodule(module), own, None) is tensor:
            return self._recorder.emit("get_attr", name, size=True)
        for candidate in model.modules():
            for place in (vars(candidate), candidate._buffers, candidate._parameters):
                for attribute, value in place.items():
                    if value is tensor:
                        return self._recorder.emit("call_function", getattr, (self.constant(candidate), attribute))
        return None


# What a recorder does with symbolic numbers: arithmetic becomes nodes, decisions become guards.


class Numbers:
    """The part of a recorder that symbolic numbers talk to."""

    inside: int
    encoder: Encoder
    emit: Callable[..., fx.Node]
    guard: Callable[..., None]
    opaque: Callable[[], AbstractContextManager[None]]

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Compute with symbolic numbers.

        Args:
            function: of the operator module, or one like it.
            args: numbers, one of them symbolic.

        Returns:
            A symbolic number where this is recorded.
        """
        value = function(*map(plain, args))
        if self.inside:
            return value
        with self.opaque():
            node = self.emit("call_function", function, self.encoder.encode(args), size=True)
        return self.number(value, node)

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Compare symbolic numbers, under a guard on the outcome.

        Args:
            function: of the operator module, or one like it.
            args: numbers, one of them symbolic.

        Returns:
            The plain outcome.
        """
        value = function(*map(plain, args))
        if not self.inside:
            with self.opaque():
                self.guard(self.emit("call_function", function, self.encoder.encode(args), size=True), value)
        return value

    def pin(self, node: fx.Node, value: Any) -> None:
        """Put a guard on a number that Python is about to use.

        Args:
            node: that computes it.
            value: of it.
        """
        if not self.inside:
            with self.opaque():
                self.guard(node, value)

    def number(self, value: Any, node: fx.Node) -> Any:
        """Make a number symbolic.

        Args:
            value: plain.
            node: that computes it.

        Returns:
            A symbolic number; bools and complex numbers come back plain, under a guard.
        """
        node.meta["number"] = True
        if type(value) in (bool, complex):
            self.guard(node, value)
            return value
        return SymbolicInt(value, node, self) if isinstance(value, int) else SymbolicFloat(value, node, self)
