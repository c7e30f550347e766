"""Hypothesis strategies for weights that hurt: outliers, zeros, subnormals, constants, one-wide, primes, ties, NaN, in every dtype.

    @given(weights(dtypes=[torch.bfloat16], column_multiple=16))
    def test_my_quantizer(weight): ...

Examples shrink: to fewer rows, to plainer kinds of weights, and to fewer values that were planted by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from harness.checks.hurtful import HURTFUL, hurtful

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
        weight[place] = value * largest
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
