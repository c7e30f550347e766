"""From Python values to the arguments of nodes, and from the results of nodes back to Python.

On the way in a tensor or a size becomes the node that made it, and what no node made is refused. On the way out tensors are remembered,
numbers become symbolic, and what steers Python gets a guard.
"""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Callable, Iterator
from types import EllipsisType, FunctionType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from compressor.data.layouts import has_memory, num_bytes, shape_of
from compressor.tracing.graph.nested_values import (
    BY_REFERENCE,
    as_size,
    find_tensor,
    is_named_tuple,
    is_record,
    map_tree,
    parts_of,
    read_field,
    record_fields,
    structure,
)
from compressor.tracing.graph.nodes import Constant, GraphBuilder, rebuild_function, rebuild_record
from compressor.tracing.symbolic import SymbolicFloat, SymbolicInt, is_symbolic, plain

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

    def __init__(self, builder: GraphBuilder) -> None:
        """Learn parameters, buffers and configurations of the model."""
        self.objects: dict[int, tuple[fx.Node, Any]] = {}
        self._builder = builder
        self._tensors: dict[int, _Known] = {}
        model = builder.model
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
        return self._builder.emit("call_function", torch.Size, (items,), size=True)  # fx makes a tuple of one among arguments

    def constant(self, value: Any) -> fx.Node:
        """Return the node of an object that all batches share.

        Args:
            value: kept alive.

        Returns:
            A node that gives the object.
        """
        if id(value) not in self.objects:
            raw = getattr(value, "__name__", None) or type(value).__name__
            place = self._builder.names.get(id(value))
            target = Constant(value, re.sub(r"\W", "_", f"{place or raw or 'model'}") + f"_{len(self.objects)}", place)
            self.objects[id(value)] = (self._builder.emit("call_function", target, size=True), value)
        return self.objects[id(value)][0]

    def _encode_leaf(self, value: Any) -> Any:
        if is_symbolic(value):
            # Its node stands in another graph, and the number is that of another sample.
            if value.source.graph is not self._builder.graph:
                raise self._builder.refuse('a size or number of an earlier forward is used; it was kept somewhere; use engine="suspend"')
            return value.source
        if type(value) in _AS_IS:
            return value
        if isinstance(value, Tensor):
            return self._encode_tensor(value)
        if id(value) in self.objects:
            return self.objects[id(value)][0]
        # Without a tensor inside, or part of the model, it is the same for all batches.
        if isinstance(value, nn.Module) or self.owns(value) or find_tensor(value, self.owns) is None:
            return self.constant(value)
        return self._encode_composite(value)

    def _encode_composite(self, value: Any) -> Any:
        if is_record(value):
            fields = self.encode(record_fields(value))
            return self._builder.emit("call_function", rebuild_record, (self.constant(type(value)), fields))
        if isinstance(value, FunctionType):
            parts = dict(parts_of(value))
            cells = [self.encode(part) for key, part in parts.items() if str(key).startswith("cell ")]
            defaults = [self.encode(part) for part in value.__defaults__ or ()]
            if len(cells) == len(value.__closure__ or ()) and find_tensor(list(vars(value).values()), self.owns) is None:
                return self._builder.emit("call_function", rebuild_function, (self.constant(value), cells, defaults))
        raise self._builder.refuse(
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
            raise self._builder.refuse(
                f"tensor {shape_of(tensor)} {kind} was not made by a recorded call (numpy round trip?); freezing it would reuse this "
                'sample\'s values; wrap the producer with leaf(fn) or use engine="suspend"'
            )
        self.note(tensor, node)
        return node

    def _check_version(self, tensor: Tensor, known: _Known) -> None:
        if tensor.is_inference() or tensor._version == known.version:
            return
        if not has_memory(tensor) or tensor.untyped_storage()._cdata not in self._builder.written:
            raise self._builder.refuse(
                f"tensor {shape_of(tensor)} was written to by code that was not recorded; wrap that code with leaf(fn) or use "
                'engine="suspend"'
            )
        self.note(tensor, known.node)

    def _state_node(self, tensor: Tensor) -> fx.Node | None:
        """Find a tensor among parameters, buffers and whatever else stands on modules at the moment."""
        # A tensor of the model as the forward found it, if it still stands in its place; else wherever it stands now.
        held, name = self._state.get(id(tensor), (None, ""))
        module, _, own = name.rpartition(".")
        model = self._builder.model
        if held is tensor and getattr(model.get_submodule(module), own, None) is tensor:
            return self._builder.emit("get_attr", name, size=True)
        for candidate in model.modules():
            for place in (vars(candidate), candidate._buffers, candidate._parameters):
                for attribute, value in place.items():
                    if value is tensor:
                        return self._builder.emit("call_function", getattr, (self.constant(candidate), attribute))
        return None


# What is done with symbolic numbers: arithmetic becomes nodes, decisions become guards.


class Numbers:
    """What symbolic numbers talk to."""

    def __init__(self, builder: GraphBuilder, encoder: Encoder, met: Callable[[], None]) -> None:
        """Keep whom to tell of nodes and guards, who knows the nodes of numbers, and who is told where one is used inside of a node."""
        self._met = met
        self._builder = builder
        self._encoder = encoder

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Compute with symbolic numbers.

        Args:
            function: of the operator module, or one like it.
            args: numbers, one of them symbolic.

        Returns:
            A symbolic number where this is recorded.
        """
        value = function(*map(plain, args))
        if self._builder.inside:
            self._met()
            return value
        with self._builder.opaque():
            node = self._builder.emit("call_function", function, self._encoder.encode(args), size=True)
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
        if self._builder.inside:
            self._met()
            return value
        with self._builder.opaque():
            self._builder.guard(self._builder.emit("call_function", function, self._encoder.encode(args), size=True), value)
        return value

    def pin(self, node: fx.Node, value: Any) -> None:
        """Put a guard on a number that Python is about to use.

        Args:
            node: that computes it.
            value: of it.
        """
        if self._builder.inside:
            self._met()
            return
        with self._builder.opaque():
            self._builder.guard(node, value)

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
            self._builder.guard(node, value)
            return value
        return SymbolicInt(value, node, self) if isinstance(value, int) else SymbolicFloat(value, node, self)


# From the result of a recorded call back to Python.

_PLAIN = (NoneType, *BY_REFERENCE)


class Binder:
    """Gives the values that a recorded forward goes on with."""

    def __init__(self, builder: GraphBuilder, encoder: Encoder, numbers: Numbers, adopt: Callable[[fx.Node, Any], None]) -> None:
        """Keep whom to tell of tensors, of numbers, and of objects of the run (`adopt`)."""
        self._builder = builder
        self._encoder = encoder
        self._numbers = numbers
        self._adopt = adopt

    def bind_checked(self, node: fx.Node, value: Any) -> Any:
        """Bind the result of a module or leaf, whose build may differ from batch to batch.

        Args:
            node: of the call.
            value: its result.

        Returns:
            What Python goes on with.
        """
        if not isinstance(value, Tensor) or node.op == "call_function":
            shape = self._builder.emit("call_function", output_structure, (node,), size=True)
            self._builder.guard(shape, output_structure(value), "structure")
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
        if isinstance(value, Tensor):
            self._encoder.note(value, node)
            node.meta["tensor"] = describe(value)
            return value
        if is_symbolic(value) or isinstance(value, _PLAIN) or id(value) in self._encoder.objects:
            return value
        if isinstance(value, bool | int | float | complex):
            return self._numbers.number(value, node)
        if isinstance(value, str | bytes):
            self._builder.guard(node, value)
            return value
        if isinstance(value, tuple | list):
            return self._bind_sequence(node, value)
        if type(value) is dict or is_record(value):
            return self._bind_record(node, value)
        if isinstance(value, Iterator | np.ndarray | np.generic | torch.UntypedStorage):
            raise self._builder.refuse(
                f"a call returned a {type(value).__name__}, whose contents cannot be followed; return tensors, wrap the function around it "
                'with leaf(fn), or use engine="suspend"'
            )
        self._adopt(node, value)
        return value

    def _item(self, node: fx.Node, key: Any, size: bool) -> fx.Node:
        return self._builder.emit("call_function", operator.getitem, (node, key), size=size)

    def _bind_sequence(self, node: fx.Node, value: Any) -> Any:
        is_size = node.meta["number"] = type(value) is torch.Size
        if type(value) in (tuple, list) and not is_size:
            self._builder.guard(self._builder.emit("call_function", len, (node,), size=True), len(value))
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
                made = self._builder.emit("call_function", read_field, (node, name), size=True)
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
