"""Batches, or whatever a module is called with, cut into single sequences, and any of these put together again.

Shapes do not say where sequences lie in a tensor: an ALiBi bias [batch * heads, 1, tokens] holds them in blocks, M-RoPE positions
[3, batch, tokens] in the second dimension, and a bias [heads, 1, tokens] in none, even where there are as many heads as sequences. So a
way to cut is believed when sequences that are put together in another order give what they gave; what cannot be cut so runs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from compressor.errors import CalibrationError

Axes = tuple[int | None, ...]  # of every leaf of a tree, the dimension in which sequences lie; None: all share it

MOST_TOKENS = 2048  # in a forward with gradients, if it has more than one sequence
_MOST_WAYS = 32  # that are tried
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_SAME = 0.5  # outputs that are closer than eps to this power are the same


@dataclass(frozen=True)
class Piece:
    """What runs at once at least: a sequence, or a call that cannot be cut.

    Attributes:
        leaves: of a tree.
        spec: of the tree.
        axes: of its leaves; None where it runs by itself.
        num_rows: sequences in it.
        num_tokens: that a forward reads.
    """

    leaves: list[Any]
    spec: TreeSpec
    axes: Axes | None
    num_rows: int
    num_tokens: int


def sequences_at_once(num_sequences: int, num_tokens: int) -> int:
    """Say how many sequences `joined` puts into one forward, at most.

    Args:
        num_sequences: that are drawn.
        num_tokens: of each.

    Returns:
        At least 1.
    """
    return min(num_sequences, max(1, MOST_TOKENS // max(1, num_tokens)))


def cut(tree: Any, num_rows: int, num_tokens: int, axes: Axes | None) -> list[Piece]:
    """Cut a tree into sequences.

    Args:
        tree: tensors in dicts, tuples and lists, beside anything else.
        num_rows: sequences in it.
        num_tokens: in it.
        axes: of its leaves, as found by `find_axes`; None: the tree stays whole.

    Returns:
        A piece for each sequence, of views.
    """
    leaves, spec = tree_flatten(tree)
    if axes is None:
        return [Piece(leaves, spec, None, num_rows, num_tokens)]
    columns = [
        [leaf] * num_rows if axis is None else torch.tensor_split(leaf, num_rows, dim=axis) for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return [Piece([column[row] for column in columns], spec, axes, 1, num_tokens // num_rows) for row in range(num_rows)]


def joined(pieces: Sequence[Piece]) -> Iterator[Any]:
    """Put sequences together that can run in one forward.

    Args:
        pieces: what `cut` gave; a forward takes at most MOST_TOKENS of them, or one piece.

    Yields:
        A tree.
    """
    group: list[Piece] = []
    for piece in pieces:
        if group and not (_alike(group[0], piece) and sum(one.num_tokens for one in group) + piece.num_tokens <= MOST_TOKENS):
            yield _together(group)
            group = []
        group.append(piece)
    if group:
        yield _together(group)


def find_axes(inputs: Any, output: Any, num_rows: int, run: Callable[[Any], Any], where: str) -> Axes | None:
    """Find out where sequences lie, by running three in another order: two, the first of them again. A single one is the other backwards.

    Args:
        inputs: tree of a call.
        output: what the call gave, a floating-point tensor or a tree of such.
        num_rows: sequences in it.
        run: gives the output of inputs.
        where: what is run, for errors; their first words.

    Returns:
        Axes of the leaves of (inputs, output): the way that comes closest; None where none comes close.

    Raises:
        CalibrationError: not even the call itself gives again what it gave.
    """
    given = tree_leaves(output)
    eps = max(torch.finfo(one.dtype).eps for one in given)
    best, nearest = None, eps**_SAME
    for axes in islice(_ways((inputs, output), num_rows, len(given)), _MOST_WAYS):
        pieces = cut((inputs, output), num_rows, num_rows, axes)
        other = _unlike(pieces[-1], pieces[0], len(given), run)
        if other is None or not _alike(other, pieces[0]):
            continue
        distance = _distance(run, *_together([other, pieces[0], other]))
        if distance < nearest:
            best, nearest = axes, distance
        if distance < eps:
            break
    if best is None and _distance(run, inputs, output) >= eps**_SAME:
        raise CalibrationError(
            f"{where} gives other outputs when it is run again on the same inputs, so that nothing can be learned from them; switch off "
            "what draws random numbers in its forward, or carries something over to the next"
        )
    return best


def _ways(tree: Any, num_rows: int, num_outputs: int) -> Iterator[Axes]:
    """All combinations, the most usual first; leaves of one shape are cut alike."""
    leaves = tree_flatten(tree)[0]
    shapes = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]
    options = {shape: _options(shape, num_rows) for shape in dict.fromkeys(shapes)}
    for chosen in product(*options.values()):
        axes = tuple(dict(zip(options, chosen, strict=True))[shape] for shape in shapes)
        if None not in axes[-num_outputs:]:  # else an output would be no sequence's
            yield axes


def _options(shape: torch.Size | None, num_rows: int) -> list[int | None]:
    if not shape:
        return [None]
    exact: list[int | None] = [axis for axis, size in enumerate(shape[:2]) if size == num_rows]
    blocks: list[int | None] = [0] if shape[0] > num_rows and shape[0] % num_rows == 0 else []
    return [*exact, None, *blocks] if shape[0] == num_rows else [None, *exact, *blocks]


def _unlike(piece: Piece, first: Piece, num_outputs: int, run: Callable[[Any], Any]) -> Piece | None:
    """The piece, or where it is the first once more, that one backwards: beside an equal sequence attention gives what it gives alone."""
    places = [place for place, axis in enumerate(first.axes or ()) if axis is not None][:-num_outputs]
    if any(not _same(piece.leaves[place], first.leaves[place]) for place in places):
        return piece
    turned = ((place, first.leaves[place].flip(-1)) for place in places)
    place, leaf = next(((place, leaf) for place, leaf in turned if not torch.equal(leaf, first.leaves[place])), (None, None))
    if place is None:
        return None
    leaves = [*first.leaves[:place], leaf, *first.leaves[place + 1 :]]
    inputs, _ = tree_unflatten(leaves, first.spec)
    try:
        given = [one.to(leaves[-1].device) for one in tree_leaves(run(inputs))]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError):  # what is cut so does not run by itself
        return None
    return replace(first, leaves=[*leaves[:-num_outputs], *given])


def _distance(run: Callable[[Any], Any], inputs: Any, expected: Any) -> float:
    try:
        found = run(inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError):  # shapes that do not fit
        return float("inf")
    return max(_gap(one.to(known.device), known) for one, known in zip(tree_leaves(found), tree_leaves(expected), strict=True))


def _gap(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    gap = (found.double() - expected.double()).nan_to_num()  # of tokens that see nothing
    return float(gap.norm() / expected.double().nan_to_num().norm().clamp(min=1e-30))


def _alike(one: Piece, other: Piece) -> bool:
    if one.axes is None or one.axes != other.axes or one.spec != other.spec:
        return False
    return all(
        _same(a, b) if axis is None else a.shape == b.shape and a.dtype == b.dtype
        for a, b, axis in zip(one.leaves, other.leaves, one.axes, strict=True)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and torch.equal(a, b))
    return a is b or (type(a) is type(b) and type(a) in _PLAIN and bool(a == b))


def _together(pieces: Sequence[Piece]) -> Any:
    """One tree for all: of each leaf what they share, or their rows."""
    first = pieces[0]
    if len(pieces) == 1 or first.axes is None:
        return tree_unflatten(first.leaves, first.spec)
    columns = zip(*(piece.leaves for piece in pieces), strict=True)
    leaves = [column[0] if axis is None else torch.cat(column, dim=axis) for column, axis in zip(columns, first.axes, strict=True)]
    return tree_unflatten(leaves, first.spec)


@dataclass(frozen=True)
class Split:
    """Numbers of the sequences that are trained on, and of those that only judge."""

    trained: list[int]
    held_out: list[int]

    @classmethod
    def of(cls, num_sequences: int, held_out_frac: float, seed: int) -> Split:
        """Draw; at least one sequence of each, where there are two."""
        order = torch.randperm(num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()
        count = min(max(1, round(held_out_frac * num_sequences)), num_sequences - 1)
        return cls(sorted(order[count:]), sorted(order[:count]))
