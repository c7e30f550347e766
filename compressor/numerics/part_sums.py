"""Sums over calibration samples that have the same bits however many processes share the samples.

A float sum depends on its order. So the samples are cut into NUM_PARTS parts, whatever the number of processes; each part is summed from
zero, and the parts are added in one fixed order: two chains of four, ((0 + 1) + 2) + 3 and ((4 + 5) + 6) + 7, and then the two. In one
process three sums are alive at most (a chain that is done, one on its way, the part that runs), where a balanced tree would have four; a
process of two, four or eight has at most two. Parts without a value are left out of the order, and keep their neighbours apart: an expert
that no sample of some parts reached may have six.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from compressor.errors import NumericsError

NUM_PARTS = 8
MIN_TOKENS_SHARED = 512 * NUM_PARTS  # of all samples; fewer are one part, for which one sum does
_MOST_SUMS: Mapping[int, int] = MappingProxyType({1: 3, 2: 2, 4: 2, 8: 1})  # alive in each of so many processes
_LEAST = torch.finfo(torch.float32).tiny  # of squares: those below have fewer bits

Span = tuple[int, int]  # first part, and the one behind the last
# The order of additions, shortest spans first: a span of parts is the sum of what lies before a part and what lies from it on.
_MIDDLE: Mapping[Span, int] = MappingProxyType({(0, 2): 1, (0, 3): 2, (0, 4): 3, (4, 6): 5, (4, 7): 6, (4, 8): 7, (0, NUM_PARTS): 4})
_ALL = (0, NUM_PARTS)


def most_sums(num_tokens: int, processes: int = 1) -> int:
    """Say how many sums of one statistic are alive together in one process.

    Args:
        num_tokens: of all samples.
        processes: that share them: 1, 2, 4 or 8.

    Returns:
        The number.
    """
    return _MOST_SUMS[processes] if num_tokens >= MIN_TOKENS_SHARED else 1


class PartSum:
    """Sums of some arrays that grow together, part by part.

    Parts come in their order. What sees all samples several times (a module between layers that all of them share) adds up each time whole,
    which one process can do and several cannot.

    Attributes:
        nodes: sums by span; those that can be added are.
        came_again: an earlier part came again.
    """

    def __init__(self) -> None:
        """Start without a value."""
        self.nodes: dict[Span, list[Tensor]] = {}
        self.came_again = False
        self._part = -1
        self._before: list[Tensor] | None = None

    def of_part(self, part: int, zeros: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what the values of a part are added to, in place.

        Args:
            part: its number.
            zeros: makes the arrays.

        Returns:
            The arrays.
        """
        if part != self._part:
            if part < self._part:
                self.came_again, self._before = True, self.total()
                self.nodes = {}
            self._join()
            self._part = part
            self.nodes[part, part + 1] = zeros()
        return self.nodes[part, part + 1]

    def total(self) -> list[Tensor] | None:
        """Add all parts; None where nothing came."""
        if not self.nodes:
            return None
        count = len(next(iter(self.nodes.values())))
        found = [add_parts({span: arrays[place] for span, arrays in self.nodes.items()}) for place in range(count)]
        if self._before is not None:
            found = [one.add_(other) for one, other in zip(self._before, found, strict=True)]
        self.nodes, self._part, self._before = {_ALL: found}, NUM_PARTS, None
        return found

    def replace(self, arrays: list[Tensor]) -> None:
        """Hold what the parts of all processes add up to.

        Args:
            arrays: their sum; none where another process has it.
        """
        self.nodes, self._part = {_ALL: arrays} if arrays else {}, NUM_PARTS

    def _join(self) -> None:
        for (start, stop), middle in _MIDDLE.items():
            if (start, middle) in self.nodes and (middle, stop) in self.nodes:
                left, right = self.nodes.pop((start, middle)), self.nodes.pop((middle, stop))
                self.nodes[start, stop] = [one.add_(other) for one, other in zip(left, right, strict=True)]


def add_parts(nodes: Mapping[Span, Tensor], span: Span = _ALL) -> Tensor:
    """Add parts in their order.

    Args:
        nodes: sums of parts by span, one at least; changed.
        span: within which they lie.

    Returns:
        The sum, in the memory of one of them.
    """
    found = _added(nodes, span)
    assert found is not None, "nothing to add"
    return found


def _added(nodes: Mapping[Span, Tensor], span: Span) -> Tensor | None:
    if span in nodes or span not in _MIDDLE:
        return nodes.get(span)
    left, right = _added(nodes, (span[0], _MIDDLE[span])), _added(nodes, (_MIDDLE[span], span[1]))
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def check_mean_squares(mean_C: Tensor, name: str) -> None:
    """Refuse inputs whose squares float32 does not hold, or holds with few bits; where all are zero, nothing is said.

    Args:
        mean_C: [C] float32, mean of x^2 over tokens, or a multiple of it.
        name: of the module, for errors.

    Raises:
        NumericsError: NaN or infinity among them, or the largest lies next to the end of float32.
    """
    largest = mean_C.detach().max()  # NaN, too, where there is any
    if not bool(largest.isfinite()):
        raise NumericsError(
            f"{name}: its calibration inputs hold NaN or infinity, or are too large to be squared in float32; check the model in its own "
            "dtype on this data"
        )
    if 0 < float(largest) < _LEAST:
        raise NumericsError(
            f"{name}: its calibration inputs are too small to be squared in float32 (largest mean {float(largest):.1e}); scale the layer "
            "before it up and its weight down, or ignore it"
        )
