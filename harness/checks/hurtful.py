"""Weights that hurt: tensors on which quantizers of others have failed, by name, the same every time.

Every builder takes a shape, the columns of a group, and a random generator, and returns float64 that is then cast; only `rand` and
`randint` are drawn, which do not differ between instruction sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

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
    }
)
# Names whose values are moved to the ends of the range of a dtype.
_NEAR_TINY = {torch.float16: 1.0, torch.bfloat16: 1e-33, torch.float32: 1e-33, torch.float64: 1e-302}
_NEAR_MAX = {torch.float16: 2.0**13, torch.bfloat16: 2.0**100, torch.float32: 2.0**100, torch.float64: 2.0**900}


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


def large_shapes(column_multiple: int) -> list[tuple[int, int]]:
    """Return one high and one wide shape, for whoever goes through a weight in pieces and loses one.

    Args:
        column_multiple: that the columns must keep to.

    Returns:
        (R, C) each.
    """
    return [(131, 3 * column_multiple), (3, -(-1031 // column_multiple) * column_multiple)]


def fixed_weights(dtypes: Sequence[torch.dtype], column_multiple: int, group: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every hurtful weight in one shape and every dtype, then the plainest one in every shape, in large ones in the first dtype.

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
        larger = large_shapes(column_multiple) if dtype == dtypes[0] else []
        for number, shape in enumerate((*all_shapes[1:], *larger), 100):
            yield f"spread groups {list(shape)} {dtype}", hurtful("spread groups", shape, dtype, group=group, seed=number)
