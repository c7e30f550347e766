"""Inputs of a graph, drawn from a seed: several drawings, so that what a mask, a flag or an id does is looked at.

Drawn with integers only, which are the same on every machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from compressor.errors import UserInputError
from harness.onnx_graph.graph.indexed_tables import id_limits, reached_tables

_MOST_ELEMENTS = 2**28
_MOST_TRIES = 8
_MOST_FLAGS = 6
_FAINT = 2.0**-7
_MOST_BITS_OF_A_SAMPLE = 16
_WIDE = range(-200, 200)  # what integers are drawn from that index no table; a graph that refuses them is given smaller ones
_SMALL = (*range(16), -1)
_FACTOR = re.compile(r"\w+")


@dataclass(frozen=True)
class Sizes:
    """What open sizes are drawn as; those of one name are equal, and one that is declared as a sum or product (`past + 1`) is computed.

    Attributes:
        first: of a first axis.
        other: of any other axis.
        named: of some names; completed by those that are met.
        sums: name to the sum of others that it is, as if it were declared so.
    """

    first: int = 2
    other: int = 7
    named: dict[str, int] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)

    def of(self, dimension: Any, axis: int) -> int:
        """Return the size of one axis.

        Args:
            dimension: as the graph declares it.
            axis: of its input.

        Returns:
            What is declared, or what is drawn.
        """
        if not is_open(dimension):
            return int(dimension.dim_value)
        size = self.other if axis else self.first
        terms = terms_of(self.sums.get(dimension.dim_param, dimension.dim_param))
        factors = [[int(one) if one.isdigit() else self.named.setdefault(one, size) for one in term] for term in terms]
        return sum(map(math.prod, factors)) if factors else size


def is_open(dimension: Any) -> bool:
    """Whether a graph leaves the size of an axis open; -1 is how some exporters say so."""
    return not (dimension.HasField("dim_value") and dimension.dim_value >= 0)


def terms_of(declared: str) -> list[list[str]]:
    """Take apart how the size of an axis is declared.

    Args:
        declared: a name, or a sum of products of names and numbers, as exporters write what follows from other sizes.

    Returns:
        The factors of each term; none of a size without a name, and the whole of what is written otherwise.
    """
    terms = [[factor.strip() for factor in term.split("*")] for term in declared.split("+")] if declared else []
    return terms if all(_FACTOR.fullmatch(factor) for term in terms for factor in term) else [[declared]]


def example_inputs(model: onnx.ModelProto, seed: int = 0, sizes: Sizes | None = None) -> dict[str, np.ndarray]:
    """Draw inputs that a graph accepts.

    Masks are ones, flags are true, ids stay within the tables that they index, symbolic dimensions of one name have one size.

    Args:
        model: not modified.
        seed: of the draw.
        sizes: of what is open; None for 2 along a first axis and 7 along others.

    Returns:
        Name to array.

    Raises:
        UserInputError: an input has no shape or a type that cannot be drawn; pass inputs.
    """
    draw = np.random.default_rng(seed)
    limits, drawn = id_limits(model), sizes or Sizes()
    return {value.name: _draw(value, draw, limits.get(value.name), drawn) for value in inputs_of(model)}


def inputs_of(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return what a caller must give: the inputs without those that have a value in the file."""
    held = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in held]


def open_axes(model: onnx.ModelProto) -> list[tuple[str, int]]:
    """Return name and axis of each size of an input that the graph leaves open."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in inputs_of(model)}
    return [(name, axis) for name, shape in shapes.items() for axis, dimension in enumerate(shape) if is_open(dimension)]


def other_inputs(model: onnx.ModelProto, first: Mapping[str, np.ndarray], seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Draw inputs again, each with other values than the first time.

    Masks leave out other places in every row, never all of them; each flag is false once while the others are true, and all are once.

    Args:
        model: not modified.
        first: as they were drawn before.
        seed: of the draw.

    Yields:
        Name to array; at least one.
    """
    draw = np.random.default_rng(seed + 1)
    limits, reached = id_limits(model), reached_tables(model)
    values = {value.name: value for value in model.graph.input if value.name in first}
    flags = [name for name, array in first.items() if is_flag(name, array)]
    chosen = [{name} for name in flags[:_MOST_FLAGS]] + ([set(flags)] if len(flags) > 1 else [])
    for number, off in enumerate([set[str](), *chosen]):
        again = {name: _again(values[name], array, draw, limits.get(name), name in off, number) for name, array in first.items()}
        computed = {name: again[name] for name in reached if name in again and name not in limits and not is_mask(name, again[name].dtype)}
        yield again | {name: _half_below(array, draw, reached[name]) for name, array in computed.items() if reached[name]}


