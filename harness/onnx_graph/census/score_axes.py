"""Which factor of the scores is Q and which is K: K's positions are those that the softmax runs over and the product with V sums over.

Left and right say nothing, for scores are written both ways and transposed on the way. So the two free axes of the scores are followed,
counted from the last one, through whatever lies between them, the softmax and V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from harness.onnx_graph.census.flow import Shapes, operands
from harness.onnx_graph.census.products import Equation
from harness.onnx_graph.graph.constants import Constants

Axes = Mapping[int, int]
"""Axis of a value, -1 is the last, to the factor of the scores (0 or 1) whose free axis it is."""

_KEEPS_AXES = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Where", "Min", "Max", "Sum", "Pow", "PRelu", "QLinearAdd", "QLinearMul", "QLinearWhere"),
        *("Cast", "CastLike", "Identity", "Dropout", "Clip", "Neg", "Abs", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "Elu", "Gelu", "Erf"),
        *("Exp", "Sqrt", "Softplus", "QuantizeLinear", "DequantizeLinear", "Expand", "Tile", "Slice", "Split", "Concat", "QLinearConcat"),
        *("Pad", "Trilu", "ScatterElements", "ScatterND", "TopK", "Softmax", "QLinearSoftmax", "BiasSoftmax"),
    }
)
_BROADCASTS = frozenset(("MatMul", "Add", "Sub", "Mul", "Div", "Where", "Cast", "Identity", "Neg", "Sqrt", "Tanh", "Softmax"))
_FLATTENING_OPSET = 12
"""Up to this opset a Softmax runs over all axes from its own one on."""


class ScoreAxes:
    """The axes of one block's scores, wherever they have gone."""

    def __init__(self, scores: ir.Node, constants: Constants, shapes: Shapes, carries: Callable[[ir.Value], bool]) -> None:
        """Start at the scores.

        Args:
            scores: the product of Q and K.
            constants: of the graph.
            shapes: of the graph.
            carries: whether the scores may be in a value: it is an activation, and no layer or other product made it.
        """
        self._constants, self._shapes, self._carries = constants, shapes, carries
        self._opset = constants.view.model.opset_imports.get("", _FLATTENING_OPSET + 1)
        self._known: dict[ir.Value, Axes | None] = {scores.outputs[0]: _free_axes(scores)}
        self._ranks: dict[ir.Value, int | None] = {}

    def key(self, softmax: ir.Node) -> int | None:
        """Which factor of the scores a softmax runs over.

        Args:
            softmax: behind the scores.

        Returns:
            0 or 1; None where the axis cannot be followed.
        """
        axes = self._of(softmax.inputs[0])
        rank = self._rank(softmax.inputs[0])
        axis = softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else (-1 if self._opset > _FLATTENING_OPSET else 1)
        flattens = softmax.op_type == "BiasSoftmax" or self._opset <= _FLATTENING_OPSET
        if axis >= 0 and rank is None:
            return None
        last = axis if axis < 0 else axis - (rank or 0)
        return None if not axes or (flattens and last != -1) else axes.get(last)

    def summed(self, mix: ir.Node, weights: ir.Value) -> int | None:
        """Which factor of the scores the product with V sums over.

        Args:
            mix: that product.
            weights: its factor that comes from the softmax.

        Returns:
            0 or 1; None where the axis cannot be followed.
        """
        axes = self._of(weights) or {}
        found = {axes.get(axis) for axis in _summed_axes(mix, weights)}
        return found.pop() if len(found) == 1 else None

    def _of(self, value: ir.Value | None) -> Axes | None:
        """Axes of a value: empty where no scores are in it, None where they cannot be followed."""
        if value is None:
            return {}
        if value not in self._known:
            self._known[value] = {}  # graphs have no cycles; this only bounds what is asked twice
            node = value.producer()
            self._known[value] = {} if node is None or not self._carries(value) else self._through(node)
        return self._known[value]

    def _through(self, node: ir.Node) -> Axes | None:
        inputs = [self._of(value) for value in node.inputs]
        given = [axes for axes in inputs if axes != {}]
        if not given:
            return {}
        axes = given[0]
        if axes is None or any(other != axes for other in given[1:]):
            return None
        if node.op_type in _KEEPS_AXES or (node.op_type.startswith("Reduce") and _keeps_dims(node)):
            return axes
        move = _MOVES.get(node.op_type)
        return None if move is None else move(self, node, axes)

    def _rank(self, value: ir.Value | None) -> int | None:
        """Number of axes: what is stated, else what the nodes before a value say; a graph of TorchScript states few shapes."""
        if value is None:
            return None
        if value not in self._ranks:
            node = value.producer()
            stated = self._shapes.rank(value)
            self._ranks[value] = stated  # graphs have no cycles; this only bounds what is asked twice
            self._ranks[value] = self._made_rank(node) if stated is None and node is not None else stated
        return self._ranks[value]

    def _made_rank(self, node: ir.Node) -> int | None:
        if node.op_type == "Transpose" and "perm" in node.attributes:
            return len(node.attributes["perm"].as_ints())
        if node.op_type == "Einsum":
            output = Equation.of(node).output
            return None if "." in output else len(output)
        if node.op_type not in _BROADCASTS:
            return None
        ranks = [self._rank(value) for value in node.inputs if value is not None]
        return max((rank for rank in ranks if rank is not None), default=None) if None not in ranks else None

    def _transposed(self, node: ir.Node, axes: Axes) -> Axes | None:
        if "perm" not in node.attributes:
            return None
        order = node.attributes["perm"].as_ints()
        rank = len(order)
        return {position - rank: axes[axis - rank] for position, axis in enumerate(order) if axis - rank in axes}

    def _reshaped(self, node: ir.Node, axes: Axes) -> Axes | None:
        """The last axes stay what they are up to the first of another length, which is lost; what nobody states is taken for equal."""
        before, after = (self._shapes.of(value) if value is not None else None for value in (node.inputs[0], node.outputs[0]))
        if before is None or after is None:
            return axes
        same = 0
        for one, other in zip(reversed(before.dims), reversed(after.dims), strict=False):
            if isinstance(one, int) and isinstance(other, int) and one != other:
                break
            same -= 1
        kept = {axis: factor for axis, factor in axes.items() if axis >= same}
        return kept or None  # of scores in two axes, as old exporters write a softmax, the last one alone is still known

    def _unsqueezed(self, node: ir.Node, axes: Axes) -> Axes | None:
        places = self._places(node, self._rank(node.outputs[0]))
        rank = 0 - min([*axes, *(places or ())], default=0) + len(places or ())
        if places is None:
            return None
        free = [axis for axis in range(-1, -rank - 1, -1) if axis not in places]
        return {free[-axis - 1]: factor for axis, factor in axes.items()}

    def _squeezed(self, node: ir.Node, axes: Axes) -> Axes | None:
        value = node.inputs[0]
        places = self._places(node, self._rank(value))
        if places is None:
            return None
        return {axis + sum(place > axis for place in places): factor for axis, factor in axes.items() if axis not in places}

    def _places(self, node: ir.Node, rank: int | None) -> list[int] | None:
        """The axes that Unsqueeze and Squeeze name, counted from the last."""
        if "axes" in node.attributes:
            named = [int(axis) for axis in node.attributes["axes"].as_ints()]
        else:
            held = self._constants.of(node.inputs[1]) if len(node.inputs) > 1 else None
            if held is None:
                return None
            named = [int(axis) for axis in held.reshape(-1)]
        if rank is None and any(axis >= 0 for axis in named):
            return None
        return [axis if axis < 0 else axis - (rank or 0) for axis in named]


