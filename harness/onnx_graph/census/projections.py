"""Linear layers of a graph: operator, activation, and the weight as a matrix [in_features, out_features], dequantized where it is codes.

A weight may be an initializer, or computed from some (Transpose, Cast, DequantizeLinear ...); what is constant is evaluated. The
orientation is always activation @ matrix, so that a transposed weight has another fingerprint than the right one.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from harness.onnx_graph.census.flow import is_opaque, operands
from harness.onnx_graph.census.products import Equation
from harness.onnx_graph.graph.constants import Constants
from harness.onnx_graph.graph.view import label, tensor_of

_TURNS_WITHIN = 1e-2
"""Of half precision and a few hundred rows."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A node that multiplies one activation by a constant matrix.

    Attributes:
        node: the node.
        activation: what is multiplied.
        matrix_IO: [in_features, out_features], float32.
        sources: the constants that hold the weight; of a slice, what it is cut from.
        stored: how the weight is kept: `float`, `codes` (computed by DequantizeLinear or inside of a quantized operator).
        beside: further layers that lead to the same role alone: those behind it that turn its result, then those before it.
    """

    node: ir.Node
    activation: ir.Value
    matrix_IO: np.ndarray
    sources: frozenset[ir.Value]
    stored: str
    beside: tuple[Projection, ...] = ()

    @property
    def name(self) -> str:
        """Of the node."""
        return label(self.node)

    @property
    def op(self) -> str:
        """Operator of the node."""
        return self.node.op_type

    @property
    def shape(self) -> tuple[int, int]:
        """(in_features, out_features)."""
        rows, columns = self.matrix_IO.shape
        return int(rows), int(columns)

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as JSON types."""
        told = {"node": self.name, "op": self.op, "shape": list(self.shape), "stored": self.stored, "fingerprint": self.fingerprint}
        return {**told, "beside": [one.to_dict() for one in self.beside]} if self.beside else told

    @functools.cached_property
    def selects(self) -> bool:
        """Whether it only picks columns of what comes in, as a slice does: fewer than come in, each from one place."""
        num_in, num_out = self.matrix_IO.shape
        return num_out < num_in and bool((np.count_nonzero(self.matrix_IO, axis=0) == 1).all())

    @functools.cached_property
    def turns(self) -> bool:
        """Whether its rows, or its columns, are orthogonal and of one length: Hadamard matrices, rotations, permutations, averages."""
        return any(_is_orthogonal(one) for one in (self.matrix_IO, self.matrix_IO.T))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of shape and values; another orientation has another one."""
        return fingerprint(self.matrix_IO)

    @functools.cached_property
    def whole(self) -> ir.Value | None:
        """The constant that it is a part of; None where it is all of it but for zeros that pad it."""
        arrays = {one: array for one in self.sources if (array := tensor_of(one)) is not None}
        held = max(arrays, key=lambda one: (arrays[one].size, str(one.name)), default=None)
        if held is None or arrays[held].size <= self.matrix_IO.size:
            return None
        return None if np.count_nonzero(arrays[held]) == np.count_nonzero(self.matrix_IO) else held

    @property
    def cut_from(self) -> str:
        """The name and shape of `whole`; empty where there is none."""
        array = None if self.whole is None else tensor_of(self.whole)
        return "" if self.whole is None or array is None else f"{self.whole.name} {list(array.shape)}"

    @property
    def marks(self) -> tuple[str, ...]:
        """Fingerprints of all layers that are the role's own."""
        return (self.fingerprint, *(one.fingerprint for one in self.beside))


def are_parts_of_copies(one: Projection, other: Projection) -> bool:
    """Say whether two layers are cut from constants of equal numbers, which a graph may hold once or twice, and as its transpose.

    Args:
        one: of a graph.
        other: of the same graph.

    Returns:
        True if so; False where one of them is all of its constant.
    """
    first, second = (None if layer.whole is None else tensor_of(layer.whole) for layer in (one, other))
    if first is None or second is None or first.size != second.size:
        return False
    return np.array_equal(first.ravel(), second.ravel()) or (first.T.shape == second.shape and np.array_equal(first.T, second))