def _half_below(wide: np.ndarray, draw: np.random.Generator, rows: int) -> np.ndarray:
    """Of ids that something is computed of half lie below the rows of their table: behind a Clip, wide ones all name the first or last."""
    below = _values(wide.shape, wide.dtype, draw, min(rows, np.iinfo(wide.dtype).max))
    return np.where(np.asarray(draw.integers(0, 2, wide.shape)) == 1, below, wide)


def narrower_ids(array: np.ndarray, rows: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Draw integers again that a graph refused, below the rows of their table and below ever smaller numbers; at last one for all.

    Args:
        array: as it was refused.
        rows: of the table; 0 where they are not known.
        seed: of the draw.

    Yields:
        Arrays of the same shape and type, the widest first; nothing for what holds no integers.
    """
    if np.issubdtype(array.dtype, np.integer):
        draw, limit = np.random.default_rng(seed + 5), rows or _WIDE.stop
        while limit > 1:
            yield _values(array.shape, array.dtype, draw, min(limit, np.iinfo(array.dtype).max))
            limit //= 2
        yield from (np.full_like(array, one) for one in _SMALL if one >= 0 or array.dtype.kind == "i")


def full_size_inputs(model: onnx.ModelProto, drawn: Sequence[Mapping[str, np.ndarray]], seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Draw inputs whose floats are all large at once, in [-16, 16): where scores outgrow a mask that is too soft, or overflow.

    Args:
        model: not modified.
        drawn: as they were drawn before; what is no float stays.
        seed: of the draw.

    Yields:
        Name to array, of each drawing, and with masks of two ones a row and of two zeros, then all of one sign, as bright pictures are;
        nothing where no input is a float.
    """
    draw, first = np.random.default_rng(seed + 2), drawn[0]
    floats = _floats(model, first)
    masks = {name: _two(one) for name, one in first.items() if is_mask(name, one.dtype) and one.ndim and one.shape[-1] > 2}
    sparse = [{**first, **masks}, {**first, **{name: 1 - one for name, one in masks.items()}}] if masks else []
    for inputs in [*drawn, *sparse] if floats else []:
        kept = {name: one.astype(first[name].dtype) for name, one in inputs.items()}
        yield kept | {name: (4 * _steps(first[name].shape, draw)).astype(first[name].dtype) for name in floats}
    for sign in (1, -1) if floats else ():
        yield {**first, **{name: (sign * np.abs(4 * _steps(first[name].shape, draw))).astype(first[name].dtype) for name in floats}}


def _two(like: np.ndarray) -> np.ndarray:
    """Zeros, and in each row ones at the first place, which is all that a causal mask leaves, and at one more."""
    rows = np.zeros((like.size // like.shape[-1], like.shape[-1]), np.int8)
    at = np.arange(len(rows))
    rows[:, 0] = rows[at, 1 + at % (rows.shape[1] - 1)] = 1
    return rows.reshape(like.shape)


def zeroed_inputs(model: onnx.ModelProto, first: Mapping[str, np.ndarray]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Zero floats as silence and padded frames are: what divides by a norm or a deviation, or takes a logarithm, needs its guard there.

    Args:
        model: not modified.
        first: as they were drawn before.

    Yields:
        What was done, in words, and name to array; nothing where no input is a float.
    """
    rows = {name: one.reshape(-1, one.shape[-1]) for name, one in _floats(model, first).items() if one.size and one.ndim}
    if rows:
        odd = {name: np.where(np.arange(len(one))[:, None] % 2 == 1, one, 0 * one).reshape(first[name].shape) for name, one in rows.items()}
        yield "every second row of floats is zero", {**first, **odd}
        half = {name: np.concatenate([0 * one[: (len(one) + 1) // 2], one[(len(one) + 1) // 2 :]]) for name, one in rows.items()}
        yield "the first half of the floats is zero", {**first, **{name: one.reshape(first[name].shape) for name, one in half.items()}}


def small_inputs(model: onnx.ModelProto, first: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Make floats small, as embeddings are: what is added to them is not hidden behind them then.

    Args:
        model: not modified.
        first: as they were drawn before.

    Yields:
        Name to array; nothing where no input is a float.
    """
    if floats := _floats(model, first):
        yield {**first, **{name: (one * np.asarray(_FAINT, one.dtype)).astype(one.dtype) for name, one in floats.items()}}


def _floats(model: onnx.ModelProto, first: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs that are neither masks nor ids in disguise."""
    limits = id_limits(model)
    return {name: one for name, one in first.items() if _is_float(one.dtype) and not is_mask(name, one.dtype) and name not in limits}


def nudged(inputs: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """Move every float by one rounding of its type, up or down.

    Args:
        inputs: by name.
        seed: of the draw.

    Returns:
        Name to array.
    """
    draw = np.random.default_rng(seed + 3)
    moved = {}
    for name, one in inputs.items():
        if _is_float(one.dtype) and not is_mask(name, one.dtype):
            signs = np.asarray(draw.integers(0, 2, one.shape)) * 2 - 1
            moved[name] = (one.astype(np.float64) * (1 + signs * float(np.finfo(one.dtype).eps))).astype(one.dtype)
    return {**inputs, **moved}


def _is_float(dtype: Any) -> bool:
    return bool(np.issubdtype(dtype, np.floating))


def _steps(shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Floats in [-4, 4) with all bits, the same on every machine."""
    return np.asarray(draw.integers(-(1 << 24), 1 << 24, shape)) / (1 << 22)


def _again(
    value: onnx.ValueInfoProto, first: np.ndarray, draw: np.random.Generator, limit: int | None, is_off: bool, number: int
) -> np.ndarray:
    if is_flag(value.name, first):
        return np.zeros_like(first) if is_off else first
    if is_mask(value.name, first.dtype):
        return _mask(first, draw, number)
    for _ in range(_MOST_TRIES):
        other = _values(first.shape, first.dtype, draw, limit, _WIDE)
        if not np.array_equal(other, first):
            return other
    return first


def _mask(ones: np.ndarray, draw: np.random.Generator, number: int) -> np.ndarray:
    """Ones and zeros: each row holds both, and differs from the next. The first place stays: it is all that a causal mask leaves."""
    length = ones.shape[-1] if ones.ndim else 1
    if ones.size == 0 or length == 1:
        return ones
    rows = draw.integers(0, 2, (ones.size // length, length))
    rows[:, 0] = 1
    at = np.arange(len(rows))
    rows[at, 1 + (at + number + 1) % (length - 1)] = 1
    rows[at, 1 + (at + number) % (length - 1)] = 0
    return rows.reshape(ones.shape).astype(ones.dtype)


def is_mask(name: str, dtype: Any) -> bool:
    """Whether an input is drawn as ones and zeros, by what it is called or as it holds truth values.

    Args:
        name: of the input.
        dtype: of its array.

    Returns:
        True for a mask.
    """
    return "mask" in name or dtype == np.bool_


def is_flag(name: str, array: np.ndarray) -> bool:
    """Whether an input is one truth value that switches something.

    Args:
        name: of the input.
        array: as drawn.

    Returns:
        True for a flag, which is no mask.
    """
    return array.dtype == np.bool_ and array.size == 1 and "mask" not in name


def _draw(value: onnx.ValueInfoProto, draw: np.random.Generator, limit: int | None, sizes: Sizes) -> np.ndarray:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        raise UserInputError(f"input {value.name}: it is no tensor of known rank, so no example can be drawn; pass inputs")
    shape = [sizes.of(dimension, axis) for axis, dimension in enumerate(kind.shape.dim)]
    if math.prod(shape) > _MOST_ELEMENTS:
        raise UserInputError(f"input {value.name}: {shape} are too many elements to draw; give the graph sizes that it is run with")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return np.ones(shape, dtype) if is_mask(value.name, dtype) else _values(tuple(shape), dtype, draw, limit)


def _values(shape: tuple[int, ...], dtype: Any, draw: np.random.Generator, limit: int | None, free: range = range(2)) -> np.ndarray:
    """Integers below their limit, or in `free` where they have none; floats in [-4, 4) with all bits, every 16th four times that.

    So a graph that rounds its inputs, or cuts them off, is told from one that does not.
    """
    if not np.issubdtype(dtype, np.integer):
        steps = _steps(shape, draw)
        return np.where(np.asarray(draw.integers(0, 16, shape)) == 0, 4 * steps, steps).astype(dtype)
    info = np.iinfo(dtype)
    whole = free is _WIDE and info.bits <= _MOST_BITS_OF_A_SAMPLE  # of pictures and sound: thresholds lie anywhere
    low, high = (0, limit) if limit else (info.min, info.max + 1) if whole else (max(free.start, info.min), min(free.stop, info.max))
    return np.asarray(draw.integers(low, high, shape)).astype(dtype)
