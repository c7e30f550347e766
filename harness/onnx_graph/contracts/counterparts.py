"""Which block of an optimized graph is which of the exported one: by its weights, and of several equal ones by the data flow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from operator import itemgetter

from harness.onnx_graph.census.baseline import Baseline
from harness.onnx_graph.census.census import Block, Census
from harness.onnx_graph.census.projections import fingerprint


def counterparts(before: Baseline, after: Census) -> dict[int, Block]:
    """Find each block again.

    Several may have the same weights, and some have none that can be read (absorbed, inside of a Loop). So the blocks are matched all
    together: first aligned in the order of the data flow by what they and the blocks around them hold, packed or not, then two exchange
    their counterparts as long as more weights are kept, or as many and fewer pairs lie otherwise in the data flow than before.

    Args:
        before: as exported.
        after: as optimized.

    Returns:
        Index of a block before to the block after; each block at most once.
    """
    match = _Match(before, after)
    while any([match.improve(was, now) for was in before.census.read if match.is_amiss(was) for now in after.read]):
        pass
    return match.found


class _Match:
    """Blocks before to blocks after."""

    def __init__(self, before: Baseline, after: Census) -> None:
        self._before = {block.index: block for block in before.census.read}
        known = {one.projection.fingerprint: one.projection.shape[1] for one in before.weights.values()}
        had = {was: {one.projection.fingerprint for one in before.of_block(was)} for was in self._before}
        held = {now.index: _marks(now, known) & known.keys() for now in after.read}
        around = [_around(before.census.read, had), _around(after.read, held)]
        kept = {(was, now): len(had[was] & held[now]) for was in had for now in held}
        self._fits = {pair: (num, (around[0][pair[0]] & around[1][pair[1]]).total() if num else 0) for pair, num in kept.items()}
        self.found = self._in_order(sorted(before.census.read, key=_depth), sorted(after.read, key=_depth))
        left = [now for now in after.read if now not in self.found.values()]
        self.found |= zip((was for was in self._before if was not in self.found), left, strict=False)

    def _in_order(self, before: Sequence[Block], after: Sequence[Block]) -> dict[int, Block]:
        """Align two sequences, so that most weights are kept, then most of them around each block, and then most blocks are found."""
        start: tuple[tuple[int, int, int], dict[int, Block]] = ((0, 0, 0), {})
        row = [start] * (len(after) + 1)
        for was in before:
            above, row = row, [start]
            for at, now in enumerate(after):
                (kept, near, count), found = above[at]
                more, nearer = self._fits[was.index, now.index]
                taken = (kept + more, near + nearer, count + 1), found | {was.index: now}
                row.append(max(row[-1], above[at + 1], taken, key=itemgetter(0)))
        return row[-1][1]

    def is_amiss(self, was: Block) -> bool:
        """Whether a block has fewer of its weights than another one has, or lies elsewhere than before."""
        kept, moved = self._cost(self.found, {was.index})
        return bool(moved) or -kept < max((most for (index, _), (most, _) in self._fits.items() if index == was.index), default=0)

    def improve(self, was: Block, now: Block) -> bool:
        """Give a block this counterpart, and what it had to the block that has this one, if that is better."""
        holder = next((index for index, one in self.found.items() if one is now), was.index)
        changed = {index: one for index, one in self.found.items() if index not in (was.index, holder)} | {was.index: now}
        if holder != was.index and was.index in self.found:
            changed[holder] = self.found[was.index]
        touched = {was.index, holder}
        is_better = self._cost(changed, touched) < self._cost(self.found, touched)
        self.found = changed if is_better else self.found
        return is_better

    def _cost(self, found: Mapping[int, Block], touched: Set[int]) -> tuple[int, int]:
        """What these blocks add to the weights kept, as a negative number, and to the pairs in another order than before."""
        matched = [(self._before[index], found[index]) for index in touched if index in found]
        pairs = [(was, now, other) for was, now in matched for other in found if other not in touched or other > was.index]
        moved = [not same_order(was, now, other, found[other]) for was, now, other in pairs]
        return -sum(self._fits[was.index, now.index][0] for was, now in matched), sum(moved)


def _marks(block: Block, known: Mapping[str, int]) -> set[str]:
    """Fingerprints of the layers of a block, and where one is not known, of those parts of it that may be packed projections."""
    layers = {one.fingerprint: one.matrix_IO for several in block.projections.values() for one in several}
    return {*layers} | {
        fingerprint(matrix_IO[:, start : start + width])
        for mark, matrix_IO in layers.items()
        if mark not in known
        for width in set(known.values())
        for start in range(0, matrix_IO.shape[1] - width + 1, math.gcd(width, matrix_IO.shape[1]))
    }


def _around(blocks: Sequence[Block], marks: Mapping[int, Set[str]]) -> dict[int, Counter[tuple[str, str]]]:
    """How often each weight lies in the blocks above and below each block."""
    return {
        block.index: Counter(
            (side, mark)
            for side, others in (("above", block.place.above), ("below", block.place.below))
            for other in others
            for mark in marks.get(other, ())
        )
        for block in blocks
    }


def _depth(block: Block) -> tuple[list[int], int, int, int]:
    """A key that orders blocks as the data flow, what leads to the same outputs together."""
    place = block.place
    return sorted(place.outputs), len(place.above), -len(place.below), block.index


def same_order(was: Block, now: Block, other: int, other_now: Block) -> bool:
    """Whether a block feeds another, or is fed by it, exactly if it was so before.

    Args:
        was: a block as exported.
        now: the same as optimized.
        other: index of another block as exported.
        other_now: that one as optimized.

    Returns:
        False where the two were exchanged; True where nobody knows, inside of one subgraph.
    """
    if other in was.place.beside or other_now.index in now.place.beside:
        return True
    above, below = other in was.place.above, other in was.place.below
    return (above, below) == (other_now.index in now.place.above, other_now.index in now.place.below)
