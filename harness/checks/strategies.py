"""Weights that hurt: tensors on which quantizers of others have failed, by name, the same every time.

Every builder takes a shape, the columns of a group, and a random generator, and returns float64 that is then cast; only `rand` and
`randint` are drawn, which do not differ between instruction sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

MOST_ROWS, MOST_COLUMNS = 521, 1031
"""Of the largest weights: what shows beyond these sizes only is not seen."""
Builder = Callable[[tuple[int, int], int, torch.Generator], Tensor]


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return values of [-1, 1), float64.

    Args:
        shape: of the tensor.
        generator: of the draw.

    Returns:
        The values.
    """
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


def _bell(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return sum((uniform(shape, generator) for _ in range(4)), torch.zeros(shape, dtype=torch.float64)) * 0.02


def _spread_groups(shape: tuple[int, int], group: int, generator: torch.Generator) -> Tensor:
    """Every row and every group has another magnitude, so that no scale fits its neighbour."""
    rows = 3.0 ** (torch.arange(shape[0], dtype=torch.float64) % 4)[:, None]
    columns = 7.0 ** (torch.arange(shape[1], dtype=torch.float64) // group % 4)
    return _bell(shape, generator) * rows * columns


def _outliers(shape: tuple[int, int], group: int, generator: torch.Generator) -> Tensor:
    weight = _bell(shape, generator)
    weight[:, ::7] *= 300.0
    return weight


def _dead_groups(shape: tuple[int, int], group: int, generator: torch.Generator) -> Tensor:
    weight = _bell(shape, generator)
    weight[:, :group] = 0
    weight[-1] = 0
    return weight


def _one_spike(shape: tuple[int, int], group: int, generator: torch.Generator) -> Tensor:
    weight = torch.zeros(shape, dtype=torch.float64)
    weight[shape[0] // 2, shape[1] // 2] = -0.75
    return weight


def _correlated(shape: tuple[int, int], group: int, generator: torch.Generator) -> Tensor:
    return _bell((shape[0], 1), generator) * torch.ones(shape, dtype=torch.float64) + 1e-3 * uniform(shape, generator)


def _on_grid(shape: tuple[int, int], group: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-6, 7, shape, generator=generator).to(torch.float64) / 64


def _widest(shape: tuple[int, int], group: int, generator: torch.Generator) -> Tensor:
    """Both ends in each group, so far from each other that their difference is beyond the largest number of the dtype."""
    weight = uniform(shape, generator)
    weight[:, ::group] = -1.0
    weight[:, 1::group] = 1.0
    return weight


def _ties(shape: tuple[int, int], group: int, generator: torch.Generator) -> Tensor:
    """Odd multiples of a half, with +-7.5 in each group: half_range scales of 4 bits are 1 and every value is a tie."""
    weight = torch.randint(-7, 8, shape, generator=generator).to(torch.float64) - 0.5
    weight[:, ::group] = -7.5
    return weight


HURTFUL: Mapping[str, Builder] = MappingProxyType(
    {
        "spread groups": _spread_groups,
        "bell": lambda shape, group, generator: _bell(shape, generator),
        "outliers": _outliers,
        "ties": _ties,
        "dead groups": _dead_groups,
        "one spike": _one_spike,
        "zeros": lambda shape, group, generator: torch.zeros(shape, dtype=torch.float64),
        "constant": lambda shape, group, generator: torch.full(shape, 0.3, dtype=torch.float64),
        "negative constant": lambda shape, group, generator: torch.full(shape, -0.7, dtype=torch.float64),
        "positive": lambda shape, group, generator: _bell(shape, generator).abs() + 0.01,
        "negative": lambda shape, group, generator: -_bell(shape, generator).abs() - 0.01,
        "lopsided": lambda shape, group, generator: _bell(shape, generator) + 0.05,
        "correlated columns": _correlated,
        "on the grid": _on_grid,
        "subnormal": lambda shape, group, generator: _bell(shape, generator) * 1e-6,  # scaled to the dtype below
        "large": lambda shape, group, generator: _bell(shape, generator),
        "small": lambda shape, group, generator: _bell(shape, generator),
        "tiny": lambda shape, group, generator: _bell(shape, generator),
        "widest": _widest,
    }
)
# Names whose values are moved to the ends of the range of a dtype.
_NEAR_TINY = {torch.float16: 1.0, torch.bfloat16: 1e-33, torch.float32: 1e-33, torch.float64: 1e-302}
_NEAR_MAX = {torch.float16: 2.0**13, torch.bfloat16: 2.0**100, torch.float32: 2.0**100, torch.float64: 2.0**900}
# Of the largest number: twice that is beyond it, and the first code of every width is not.
_WIDE = 0.6
# For floors under scales: the largest value. Below all that is a floor in practice, and one whose scale is just a normal number.
_SMALL = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-40, torch.float32: 2.0**-40, torch.float64: 2.0**-200}


def _largest(name: str, dtype: torch.dtype) -> float | None:
    """The largest value of weights that are so small that a floor under their scale shows; None for all others."""
    return {"small": _SMALL[dtype], "tiny": float(torch.finfo(dtype).tiny) * 2.0**9}.get(name)


def hurtful(name: str, shape: tuple[int, int], dtype: torch.dtype, *, group: int = 16, seed: int = 0) -> Tensor:
    """Build one weight that hurts.

    Args:
        name: a key of HURTFUL.
        shape: (R, C).
        dtype: of the weight.
        group: columns that share a scale, or about that.
        seed: of the draw.

    Returns:
        The weight, finite.
    """
    weight = HURTFUL[name](shape, max(1, min(group, shape[1])), torch.Generator().manual_seed(seed))
    if name == "subnormal":
        weight = weight * _NEAR_TINY[dtype]
    if name == "large":
        weight = weight * _NEAR_MAX[dtype]
    if name == "widest":
        weight = weight * (_WIDE * float(torch.finfo(dtype).max))
    if largest := _largest(name, dtype):
        weight = weight * (largest / weight.abs().amax().clamp(min=1e-9))
    return weight.to(dtype)


def shapes(column_multiple: int) -> list[tuple[int, int]]:
    """Return shapes that hurt: one wide, one high, odd, prime.

    Args:
        column_multiple: that the columns must keep to.

    Returns:
        (R, C) each.
    """
    if column_multiple == 1:
        return [(5, 37), (1, 1), (7, 1), (1, 13), (3, 64), (11, 31)]
    return [(5, 3 * column_multiple), (1, column_multiple), (7, column_multiple), (2, 5 * column_multiple)]


def square_shapes(column_multiple: int, group: int) -> list[tuple[int, int]]:
    """Return shapes whose rows fit the group as well as its columns do, for whoever takes groups along the wrong axis.

    Args:
        column_multiple: that the columns must keep to.
        group: columns that share a scale, or more than there are where a whole row does.

    Returns:
        (R, C) each, a square of several groups first.
    """
    size = column_multiple if group >= 64 * column_multiple else -(-group // column_multiple) * column_multiple
    size = max(size, 4)
    return [(2 * size, 2 * size), (2 * size, 3 * size)]


def large_shapes(column_multiple: int) -> list[tuple[int, int]]:
    """Return high and wide shapes, also of the fewest columns or of one row, for whoever goes through a weight in pieces and loses one.

    Args:
        column_multiple: that the columns must keep to.

    Returns:
        (R, C) each.
    """
    wide = -(-MOST_COLUMNS // column_multiple) * column_multiple
    return [(MOST_ROWS, 3 * column_multiple), (3, wide), (MOST_ROWS, column_multiple), (1, wide)]


def _grid_shapes(column_multiple: int, unit: tuple[int, int]) -> list[tuple[int, int]]:
    """As many units down as across, whole and cut short, and more across; none where two of them are larger than any weight here."""
    rows, columns = unit[0], -(-unit[1] // column_multiple) * column_multiple
    if rows > MOST_ROWS // 2 or columns > MOST_COLUMNS // 2:
        return []
    # What a last unit that is cut short still has: one column, a little more than half, all but one.
    left = (column_multiple, (columns // 2 // column_multiple + 1) * column_multiple, columns - column_multiple)
    cut = [(2 * rows - rows // 2, columns + kept) for kept in dict.fromkeys(left) if 0 < kept < columns]
    return [(2 * rows, 2 * columns), *cut, (2 * rows, 3 * columns)]


def fixed_weights(dtypes: Sequence[torch.dtype], column_multiple: int, group: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every hurtful weight in one shape and every dtype, the plainest one in every shape, and in square and large ones in one dtype.

    Args:
        dtypes: of the weights.
        column_multiple: that the columns must keep to.
        group: columns that share a scale, or about that.

    Yields:
        Words that say which one it is, and the weight.
    """
    all_shapes = shapes(column_multiple)
    for dtype in dtypes:
        for number, name in enumerate(HURTFUL):
            yield f"{name} {list(all_shapes[0])} {dtype}", hurtful(name, all_shapes[0], dtype, group=group, seed=number)
        larger = [*square_shapes(column_multiple, group), *large_shapes(column_multiple)] if dtype == dtypes[0] else []
        for number, shape in enumerate((*all_shapes[1:], *larger), 100):
            yield f"spread groups {list(shape)} {dtype}", hurtful("spread groups", shape, dtype, group=group, seed=number)


def decisive(shape: tuple[int, int], unit: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Build a weight in which every column of a unit decides its scale in some row: the ends of a unit lie in another one from row to row.

    Random values leave most columns of a wide row without a say in its scale: whoever overlooks such a column is right all the same.

    Args:
        shape: (R, C).
        unit: rows and columns that share a scale; of several rows, the last place decides.
        generator: of the other values.

    Returns:
        float64 [R, C].
    """
    weight = _bell(shape, generator)
    rows, columns = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    start = columns // unit[1] * unit[1]
    width = (shape[1] - start).clamp(max=unit[1])
    if unit[0] > 1:
        last_row = (rows % unit[0] == unit[0] - 1) | (rows == shape[0] - 1)
        weight[last_row & (columns - start == width - 1)] = 1.0
        return weight
    weight[columns - start == (7 * rows + 3) % width] = -0.9
    weight[columns - start == rows % width] = 1.0  # by another size, so that either end has no second
    return weight


def grid_weights(dtype: torch.dtype, column_multiple: int, unit: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of several units each way, all of other magnitudes than those beside them, and one in which each column decides.

    Args:
        dtype: of the weights.
        column_multiple: that the columns must keep to.
        unit: rows and columns that share a scale in a large weight.

    Yields:
        Words that say which one it is, and the weight.
    """
    for number, shape in enumerate(_grid_shapes(column_multiple, unit)):
        down = 2.0 ** -(torch.arange(shape[0]) // unit[0] % 4)[:, None]
        weight = hurtful("spread groups", shape, dtype, group=unit[1], seed=number)
        yield f"spread units {list(shape)} {dtype}", (weight * down).to(dtype)
    wide = -(-MOST_COLUMNS // column_multiple) * column_multiple
    shape = (min(unit[1], wide) if unit[0] == 1 else MOST_ROWS, wide)
    yield f"a column that decides {list(shape)} {dtype}", decisive(shape, unit, torch.Generator().manual_seed(0)).to(dtype)


# Hypothesis strategies for weights that hurt: outliers, zeros, subnormals, constants, one-wide, primes, ties, NaN, in every dtype.
#
#     @given(weights(dtypes=[torch.bfloat16], column_multiple=16))
#     def test_my_quantizer(weight): ...
#
# Examples shrink: to fewer rows, to plainer kinds of weights, and to fewer values that were planted by hand.

PRIMES = (1, 2, 3, 5, 7, 11, 13, 31, 37)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
# Planted by hand, times the largest value of the weight.
_PLANTED = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-3, 1.0 + 2**-7, 16.0)


@st.composite
def weights(
    draw: DrawFn,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    column_multiple: int = 1,
    max_rows: int = 7,
    nonfinite: bool = False,
) -> Tensor:
    """Draw a weight that hurts.

    Args:
        draw: of Hypothesis; not given by the caller.
        dtypes: to choose from.
        column_multiple: that the columns keep to.
        max_rows: at most so many rows.
        nonfinite: plant NaN or infinity, at least once.

    Returns:
        [R, C].
    """
    rows = draw(st.integers(1, max_rows))
    columns = draw(st.sampled_from(PRIMES)) if column_multiple == 1 else column_multiple * draw(st.integers(1, 5))
    name = draw(st.sampled_from(list(HURTFUL)))
    weight = hurtful(
        name, (rows, columns), draw(st.sampled_from(list(dtypes))), group=max(column_multiple, 8), seed=draw(st.integers(0, 999))
    )
    places = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1))
    largest = float(weight.abs().amax()) or 1.0
    for place, value in draw(st.lists(st.tuples(places, st.sampled_from(_PLANTED)), max_size=4)):
        weight[place] = min(value * largest, _WIDE * float(torch.finfo(weight.dtype).max))
    if nonfinite:
        weight[draw(places)] = draw(st.sampled_from(NOT_FINITE))
    return weight


def code_tensors(code_values: Tensor, dtype: torch.dtype, ranks: Sequence[int], column_multiple: int = 1) -> SearchStrategy[Tensor]:
    """Return a strategy for tensors of codes.

    Args:
        code_values: to choose from.
        dtype: of the codes.
        ranks: of the tensors.
        column_multiple: that the last dimension keeps to.

    Returns:
        The strategy.
    """

    @st.composite
    def drawn(draw: DrawFn) -> Tensor:
        leading = [draw(st.integers(1, 5)) for _ in range(draw(st.sampled_from(list(ranks))) - 1)]
        shape = (*leading, draw(st.sampled_from(PRIMES)) * column_multiple)
        generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
        return code_values[torch.randint(0, len(code_values), shape, generator=generator)].to(dtype)

    return drawn()
