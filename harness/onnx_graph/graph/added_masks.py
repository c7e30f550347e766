"""Which masks a graph adds to scores: there zero shows a place, and a large negative number hides it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx

from harness.onnx_graph.graph.drawn_inputs import inputs_of, is_mask
from harness.onnx_graph.graph.indexed_tables import MOVES
from harness.onnx_graph.graph.local_functions import inlined

_ADDS: Mapping[str, Collection[int]] = {"Add": (0, 1), "Attention": (3, 5), "MultiHeadAttention": (5,), "GroupQueryAttention": (10,)}
"""Operator to the places of what it adds to scores (the mask of ONNX's Attention is its fourth, of Microsoft's its sixth input)."""


def added_masks(model: onnx.ModelProto) -> set[str]:
    """Find them.

    Args:
        model: not modified.

    Returns:
        Names of inputs that are called masks and hold floats, which are added as they are, or moved, and used in no other way.
    """
    graph = inlined(model).graph if model.functions else model.graph
    types = {value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in inputs_of(model)}
    held = {name: name for name, dtype in types.items() if np.issubdtype(dtype, np.floating) and is_mask(name, dtype)}
    numbers = {tensor.name for tensor in graph.initializer if not tensor.dims}
    is_added: dict[str, bool] = {}
    for node in graph.node if held else ():
        if node.op_type == "Constant":
            numbers |= {name for one in node.attribute if one.name != "value" or not one.t.dims for name in node.output}
        for at, name in ((at, name) for at, name in enumerate(node.input) if name in held):
            if node.op_type in MOVES:
                held |= dict.fromkeys(node.output, held[name])
            else:
                adds = at in _ADDS.get(node.op_type, ()) and numbers.isdisjoint(node.input)
                is_added[held[name]] = adds and is_added.get(held[name], True)
    return {name for name, adds in is_added.items() if adds}


def as_added(mask: np.ndarray) -> np.ndarray:
    """Write a mask of ones and zeros as it is added.

    Args:
        mask: of floats.

    Returns:
        Zero for one, and for zero the least number of the type.
    """
    return np.where(mask == 0, np.finfo(mask.dtype).min, np.zeros_like(mask))