def share_a_weight(one: Projection, other: Projection) -> bool:
    """Say whether two layers are computed from one constant that is as large as a layer, and no rotation that all are turned by.

    Behind layers that each has to itself one matrix may follow both, as Linformer's over the tokens does.

    Args:
        one: of a graph.
        other: of the same graph.

    Returns:
        True if so, as of a weight and its sum with another one.
    """
    before, others = (frozenset().union(*(each.sources for each in layer.beside)) for layer in (one, other))
    if before and others and before.isdisjoint(others):
        return False
    least = min(one.matrix_IO.size, other.matrix_IO.size)
    arrays = [array for value in one.sources & other.sources if (array := tensor_of(value)) is not None and array.size >= least]
    return any(array.ndim != 2 or not (_is_orthogonal(array) or _is_orthogonal(array.T)) for array in arrays)


def _is_orthogonal(matrix: np.ndarray) -> bool:
    """Whether M Mᵀ is a multiple of one: rows of one length, and a drawn vector comes back. No trained weight has the first."""
    squares = np.square(matrix, dtype=np.float64).sum(axis=1)
    mean = float(squares.mean())
    if not mean or not np.isfinite(mean) or np.abs(squares - mean).max() > _TURNS_WITHIN * mean:
        return False
    drawn = np.random.default_rng(0).standard_normal(len(matrix))
    wide = matrix.astype(np.float64)
    return bool(np.abs(wide @ (wide.T @ drawn) - mean * drawn).max() <= _TURNS_WITHIN * mean * np.abs(drawn).max())


def fingerprint(matrix_IO: np.ndarray) -> str:
    """Hash a matrix.

    Args:
        matrix_IO: [in_features, out_features], of any dtype; compared as float32.

    Returns:
        16 hex digits.
    """
    values = np.ascontiguousarray(matrix_IO, dtype=np.float32) + np.float32(0)  # -0.0 becomes 0.0: optimizers swap them freely
    return hashlib.sha256(repr(values.shape).encode() + values.tobytes()).hexdigest()[:16]


def _plain(weight: int) -> Callable[[Constants, ir.Node], np.ndarray | None]:
    def read(constants: Constants, node: ir.Node) -> np.ndarray | None:
        matrix = constants.of(node.inputs[weight])
        return None if matrix is None else _squeezed(matrix)

    return read


def _matmul(constants: Constants, node: ir.Node) -> np.ndarray | None:
    left, right = node.inputs[0], node.inputs[1]
    is_left = constants.view.is_constant(left)
    matrix = constants.of(left if is_left else right)
    if matrix is None or matrix.ndim < 2:
        return None
    if node.op_type == "FusedMatMul" and _flag(node, "transA" if is_left else "transB"):
        matrix = matrix.swapaxes(-1, -2)
    return _side_by_side(matrix.swapaxes(-1, -2) if is_left else matrix)


def _einsum(constants: Constants, node: ir.Node) -> np.ndarray | None:
    """What is summed becomes rows, the rest of the weight columns, in the order of the output."""
    if len(node.inputs) != 2:
        return None
    held = 0 if constants.view.is_constant(node.inputs[0]) else 1
    weight, equation = constants.of(node.inputs[held]), Equation.of(node)
    letters, other = equation.inputs[held], equation.inputs[1 - held]
    rows = [one for one in other if one in letters and one not in equation.output]
    columns = [one for one in equation.output if one in letters]
    if weight is None or not rows or "." in letters or len(rows) + len(columns) != len(letters):
        return None
    moved = weight.transpose([letters.index(one) for one in (*rows, *columns)])
    return moved.reshape(int(np.prod(moved.shape[: len(rows)])), -1)


def _gemm(constants: Constants, node: ir.Node) -> np.ndarray | None:
    matrix = _plain(1)(constants, node)
    return matrix.T if matrix is not None and _flag(node, "transB") else matrix


def _scaled(read: Callable[[Constants, ir.Node], np.ndarray | None]) -> Callable[[Constants, ir.Node], np.ndarray | None]:
    """Count the factor of the operator to its weight: alpha 0.5 and 2 W are the layer W."""

    def scaled(constants: Constants, node: ir.Node) -> np.ndarray | None:
        matrix, alpha = read(constants, node), node.attributes.get("alpha")
        return matrix if matrix is None or alpha is None else matrix.astype(np.float32) * np.float32(alpha.as_float())

    return scaled


