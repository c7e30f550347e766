"""Calls are cut where their sequences lie, which is proved by running them in another order, or stay whole"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import CalibrationError
from compressor.modifiers.tuning.sequences import cut, find_axes, joined

ROWS, HEADS, LENGTH = 4, 4, 6  # as many heads as rows, so that shapes do not tell
DRAW = torch.Generator().manual_seed(3)
HIDDEN = torch.randn(ROWS, LENGTH, 8, generator=DRAW)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW)


def by_blocks(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias.reshape(len(x), HEADS, LENGTH).mean(1).unsqueeze(-1)


def by_heads(x: Tensor, bias: Tensor) -> Tensor:
    return x + (torch.arange(1.0, HEADS + 1)[:, None, None] * bias).sum(0).unsqueeze(-1)


def by_axes_of_positions(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias[0].unsqueeze(-1) + 2 * bias[-1].unsqueeze(-1)


def over_the_batch(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias.sum() * x.mean(0, keepdim=True)


WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, int | None]] = {
    "blocks": (by_blocks, rand(ROWS * HEADS, 1, LENGTH), 0),
    "shared": (by_heads, rand(HEADS, 1, LENGTH), None),
    "second": (by_axes_of_positions, rand(ROWS, ROWS, LENGTH), 1),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("transposed", [False, True])
def test_where_sequences_lie_is_found(name: str, transposed: bool) -> None:
    block, bias, axis = WAYS[name]

    def run(inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, given = inputs
        return block(x.transpose(0, 1), given).transpose(0, 1) if transposed else block(x, given)

    inputs = HIDDEN.transpose(0, 1) if transposed else HIDDEN, bias
    axes = find_axes(inputs, run(inputs), ROWS, run, "block")
    assert axes == (int(transposed), axis, int(transposed))
    pieces = cut((inputs, run(inputs)), ROWS, ROWS * LENGTH, axes)
    together = list(joined([pieces[2], pieces[0], pieces[3]]))
    assert len(together) == 1
    torch.testing.assert_close(run(together[0][0]), together[0][1])


@pytest.mark.parametrize("shape", [(ROWS, LENGTH, 1), (1, LENGTH, 1)], ids=["of each sequence", "of all"])
def test_a_call_that_draws_random_numbers_is_refused(shape: tuple[int, ...]) -> None:
    def run(given: Any) -> Tensor:
        return given * (torch.rand(shape) if len(given) == ROWS else torch.rand(1, LENGTH, 1))

    with pytest.raises(CalibrationError, match="block: it gives other outputs when it is run again on the same inputs"):
        find_axes(HIDDEN, run(HIDDEN), ROWS, run, "block: it")


def test_a_call_whose_sequences_depend_on_each_other_stays_whole() -> None:
    inputs = HIDDEN, rand(1)
    axes = find_axes(inputs, over_the_batch(*inputs), ROWS, lambda given: over_the_batch(*given), "block")
    assert axes is None
    (piece,) = cut(inputs, ROWS, ROWS * LENGTH, axes)
    assert piece.num_rows == ROWS
    assert len(list(joined([piece, piece]))) == 2


def test_tokens_of_a_single_sequence_are_no_sequences() -> None:
    """Attention over a sequence and itself once more gives what it gives over one: only another one beside it shows."""

    def attend(x: Tensor) -> Tensor:  # [T, C], without a dimension of sequences
        return torch.softmax(x @ x.t(), -1) @ x

    x = rand(LENGTH, 8)
    assert find_axes(x, attend(x), 1, attend, "block") is None
    equal = rand(1, LENGTH, 8).expand(3, -1, -1)
    assert find_axes(equal, torch.vmap(attend)(equal), 3, torch.vmap(attend), "block") == (0, 0)


def test_what_has_as_many_rows_as_all_sequences_together_is_not_shared() -> None:
    """Positions of patches, the same for each of two images: two of them in another order do not show it, a third does."""

    def turn(given: tuple[Tensor, Tensor]) -> Tensor:
        patches, positions = given
        return patches * positions

    inputs = rand(2 * LENGTH, 8), rand(LENGTH, 8).repeat(2, 1)
    axes = find_axes(inputs, turn(inputs), 2, turn, "block")
    assert axes == (0, 0, 0)
    pieces = cut((inputs, turn(inputs)), 2, 2 * LENGTH, axes)
    ((together, output),) = joined([*pieces, *pieces])
    torch.testing.assert_close(turn(together), output)
