"""Rows as batches have them: padded on the left, on the right, padding alone; and the ids that a graph knows as special."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from harness.onnx_graph.graph.drawn_inputs import is_flag, is_mask
from harness.onnx_graph.graph.run_session import GraphRefused, Session, arrays_of

_PADS = 2


def special_inputs(first: Mapping[str, np.ndarray], special: Mapping[str, Collection[int]]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Put each id that a graph knows as special where padding and the ends of texts stand: first and last of the rows, in turn.

    Of a single integer there is one place.

    Args:
        first: inputs as they were drawn.
        special: name of an input to the ids.

    Yields:
        Name of the input, the id, and name to array.
    """
    for name, numbers in special.items():
        for number in sorted(numbers):
            for at in range(min(_PADS, first[name].size)):
                yield name, number, {**first, name: _with(first[name], number, at)}


def padded_inputs(
    first: Mapping[str, np.ndarray], special: Mapping[str, Collection[int]] | None = None
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Pad the rows of all masks, each at the left and each at the right, and leave every second one empty.

    Args:
        first: inputs whose masks are ones; what is no mask stays.
        special: name of an input to ids which the padded places hold, too, one after the other.

    Yields:
        What was done, in words, and name to array; nothing where no mask has a row.
    """
    masks = {name: one for name, one in first.items() if is_mask(name, one.dtype) and not is_flag(name, one) and one.ndim and one.size}
    for at, words in enumerate(("rows are padded on the left and right", "rows are padded on the right and left", "a row is empty")):
        padded = {name: _padded(one, at) for name, one in masks.items()}
        if any(not np.array_equal(one, masks[name]) for name, one in padded.items()):
            yield f"where {words}", {**first, **padded}
            for name, number in ((name, number) for name, numbers in (special or {}).items() for number in sorted(numbers)):
                yield f"where {words} and {name} is {number} there", {**first, **padded, name: _with(first[name], number, at)}


def _with(ids: np.ndarray, number: int, at: int) -> np.ndarray:
    if ids.size == 1:
        return np.full_like(ids, number)
    padded = _padded(np.ones_like(ids), at if ids.shape[-1] > 1 else _PADS) == 0
    return np.where(padded, np.asarray(number, ids.dtype), ids)


def _padded(ones: np.ndarray, at: int) -> np.ndarray:
    length = ones.shape[-1]
    rows = np.ones((ones.size // length, length), ones.dtype)
    if at == _PADS:
        rows[::2] = 0
    else:
        for number, row in enumerate(rows):  # no two rows alike, so that none may have another's mask
            pads = min(_PADS + number // 2, length - 1)
            row[slice(0, pads) if number % 2 == at else slice(length - pads, None)] = 0
    return rows.reshape(ones.shape)


Arrays = list[list[np.ndarray]]
"""Of every output those that it consists of."""


def equal_where_undecided(
    graphs: tuple[Session, Session], inputs: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], outputs: tuple[Any, Any]
) -> Arrays:
    """Take over what a mask does not decide: where all keys are hidden, the number that hides them chooses among what is hidden.

    Such values change with a hidden place and with another one, which no value does that the mask decides. Where the exported graph has
    zeros instead (a guard against NaN), those of the optimized graph may do so, at hidden places.

    Args:
        graphs: the exported and the optimized one.
        inputs: with masks; without any, nothing is hidden.
        other: other values of the same shapes.
        outputs: what both gave.

    Returns:
        Of every output of the optimized graph its arrays, and in places that are undecided what the exported graph has, unless only the
        optimized graph is NaN or infinite there.
    """
    hidden = _hidden(inputs)
    before, after = ([arrays_of(one) for one in given] for given in outputs)
    if not hidden:
        return after
    leaks, new = (_leaks(graph, inputs, other, given) for graph, given in zip(graphs, (before, after), strict=True))
    found = zip(before, after, leaks, new, strict=True)
    return [
        [_taken_over(*four, hidden) for four in zip(*arrays, strict=True)] if len(arrays[0]) == len(arrays[1]) else arrays[1]
        for arrays in found
    ]


def _leaks(graph: Session, inputs: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], given: Arrays) -> Arrays:
    """Where what a graph gave changes with each of two hidden places, or is NaN."""
    hidden = _hidden(inputs)
    leaks = [[np.ones(one.shape, np.bool_) for one in arrays] for arrays in given]
    for place in range(_PADS):
        moved = [[np.zeros(one.shape, np.bool_) for one in arrays] for arrays in given]
        for again in _other_content(inputs, other, hidden, place):
            try:
                found = [arrays_of(one) for one in graph.run(again)]
            except GraphRefused:
                continue
            moved = [[was | _moved(*pair) for was, *pair in zip(*three, strict=False)] for three in zip(moved, given, found, strict=True)]
        leaks = [[was & now for was, now in zip(*pair, strict=True)] for pair in zip(leaks, moved, strict=True)]
    return leaks


def _hidden(inputs: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Length of a mask to the places that it hides of each row [rows, length]."""
    found = {}
    for name, mask in inputs.items():
        if is_mask(name, mask.dtype) and mask.ndim and mask.size:
            rows = mask.shape[0] if mask.ndim > 1 else 1
            found[mask.shape[-1]] = mask.reshape(rows, -1, mask.shape[-1]).astype(np.float64).min(axis=1) == 0
    return found


def _other_content(
    inputs: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], hidden: Mapping[int, np.ndarray], place: int
) -> Iterator[dict[str, np.ndarray]]:
    """Inputs with other values at one hidden place of each row, five times, for one of few ids may be drawn again."""
    content = [name for name, one in inputs.items() if one.ndim > 1 and one.size and not is_mask(name, one.dtype)]
    for source, turn in ((other, 0), (other, 1), (other, 2), (inputs, 1), (inputs, 2)):
        again = dict(inputs)
        for name in content:
            rows, at = _places(inputs[name].shape, hidden, place)
            again[name] = inputs[name].copy()
            again[name][rows, at] = np.roll(source[name], turn)[rows, at]
        yield again


