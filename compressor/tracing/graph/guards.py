"""How a guard reads: as a person would write the condition, and not at all where it cannot fail."""

from __future__ import annotations

import enum
import itertools
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx, nn

from compressor.tracing.graph.nested_values import read_field, structure
from compressor.tracing.graph.nodes import ROOT, Constant, Place
from compressor.tracing.graph.program import Program, target_of
from compressor.tracing.graph.replay import Needs, dependences
from compressor.tracing.targets.records import Guard

_MAX_DEPTH = 8
_READABLE = 140  # characters
_SYMBOLS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "mod": "%",
    "truediv": "/",
    "pow": "**",
    "and": "&",
    "or": "|",
}
_OF_PLACE = ("device", "dtype", "requires_grad")  # keywords that change no condition
_REFLECTED = {"__contains__": "{1} in {0}", "__rsub__": "{1} - {0}", "__radd__": "{1} + {0}", "__rmul__": "{1} * {0}"}
_UNARY = {"neg": "-{}", "invert": "~{}", "len": "len({})", "abs": "abs({})"}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
# What changes the type, the place or the wrapping of a value and not what a reader means by it.
_SAME = frozenset(
    (
        *(
            "to",
            "float",
            "double",
            "half",
            "bfloat16",
            "int",
            "long",
            "bool",
            "cpu",
            "cuda",
            "contiguous",
            "detach",
            "clone",
            "item",
            "truth",
        ),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__format__", "__str__", "__repr__", "type", "tolist"),
    )
)
_MADE = frozenset(("ones", "zeros", "empty", "rand", "randn"))  # of sizes only
_SIZE = re.compile(r"\d+|.*\.(shape\[\d+\]|size\(\)\[\d+\]|size\(\d+\)|numel\(\)|ndim)")


