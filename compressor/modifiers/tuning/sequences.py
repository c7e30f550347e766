"""Batches, or whatever a module is called with, cut into single sequences, and any of these put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Pieces = Sequence[Any]

MOST_TOKENS = 2048  # in a forward with gradients, if it has more than one sequence


def cut(tree: Any, num_rows: int) -> list[Any]:
    """Cut along the first dimension.

    Args:
        tree: tensors in dicts, tuples and lists, beside anything else.
        num_rows: sequences in it; tensors of another first dimension (positions that all share) go with each.

    Returns:
        One tree a sequence, of views; the tree itself where nothing can be cut.
    """
    leaves, spec = tree_flatten(tree)
    if num_rows <= 1:
        return [tree]

    def piece(leaf: Any, row: int) -> Any:
        return leaf[row : row + 1] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == num_rows else leaf

    return [tree_unflatten([piece(leaf, row) for leaf in leaves], spec) for row in range(num_rows)]


def joined(pieces: Pieces, num_tokens: Sequence[int]) -> Iterator[tuple[Any, list[int]]]:
    """Put sequences together that can run in one forward.

    Args:
        pieces: what `cut` gave.
        num_tokens: of each; a forward takes at most MOST_TOKENS, or one sequence.

    Yields:
        A tree, and the numbers of the pieces in it, in order.
    """
    group: list[int] = []
    for number in range(len(pieces)):
        fits = bool(group) and _alike(pieces[group[0]], pieces[number])
        if group and not (fits and sum(num_tokens[one] for one in group) + num_tokens[number] <= MOST_TOKENS):
            yield _together([pieces[one] for one in group]), group
            group = []
        group.append(number)
    if group:
        yield _together([pieces[one] for one in group]), group


def _alike(one: Any, other: Any) -> bool:
    (mine, my_spec), (theirs, their_spec) = tree_flatten(one), tree_flatten(other)
    return my_spec == their_spec and all(_stackable(a, b) or _same(a, b) for a, b in zip(mine, theirs, strict=True))


def _stackable(a: Any, b: Any) -> bool:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and a.dim() > 0 and a.shape[0] == 1 and a.shape == b.shape and a.dtype == b.dtype


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)


def _together(pieces: Pieces) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    columns = zip(*(tree_flatten(piece)[0] for piece in pieces), strict=True)
    return tree_unflatten([_leaf(column) for column in columns], tree_flatten(pieces[0])[1])


def _leaf(column: Sequence[Any]) -> Any:
    """One leaf for all: what they share, or their rows."""
    if all(one is column[0] for one in column) or not _stackable(column[0], column[1]):
        return column[0]
    return torch.cat(list(column))