def _places(shape: tuple[int, ...], hidden: Mapping[int, np.ndarray], place: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and one hidden place of each along axis 1; of what is not as long as a mask, only rows of which nothing is left."""
    pads = hidden.get(shape[1])
    if pads is None:
        pads = np.repeat(next(iter(hidden.values())).all(axis=1, keepdims=True), shape[1], axis=1)
    if len(pads) != shape[0]:
        pads = np.repeat(pads.any(axis=0, keepdims=True), shape[0], axis=0)
    rows = np.flatnonzero(pads.any(axis=1))
    return rows, np.argsort(~pads[rows], axis=1, kind="stable")[:, min(place, shape[1] - 1)]


def _moved(was: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Where two runs differ; of three axes and more the last holds what is computed of one place."""
    if was.shape != now.shape:
        return np.zeros(was.shape, np.bool_)
    differs = np.asarray((was != now) | (was != was))
    return differs | differs.any(axis=-1, keepdims=True) if was.ndim > _PADS else differs


def _taken_over(
    expected: np.ndarray, actual: np.ndarray, leaks: np.ndarray, new: np.ndarray, hidden: Mapping[int, np.ndarray]
) -> np.ndarray:
    if expected.shape != actual.shape or expected.dtype != actual.dtype or expected.dtype.kind not in "biuf":
        return actual
    free = leaks | (new & _at_hidden_places(expected.shape, hidden))
    return np.where(free & (np.isfinite(actual) | ~np.isfinite(expected)), expected, actual)


def _at_hidden_places(shape: tuple[int, ...], hidden: Mapping[int, np.ndarray]) -> np.ndarray:
    """What of an output belongs to places that a mask hides, and to rows of which nothing is left."""
    found = np.zeros(shape, np.bool_)
    for length, pads in hidden.items():
        if shape and shape[0] == len(pads):
            axis = shape.index(length, 1) if length in shape[1:] else None
            row = pads if axis is not None else pads.all(axis=1, keepdims=True)
            found |= row.reshape(len(pads), *(row.shape[1] if one == axis else 1 for one in range(1, len(shape))))
    return found