def _conv(constants: Constants, node: ir.Node) -> np.ndarray | None:
    weight = constants.of(node.inputs[1])
    return None if weight is None or _number(node, "group", 1) != 1 else weight.reshape(len(weight), -1).T


def _quantized_conv(constants: Constants, node: ir.Node) -> np.ndarray | None:
    """QLinearConv: codes [O, I, ...] with a scale and a zero point, or one for each of O."""
    codes, scale, zero = (constants.of(node.inputs[place]) if place < len(node.inputs) else None for place in (3, 4, 5))
    if codes is None or scale is None or _number(node, "group", 1) != 1:
        return None
    shift = np.float32(0) if zero is None else zero.astype(np.float32)
    return ((codes.reshape(len(codes), -1).T.astype(np.float32) - shift) * scale).astype(np.float32)


def _with_scale(weight: int, scale: int, zero_point: int, transpose: str = "") -> Callable[[Constants, ir.Node], np.ndarray | None]:
    """Read a quantized operator that holds its codes, scale and zero point in these inputs; the scale may run over columns."""

    def read(constants: Constants, node: ir.Node) -> np.ndarray | None:
        parts = [constants.of(node.inputs[position]) if position < len(node.inputs) else None for position in (weight, scale, zero_point)]
        codes, step, zero = parts
        if codes is None or step is None:
            return None
        if transpose and _flag(node, transpose):
            codes = codes.T
        shift = 0 if zero is None else zero.astype(np.float32)
        matrix: np.ndarray = (codes.astype(np.float32) - shift) * step.astype(np.float32)
        return matrix

    return read


def _integer_codes(constants: Constants, node: ir.Node) -> np.ndarray | None:
    """MatMulInteger: the codes less the zero point, times the scale that a Mul further down applies together with that of the input."""
    codes, scale = constants.of(node.inputs[1]), _scale_behind(constants, node.outputs[0])
    zero = constants.of(node.inputs[3]) if len(node.inputs) > 3 else None
    if codes is None or scale is None:
        return None
    matrix: np.ndarray = (codes.astype(np.float32) - (0 if zero is None else zero.astype(np.float32))) * scale
    return matrix


def _scale_behind(constants: Constants, value: ir.Value) -> np.ndarray | None:
    """The first constant that an integer result is multiplied by, alone or times the scale of the input; None where there is none."""
    while len(uses := list(value.uses())) == 1:
        user, position = uses[0]
        value = user.outputs[0]
        if user.op_type == "Cast":
            continue
        other = user.inputs[1 - position] if user.op_type == "Mul" else None
        factors = _factors(constants, other)
        if factors is None:
            return None
        if factors:
            return math.prod(factors[1:], start=factors[0]).astype(np.float32)
    return None


def _factors(constants: Constants, value: ir.Value | None) -> list[np.ndarray] | None:
    """The constants among the factors of a scale; the scale of the input is no constant. None for anything else."""
    node = None if value is None else value.producer()
    if (held := constants.of(value)) is not None:
        return [held]
    if node is not None and node.op_type == "DynamicQuantizeLinear":
        return []
    parts = [_factors(constants, one) for one in node.inputs] if node is not None and node.op_type == "Mul" else [None]
    return None if None in parts else [one for part in parts if part is not None for one in part]


