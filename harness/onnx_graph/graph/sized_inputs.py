"""Which sizes a graph is run at where it leaves them open: long and short, unequal in either order, one, and none in what it joins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx

from compressor.errors import UserInputError
from harness.onnx_graph.graph.drawn_inputs import Sizes, example_inputs, inputs_of, is_open, open_axes, terms_of
from harness.onnx_graph.graph.local_functions import all_nodes, inlined
from harness.onnx_graph.graph.run_session import GraphRefused, Session

_STEP = 4
_MOST_LENGTHS, _MOST_NAMES = 6, 64
_LONGER = (124, 60, 28, 12)  # 131 is past the last of the 128 places that relative positions tell apart in T5, MPNet
_FIRST = (7, 67, 131, 1031)  # sound is asked for in windows of hundreds, pictures in patches

Takes = Callable[[Sizes], bool]
"""Whether a graph runs at some sizes."""


def first_drawn(
    graph: Session, model: onnx.ModelProto, several: Sequence[Sizes], seed: int = 0
) -> tuple[dict[str, np.ndarray], list[Any]] | None:
    """Draw in the first of several sizes that is not too large, and that a graph takes.

    Args:
        graph: that runs.
        model: of it.
        several: sizes, in order.
        seed: of the draw.

    Returns:
        Inputs, and what the graph makes of them; None where it takes none.
    """
    for sizes in several:
        try:
            inputs = example_inputs(model, seed, sizes)
            return inputs, graph.run(inputs)
        except (GraphRefused, UserInputError):
            continue
    return None


def first_sizes(graph: Session, model: onnx.ModelProto) -> Sizes:
    """Find sizes that a graph takes: 2 and 7, or longer, with one length that is the sum of two (a mask over a past and what is new).

    Args:
        graph: that runs.
        model: of it.

    Returns:
        The first that it takes; 2 and 7 where it takes none.
    """

    def takes(sizes: Sizes) -> bool:
        return first_drawn(graph, model, [sizes]) is not None

    lengths = _rows_and_lengths(model)[1][:_MOST_LENGTHS]
    added = [(name, pair) for name in lengths for pair in itertools.combinations([one for one in lengths if one != name], 2)]
    for other in _FIRST:
        if takes(Sizes(2, other)):
            return Sizes(2, other)
        for name, pair in added:
            first = Sizes(2, other, {}, {name: " + ".join(pair)})
            if takes(first) and any(takes(_sizes(first, 2, other, ([one], other + 1))) for one in pair):
                return Sizes(2, other, {}, first.sums)
    return Sizes()


def sizes_to_look_at(model: onnx.ModelProto, first: Sizes, takes: Takes) -> Iterator[tuple[str, Sequence[Sizes]]]:
    """Choose sizes, for what an optimizer froze at the others, squeezed, broadcast or left out by mistake.

    Lengths of different names are unequal in either order, for what reads one in place of the other (an encoder's and a decoder's); each
    is 1 beside longer ones (a new token behind a past), and what the graph joins to what it computes has no element once (the past of a
    first call). Names that the graph takes only together (what exporters call the length of a mask and that of its ids) are equal.

    Args:
        model: not modified.
        first: that it takes.
        takes: whether the graph runs at some sizes.

    Yields:
        The sizes in words, and what may be drawn, of which the first that the graph takes says most; nothing where no size is open.
    """
    if not open_axes(model):
        return
    at, long = first.other, [first.other + more for more in _LONGER]
    free = ([name for name in names if name not in first.sums][:_MOST_NAMES] for names in _rows_and_lengths(model))
    rows, lengths = (_tied(names, first, takes)[:_MOST_LENGTHS] for names in free)
    yield f"others than 2 and {at}", [_sizes(first, *both) for both in ((3, at + 4), (3, at - 2), (2, at + 4), (2, at - 2), (3, at))]
    if several := [tied for one in (rows, lengths) if len(one) > 1 for tied in one]:
        unequal = (*range(3, 3 + len(rows)), *range(at + 2, at + 2 + _STEP * len(lengths), _STEP))
        for order in (1, -1):
            sizes = zip((*rows[::order], *lengths[::order]), unequal, strict=True)
            yield f"unequal {', '.join(map(_words, several))}", [_sizes(first, 3, at + 4, *sizes)]
    yield f"a length of {long[-1]} or more", [_sizes(first, 1, length) for length in long]
    yield "one row", [_sizes(first, 1, at)]
    yield "a length of 1", [_sizes(first, 2, 1)]
    yield "one row of length 1", [_sizes(first, 1, 1)]
    for tied in several:
        yield f"{_words(tied)} of 1 alone", [_sizes(first, 2, at, (tied, 1))]
    joined = _joined(model)
    for tied in (tied for tied in (*rows, *lengths) if joined.intersection(tied)):
        yield f"{_words(tied)} of 0", [_sizes(first, 2, at, (tied, 0))]


def _sizes(like: Sizes, first: int, other: int, *named: tuple[Sequence[str], int]) -> Sizes:
    return Sizes(first, other, {name: size for tied, size in named for name in tied}, like.sums)


def _tied(names: Sequence[str], first: Sizes, takes: Takes) -> list[Sequence[str]]:
    """Names by themselves, and such as the graph takes only if they are equal."""

    def changes(*changed: str) -> bool:
        return takes(_sizes(first, 2, first.other, (changed, first.other + 2)))

    found, left = list[Sequence[str]](), list(names)
    while left:
        alone, tied = left[0], [] if changes(left[0]) or not changes(*left) else left[1:]
        for name in tied[::]:
            if changes(alone, *(one for one in tied if one != name)):
                tied.remove(name)
        found.append([alone, *tied])
        left = [name for name in left[1:] if name not in tied]
    return found


def _words(tied: Sequence[str]) -> str:
    return " = ".join(tied)


def _rows_and_lengths(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    """Names of open sizes that are met at first axes alone, and of the others."""
    shapes = [value.type.tensor_type.shape.dim for value in inputs_of(model)]
    met = [(axis, name) for shape in shapes for axis, one in enumerate(shape) if is_open(one) for name in _names(one.dim_param)]
    lengths = dict.fromkeys(name for axis, name in met if axis)
    return [name for name in dict.fromkeys(name for _, name in met) if name not in lengths], list(lengths)


def _names(declared: str) -> list[str]:
    return [factor for term in terms_of(declared) for factor in term if not factor.isdigit()]


def _joined(model: onnx.ModelProto) -> set[str]:
    """Names of open sizes along which an input is joined to something: what grows from call to call, and begins with nothing."""
    graph = inlined(model).graph if model.functions else model.graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in inputs_of(model)}
    found = set[str]()
    for node in all_nodes(graph.node):
        axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
        for shape in (shapes[name] for name in node.input if node.op_type == "Concat" and name in shapes):
            if -len(shape) <= axis < len(shape) and is_open(shape[axis]):
                found.update(_names(shape[axis].dim_param))
    return found
