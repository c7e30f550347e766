"""Which sizes a graph is run at where it leaves them open: long and short, unequal in either order, one, and none in what it joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import onnx

from harness.onnx_graph.graph.drawn_inputs import Sizes, inputs_of, is_open, terms_of
from harness.onnx_graph.graph.local_functions import inlined

_UNEQUAL = range(9, 33, 4)
_MOST_NAMES = len(_UNEQUAL)
_LONG = (131, 67, 35, 19)  # past the last of the 128 places that relative positions tell apart in T5, MPNet


def sizes_to_look_at(model: onnx.ModelProto, takes: Callable[[Sizes], bool]) -> Iterator[tuple[str, Sequence[Sizes]]]:
    """Choose sizes, for what an optimizer froze at the others, squeezed, broadcast or left out by mistake.

    Lengths of different names are unequal in either order, for what reads one in place of the other (an encoder's and a decoder's); each
    is 1 beside longer ones (a new token behind a past), and what the graph joins to what it computes has no element once (the past of a
    first call). Names that the graph takes only together (what exporters call the length of a mask and that of its ids) are equal.

    Args:
        model: not modified.
        takes: whether the graph runs at some sizes.

    Yields:
        The sizes in words, and what may be drawn, of which the first that the graph takes says most; nothing where no size is open.
    """
    shapes = [list(value.type.tensor_type.shape.dim) for value in inputs_of(model)]
    if not any(is_open(dimension) for shape in shapes for dimension in shape):
        return
    rows, lengths = (_tied(names[:_MOST_NAMES], takes) for names in _rows_and_lengths(shapes))
    yield "others than 2 and 7", [Sizes(*both) for both in ((3, 11), (3, 5), (2, 11), (2, 5), (3, 7))]
    if several := [tied for one in (rows, lengths) if len(one) > 1 for tied in one]:
        for order in (1, -1):
            sizes = zip((*rows[::order], *lengths[::order]), (*range(3, 3 + len(rows)), *_UNEQUAL), strict=False)
            yield f"unequal {', '.join(map(_words, several))}", [Sizes(3, 11, _named(sizes))]
    yield f"a length of {_LONG[-1]} or more", [Sizes(1, length) for length in _LONG]
    yield "one row", [Sizes(1, 7)]
    yield "a length of 1", [Sizes(2, 1)]
    yield "one row of length 1", [Sizes(1, 1)]
    for tied in several:
        yield f"{_words(tied)} of 1 alone", [Sizes(2, 7, _named([(tied, 1)]))]
    joined = _joined(model)
    for tied in (tied for tied in (*rows, *lengths) if joined.intersection(tied)):
        yield f"{_words(tied)} of 0", [Sizes(2, 7, _named([(tied, 0)]))]


def _tied(names: Sequence[str], takes: Callable[[Sizes], bool]) -> list[Sequence[str]]:
    """Names by themselves, and such as the graph takes only if they are equal."""
    found, left = list[Sequence[str]](), list(names)
    while left:
        alone, tied = left[0], [] if _changes(left[:1], takes) or not _changes(left, takes) else left[1:]
        for name in tied[::]:
            if _changes([alone, *(one for one in tied if one != name)], takes):
                tied.remove(name)
        found.append([alone, *tied])
        left = [name for name in left[1:] if name not in tied]
    return found


def _changes(names: Sequence[str], takes: Callable[[Sizes], bool]) -> bool:
    return takes(Sizes(2, 7, dict.fromkeys(names, _UNEQUAL.start)))


def _named(sizes: Iterable[tuple[Sequence[str], int]]) -> dict[str, int]:
    return {name: size for tied, size in sizes for name in tied}


def _words(tied: Sequence[str]) -> str:
    return " = ".join(tied)


def _rows_and_lengths(shapes: Sequence[Sequence[onnx.TensorShapeProto.Dimension]]) -> tuple[list[str], list[str]]:
    """Names of open sizes that are met at a first axis, and of the others."""
    met = [(axis, name) for shape in shapes for axis, one in enumerate(shape) if is_open(one) for name in _names(one.dim_param)]
    rows = dict.fromkeys(name for axis, name in met if axis == 0)
    return list(rows), list(dict.fromkeys(name for _, name in met if name not in rows))


def _names(declared: str) -> list[str]:
    return [factor for term in terms_of(declared) for factor in term if not factor.isdigit()]


def _joined(model: onnx.ModelProto) -> set[str]:
    """Names of open sizes along which an input is joined to something: what grows from call to call, and begins with nothing."""
    graph = inlined(model).graph if model.functions else model.graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in inputs_of(model)}
    found = set[str]()
    for node in graph.node:
        axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
        for shape in (shapes[name] for name in node.input if node.op_type == "Concat" and name in shapes):
            if -len(shape) <= axis < len(shape) and is_open(shape[axis]):
                found.update(_names(shape[axis].dim_param))
    return found