class Wording:
    """Writes the values of one recorded forward as expressions over its inputs."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """Keep how inputs are called.

        Args:
            names: name of a placeholder to what the model's author calls it, where that is something else.
        """
        self._names = names
        self._depth = _MAX_DEPTH

    def claim(self, value: Any, expected: Any) -> str | None:
        """Write what a guard demands.

        Args:
            value: node of what Python looked at.
            expected: what it was.

        Returns:
            Such as `input_ids.shape[1] > 1`; None for what is true of every batch that can come here.
        """
        text = self._claim(value, expected)
        for self._depth in range(_MAX_DEPTH - 1, 1, -1):  # dots for what lies deep, until it can be read
            shorter = None if text is None or len(text) <= _READABLE else self._claim(value, expected)
            text = shorter or text
        self._depth = _MAX_DEPTH
        return text

    def _claim(self, value: Any, expected: Any) -> str | None:
        compared = self._comparison(value)
        if compared is not None and isinstance(expected, bool):
            left, symbol, right = compared
            if _is_rank(value) or (left == right and _SIZE.fullmatch(left)) or (left.isdigit() and right.isdigit()):
                return None
            if _counts_ones(value) and expected:
                return None
            return f"{left} {symbol if expected else _OPPOSITE[symbol]} {right}"
        text = self.expression(value)
        if isinstance(expected, bool):
            if expected and _asks_all_of_ones(value):
                return None
            return text if expected else f"not {text}"
        shown = expected if isinstance(expected, str) and expected.isdigit() else repr(expected)  # a number that became text
        return None if text == shown or _is_rank(value) else f"{text} == {shown}"

    def expression(self, value: Any, depth: int = 0) -> str:
        """Write a value as an expression over the inputs.

        Args:
            value: a node, or a plain value.
            depth: how deep this already is; below a few levels dots must do.

        Returns:
            Such as `input_ids.shape[1]`.
        """
        if isinstance(value, slice):
            parts = ["" if part is None else self.expression(part, depth + 1) for part in (value.start, value.stop, value.step)]
            return ":".join(parts if parts[2] else parts[:2])
        if isinstance(value, list | tuple):
            return f"[{', '.join(self.expression(one, depth + 1) for one in value)}]"
        if not isinstance(value, fx.Node):
            return repr(value)
        if value.op in ("placeholder", "get_attr"):
            return self._names.get(str(value.target), str(value.target))
        if isinstance(value.target, Constant):
            return re.sub(r"_\d+$", "", value.target.__name__)
        if value.op == "call_module":
            return f"{target_of(value) or 'the model'}(...)"
        return "..." if depth > self._depth else self._call(value, depth)

    def _call(self, node: fx.Node, depth: int) -> str:
        name = _name(node)
        known = _size_of_made(node)
        if known is not None:
            return self.expression(known, depth)
        if name in _SAME and node.args:
            return self.expression(node.args[0], depth)
        if node.target is getattr:
            return f"{self._operand(node.args[0], depth)}.{node.args[1]}"
        if name == "size" and node.op == "call_method":
            place = f"[{self.expression(node.args[1], depth + 1)}]" if len(node.args) == 2 else ""
            return f"{self._operand(node.args[0], depth)}.shape{place}"
        if node.target is operator.getitem:
            index: Any = node.args[1]
            indices = index if isinstance(index, tuple) else (index,)
            return f"{self._operand(node.args[0], depth)}[{', '.join(self.expression(one, depth + 1) for one in indices)}]"
        operation = self._operation(node, name, depth)
        if operation is not None:
            return operation
        inner = [self.expression(part, depth + 1) for part in node.args]
        inner += [f"{key}={self.expression(part, depth + 1)}" for key, part in node.kwargs.items() if key not in _OF_PLACE]
        if node.op == "call_method":
            return f"{self._operand(node.args[0], depth)}.{name}({', '.join(inner[1:])})"
        return f"{name}({', '.join(inner[:3])})"

    def _operation(self, node: fx.Node, name: str, depth: int) -> str | None:
        """Write what has a symbol; None for another call."""
        operands, plain = [self._operand(part, depth) for part in node.args], name.strip("_")
        if len(operands) == 2 and name in _REFLECTED:
            return _REFLECTED[name].format(*operands)
        if len(operands) == 2 and plain == "sub" and node.meta.get("number") and _same(*node.args):
            return "0"
        if len(operands) == 2 and plain in _SYMBOLS:
            return self._binary(_SYMBOLS[plain], *operands)
        return _UNARY[plain].format(*operands) if len(operands) == 1 and plain in _UNARY else None

    def _operand(self, value: Any, depth: int) -> str:
        text = self.expression(value, depth + 1)
        return f"({text})" if isinstance(value, fx.Node) and _is_compound(text) else text

    def _binary(self, symbol: str, left: str, right: str) -> str:
        """Write an operation; a difference between equals, and a sum with nothing, need no saying."""
        if symbol == "-" and left == right and "..." not in left.replace("(...)", ""):
            return "0"
        if symbol in "+-" and right == "0":
            return left
        return right if symbol == "+" and left == "0" else f"{left} {symbol} {right}"

    def _comparison(self, value: Any) -> tuple[str, str, str] | None:
        node = _unwrapped(value)
        symbol = _SYMBOLS.get(_name(node).strip("_")) if isinstance(node, fx.Node) and len(node.args) == 2 else None
        if symbol not in _OPPOSITE:
            return None
        left, right = (self.expression(part) for part in node.args)
        return left, symbol, right


def _is_compound(text: str) -> bool:
    """True where a space stands outside of all brackets, so that something is computed there."""
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and not depth:
            return True
    return False


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _unwrapped(value: Any) -> Any:
    """Look through what does not change what a reader means."""
    while isinstance(value, fx.Node) and value.op != "placeholder" and _name(value) in _SAME and value.args:
        value = value.args[0]
    return value


def _made_sizes(value: Any) -> tuple[Any, ...] | None:
    """The sizes with which a tensor is made of nothing else (`ones(a, b)`); None for another one."""
    node = _unwrapped(value)
    if not isinstance(node, fx.Node) or node.op != "call_function" or _name(node) not in _MADE or not node.args:
        return None
    sizes = node.args[0] if isinstance(node.args[0], list | tuple) else node.args
    return tuple(sizes) if all(isinstance(size, int) or (isinstance(size, fx.Node) and size.meta.get("number")) for size in sizes) else None


def _size_of_made(node: fx.Node) -> Any:
    """One size of a tensor that is made of sizes, or how many it has; None for what asks something else."""
    if (node.target is getattr and node.args[1] == "ndim") or (node.op == "call_method" and node.target in ("dim", "ndimension")):
        sizes = _made_sizes(node.args[0])
        return None if sizes is None else len(sizes)
    if node.target is operator.getitem:
        shape, place = node.args
        asks = isinstance(shape, fx.Node) and (
            (shape.target is getattr and shape.args[1] == "shape") or (shape.target == "size" and len(shape.args) == 1)
        )
        sizes = _made_sizes(shape.args[0]) if isinstance(shape, fx.Node) and asks else None
    else:
        place = node.args[1] if node.op == "call_method" and node.target == "size" and len(node.args) == 2 else None
        sizes = _made_sizes(node.args[0]) if place is not None else None
    return sizes[place] if sizes is not None and isinstance(place, int) and -len(sizes) <= place < len(sizes) else None


def _without_nothing(value: Any) -> Any:
    """Look through a sum with 0, too."""
    node = _unwrapped(value)
    while isinstance(node, fx.Node) and _name(node).strip("_") == "add" and len(node.args) == 2 and node.args[1] == 0:
        node = _unwrapped(node.args[0])
    return node


def _same(one: Any, other: Any) -> bool:
    """True for one value, or for one that is made in the same way from the same."""
    one, other = _without_nothing(one), _without_nothing(other)
    if one is other:
        return True
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and bool(one == other)
    told = (one.op, one.target, list(one.kwargs)) == (other.op, other.target, list(other.kwargs))
    is_made = one.op in ("call_method", "call_function") and not _name(one).startswith(("rand", "empty"))
    return told and is_made and _same((*one.args, *one.kwargs.values()), (*other.args, *other.kwargs.values()))


def _counts_ones(value: Any) -> bool:
    """True for `ones(...).sum() == ones(...).numel()`."""
    parts = [_unwrapped(part) for part in _unwrapped(value).args]
    asked = [_name(part) for part in parts if isinstance(part, fx.Node) and part.args and _made_sizes(part.args[0]) is not None]
    made = {_name(_unwrapped(part.args[0])) for part in parts if isinstance(part, fx.Node) and part.args}
    counted = _name(_unwrapped(value)).strip("_") == "eq" and sorted(asked) == ["numel", "sum"] and made == {"ones"}
    return counted and _same(*(_made_sizes(part.args[0]) for part in parts))


def _asks_all_of_ones(value: Any) -> bool:
    """True for `ones(...).all()`."""
    node = _unwrapped(value)
    if not isinstance(node, fx.Node) or _name(node) != "all" or len(node.args) != 1:
        return False
    made = _unwrapped(node.args[0])
    return isinstance(made, fx.Node) and made.op == "call_function" and _name(made) == "ones"


def _is_rank(value: Any) -> bool:
    """True for what only asks how many dimensions there are: the signature of a batch says that of an input, and operations of the rest."""
    node = _unwrapped(value)
    if isinstance(node, fx.Node) and len(node.args) == 2 and _name(node).strip("_") in _SYMBOLS:
        return any(_is_rank(part) for part in node.args)
    is_rank = isinstance(node, fx.Node) and (
        (node.target is getattr and node.args[1] == "ndim") or (node.op == "call_method" and node.target in ("dim", "ndimension"))
    )
    source = _unwrapped(node.args[0]) if is_rank else None
    return isinstance(source, fx.Node) and _name(source) != "squeeze"  # which alone goes by sizes


# Which guards can be checked before the first stage: those over the inputs at once, those over shapes behind a target by a dry run.
#
# A guard over a value that a target computes can never be decided in advance, because compression changes what the target computes.

_TAKES_APART = (operator.getitem, getattr, len, read_field, structure)


@dataclass(frozen=True)
class GuardPlan:
    """How the guards of a program are decided.

    Attributes:
        entry: nodes that must run to check the guards over the inputs, in program order.
        by_shape: all guards depend on the shapes of the inputs only.
        late_shapes: guards over shapes behind a target.
        late_values: guards over values that a target computes, or over its weights.
        late_results: guards over how modules behind a target build their results.
        late_by_shape: those over shapes behind a target depend on the shapes of the inputs only.
    """

    entry: tuple[fx.Node, ...]
    by_shape: bool
    late_shapes: tuple[fx.Node, ...]
    late_values: tuple[fx.Node, ...]
    late_results: tuple[fx.Node, ...] = ()
    late_by_shape: bool = True


class _Kind(enum.Flag):
    """What a guard may depend on."""

    INPUT = enum.auto()
    TARGET = enum.auto()
    CHANGES = enum.auto()  # a weight of a target, or what a module has left on a module


def plan_guards(program: Program, groups: Sequence[str], model: nn.Module) -> GuardPlan:
    """Sort the guards of a program.

    Args:
        program: a recorded forward.
        groups: dotted names of all targets.
        model: that was recorded.

    Returns:
        What to run for them, and those that no early check can decide.
    """
    targets = {name or ROOT for name in groups}
    places = [name.rpartition(".") for name in program.reassigned if not name.startswith("?")]
    left = {(id(model.get_submodule(owner)), own) for owner, _, own in places}
    kinds = partial(_kind, targets=targets, left=left)
    early, late_shapes, late_values, late_results = [], [], [], []
    by_shape = late_by_shape = True
    for node, (values, needs) in dependences(program.flat.nodes, kinds, program.guard_nodes):
        if _Kind.CHANGES in values:
            late_values.append(node)
        elif _Kind.TARGET not in needs:
            early.append(node)
            by_shape = by_shape and _Kind.INPUT not in values
        elif node.meta["guard"] == "structure" and _is_of_module(node):
            late_results.append(node)  # checked when it is there
        elif node.meta["guard"] == "structure":
            late_shapes.append(node)  # a leaf's choice between a tensor and None: taken from the inputs, of which each batch has its own
            late_by_shape = False
        elif _Kind.TARGET in values:
            late_values.append(node)
        else:
            late_shapes.append(node)
            late_by_shape = late_by_shape and _Kind.INPUT not in values
    entry = tuple(Needs(list(program.flat.nodes)).of(early))
    late = (tuple(late_shapes), tuple(late_values), tuple(late_results))
    return GuardPlan(entry, by_shape and late_by_shape, *late, late_by_shape)


def _is_length_of_result(asked: Any) -> bool:
    """True for the number of things that a module or leaf returns: how its result is built."""
    return asked.target is len and isinstance(asked.args[0], fx.Node) and "context" in asked.args[0].meta


def _kind(node: fx.Node, targets: Collection[str], left: Collection[tuple[int, str]]) -> _Kind:
    if node.op == "placeholder":
        return _Kind.INPUT
    if node.op == "call_module":
        return _Kind.TARGET if node.target in targets else _Kind(0)
    return _Kind.CHANGES if _is_of(node, targets) or _is_left_on_module(node, left) else _Kind(0)


def _is_of(node: fx.Node, targets: Collection[str]) -> bool:
    """True for a weight of a target."""
    return node.op == "get_attr" and any(name in targets for name in itertools.accumulate(str(node.target).split("."), "{}.{}".format))


def _is_left_on_module(node: fx.Node, left: Collection[tuple[int, str]]) -> bool:
    """True for a tensor that a module has left on a module, in this very forward: no early check would find it there."""
    holder: Any = node.args[0] if node.target is getattr else None
    return isinstance(holder, fx.Node) and isinstance(holder.target, Constant) and (id(holder.target.value), node.args[1]) in left


def _is_of_module(node: fx.Node) -> bool:
    """True for the guard on the structure of a module's result, False for that of a leaf's."""
    asked: Any = node.args[0]
    return isinstance(asked.args[0], fx.Node) and asked.args[0].op == "call_module"


def why_late(guard: fx.Node, program: Program, targets: Collection[str]) -> str:
    """Say why no early check can decide a guard, and who can follow the model.

    Args:
        guard: of the late ones over values.
        program: that it belongs to.
        targets: dotted names of all targets.

    Returns:
        In words, without the place.
    """
    asked: Any = guard.args[0]
    expected: Any = guard.args[1]
    targets = {name or ROOT for name in targets}
    if any(_is_of(one, targets) for one in Needs(list(program.flat.nodes)).of([guard])):
        return (
            f"Python decides by a weight of a sequential target ({expected!r} when traced), and compression changes it; "
            'use pipeline="basic" or other sequential targets'
        )
    is_built = guard.meta["guard"] == "helper" and isinstance(expected, tuple)
    what = f"how a {expected[0]} is built" if is_built else f"the length {expected}" if asked.target is len else repr(expected)
    while isinstance(asked, fx.Node) and asked.target in _TAKES_APART:
        asked = asked.args[0]
    if isinstance(asked, fx.Node) and asked.op == "call_module" and asked.target in targets:
        return (
            f"Python goes by {what}, which {target_of(asked) or 'the model'} gives back beside tensors, and a recorded graph would have to "
            'know that before; only engine="suspend" can follow'
        )
    return (
        f"Python decides by a value that a sequential target computes or holds ({expected!r} when traced), and compression changes it; "
        'only engine="suspend" can follow'
    )


def describe_guard(node: fx.Node, segment: int, variant: int, wording: Wording) -> Guard | None:
    """Make the record of a guard.

    Args:
        node: of the guard.
        segment: in which it lies.
        variant: number of the program.
        wording: writes it.

    Returns:
        The record; None for one that holds for every batch that can take the program.
    """
    place: Place = node.meta["place"]
    is_value = node.meta["guard"] == "value" and not _is_length_of_result(node.args[0])
    text = wording.claim(node.args[0], node.args[1]) if is_value else ""
    if text is None:
        return None
    value = wording.expression(node.args[0])
    return Guard(place.file, place.line, place.function, value, node.args[1], segment - 1, variant, is_value, text)