_MOVES: Mapping[str, Callable[[ScoreAxes, ir.Node, Axes], Axes | None]] = {
    "Transpose": ScoreAxes._transposed,
    "Reshape": ScoreAxes._reshaped,
    "Unsqueeze": ScoreAxes._unsqueezed,
    "Squeeze": ScoreAxes._squeezed,
}


def _free_axes(scores: ir.Node) -> Axes | None:
    if scores.op_type != "Einsum":
        return {-2: 0, -1: 1}
    equation = Equation.of(scores)
    if len(equation.inputs) != 2:
        return None
    axes = {}
    for place, letter in enumerate(reversed(equation.output)):
        if letter == ".":
            break
        holders = [position for position, subscripts in enumerate(equation.inputs) if letter in subscripts]
        if len(holders) == 1:
            axes[-1 - place] = holders[0]
    return axes


def _keeps_dims(node: ir.Node) -> bool:
    return "keepdims" not in node.attributes or bool(node.attributes["keepdims"].as_int())


def _summed_axes(mix: ir.Node, weights: ir.Value) -> list[int]:
    position = next(number for number, value in enumerate(operands(mix)) if value is weights)
    if mix.op_type == "Einsum":
        equation = Equation.of(mix)
        mine = equation.inputs[position]
        others = "".join(subscripts for number, subscripts in enumerate(equation.inputs) if number != position)
        tail = mine.rpartition(".")[2]
        return [place - len(tail) for place, letter in enumerate(tail) if letter in others and letter not in equation.output]
    flag = mix.attributes.get(("transA", "transB")[position])
    return [-1 if (position == 0) != bool(flag is not None and flag.as_int()) else -2]