def _nbits(constants: Constants, node: ir.Node) -> np.ndarray | None:
    """MatMulNBits: [N, blocks, block_size * bits / 8] of packed codes, low bits first (source: onnxruntime, ContribOperators.md)."""
    packed, scales = constants.of(node.inputs[1]), constants.of(node.inputs[2])
    if packed is None or scales is None:
        return None
    bits, size = _number(node, "bits", 4), _number(node, "block_size", 32)
    num_out, num_in = _number(node, "N", 0), _number(node, "K", 0)
    num_blocks = -(-num_in // size)
    groups = _groups(constants, node, size, num_in, num_blocks)
    if packed.size * 8 != num_out * num_blocks * size * bits or scales.size != num_out * num_blocks or groups is None:
        return None  # not the layout that the operator takes, so nothing is known of the matrix
    codes = _unpack(packed.reshape(num_out, -1), bits)[:, :num_in].astype(np.float32)
    zero = constants.of(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    shift: Any = float(2 ** (bits - 1))
    if zero is not None:
        unpacked = _unpack(zero.reshape(num_out, -1), bits)[:, :num_blocks] if zero.dtype == np.uint8 else zero.reshape(num_out, num_blocks)
        shift = unpacked.astype(np.float32)[:, groups]
    return ((codes - shift) * scales.reshape(num_out, num_blocks).astype(np.float32)[:, groups]).T


def _groups(constants: Constants, node: ir.Node, size: int, num_in: int, num_blocks: int) -> np.ndarray | None:
    """The block whose scale each column of codes has: its own, or the one that g_idx names; None where nobody can tell."""
    if _number(node, "weight_prepacked", 0):
        return None
    if len(node.inputs) < 5 or node.inputs[4] is None:
        return np.arange(num_in) // size
    given = constants.of(node.inputs[4])
    if given is None or given.size < num_in or not ((given >= 0) & (given < num_blocks)).all():
        return None
    return given.reshape(-1)[:num_in]


_READERS: Mapping[str, Callable[[Constants, ir.Node], np.ndarray | None]] = {
    "MatMul": _matmul,
    "FusedMatMul": _scaled(_matmul),
    "TransposeMatMul": _scaled(_matmul),
    "Gemm": _scaled(_gemm),
    "FusedGemm": _scaled(_gemm),
    "GemmFastGelu": _plain(1),
    "Einsum": _einsum,
    "Conv": _conv,
    "FusedConv": _conv,
    "QLinearConv": _quantized_conv,
    "MatMulInteger": _integer_codes,
    "QLinearMatMul": _with_scale(3, 4, 5),
    "QGemm": _scaled(_with_scale(3, 4, 5, "transB")),
    "DynamicQuantizeMatMul": _with_scale(1, 2, 3),
    "MatMulIntegerToFloat": _with_scale(1, 3, 5),
    "MatMulNBits": _nbits,
}
_MOVES_ONE_HOT = frozenset({"Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze"})
_HOLDS_CODES = frozenset(
    {"MatMulInteger", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "QLinearConv"}
)


def find_projection(constants: Constants, node: ir.Node) -> Projection | None:
    """Read a node as a linear layer.

    Args:
        constants: of the node's graph.
        node: any node.

    Returns:
        The layer; None if it is none: no such operator, not exactly one activation, no constant matrix of rank 2, or a lookup of its rows.
    """
    read = _READERS.get(node.op_type)
    if read is None or is_opaque(node):
        return None
    given = operands(node)
    activations = [value for value in given if not constants.view.is_constant(value)]
    if len(activations) != 1 or activations[0] is None or _is_one_hot(activations[0]):
        return None
    matrix = read(constants, node)
    if matrix is None or matrix.ndim != 2 or matrix.shape[0] < 2:
        return None
    stored = "codes" if node.op_type in _HOLDS_CODES or any(map(constants.is_dequantized, node.inputs)) else "float"
    weight = next((value for value in given if value is not None and value is not activations[0]), node.inputs[1])
    assert weight is not None
    return Projection(node, activations[0], matrix.astype(np.float32), constants.sources(weight), stored)


def _is_one_hot(value: ir.Value | None) -> bool:
    """Whether a product with it looks rows up, as a Gather does."""
    node = None if value is None else value.producer()
    return node is not None and (node.op_type == "OneHot" or (node.op_type in _MOVES_ONE_HOT and _is_one_hot(node.inputs[0])))


def _squeezed(matrix: np.ndarray) -> np.ndarray | None:
    """Drop leading ones; None if the rest has no rank of 2."""
    while matrix.ndim > 2 and matrix.shape[0] == 1:
        matrix = matrix[0]
    return matrix if matrix.ndim == 2 else None


def _side_by_side(matrices: np.ndarray) -> np.ndarray:
    """Several matrices [..., in_features, out_features] that one product applies are columns of one."""
    if matrices.ndim == 2:
        return matrices
    return np.moveaxis(matrices, -2, 0).reshape(matrices.shape[-2], -1)


def _flag(node: ir.Node, name: str) -> bool:
    return bool(_number(node, name, 0))


def _number(node: ir.Node, name: str, default: int) -> int:
    return int(node.attributes[name].as_int()) if name in node.attributes else default


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Split bytes into codes, low bits first."""
    if bits == 8:
        return packed
    per_byte = 8 // bits
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    codes: np.ndarray = (packed[..., None] >> shifts) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)
