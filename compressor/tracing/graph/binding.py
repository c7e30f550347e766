"""From the result of a recorded call back to Python: tensors are remembered, numbers become symbolic, what steers Python gets a guard."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from compressor.data.layouts import has_memory, num_bytes, shape_of
from compressor.tracing.graph.symbolic import is_symbolic
from compressor.tracing.graph.trees import BY_REFERENCE, is_named_tuple, is_record, read_field, record_fields, structure

if TYPE_CHECKING:
    from compressor.tracing.graph.recorder import Recorder

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
