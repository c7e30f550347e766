"""What damage shows across the rows of a quantized weight: columns that are dead, random or another's, and codes that are shifted.

* The gain of a column, <w, q> / <w, w>, as that of a row (see `rows`). Its chance follows from the column's own noise, because a
  second-order solver makes large errors in columns that hardly matter; a column that lies within rounding (half a step) says nothing.
* The mean error of what shares a scale, in steps. Rounding keeps it below a half, wherever the values lie; of codes that are packed with
  another offset, or that have another zero point, it is a whole step. Values cut off at the end of the range do not count.

A column of zeros alone may be rightly so in checkpoints of other tools: some zero what no calibration token reached.

Shapes: R rows, C columns, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

MIN_DEVIATION = 6.0
"""Standard deviations that a gain must be off, so that short rows and columns do not count."""

_ROUNDED = 0.5  # mean squared error in steps that rounding cannot make: it stays below a quarter
_SHIFT = 0.75  # mean error in steps
_MIN_VALUES = 12  # that a mean is taken over
_SHOWN = 8


@dataclass
class ColumnNoise:
    """The columns of one quantized weight against the base's; filled by blocks of rows.

    Attributes:
        groups: group of each column, [C].
        is_integer: the codes are integers, so that an offset is a number of steps.
        num_rows: R, so far.
        signal: |w|^2 of the base's columns, [C].
        product: <w, q>, [C].
        energy: |q|^2, [C].
        squares: squared error in steps, summed, [C].
        shifts: mean error in steps of each group of each row so far, blocks of [R, G]; 0 where chance may have made it.
    """

    groups: np.ndarray
    is_integer: bool
    num_rows: int = 0
    signal: np.ndarray = field(default_factory=lambda: np.zeros(1))
    product: np.ndarray = field(default_factory=lambda: np.zeros(1))
    energy: np.ndarray = field(default_factory=lambda: np.zeros(1))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(1))
    shifts: list[np.ndarray] = field(default_factory=list)

    def add(self, w: np.ndarray, q: np.ndarray, step: np.ndarray, is_cut: np.ndarray) -> None:
        """Take in some rows.

        Args:
            w: the base's, float64 [R, C].
            q: the decoded ones.
            step: rounding steps.
            is_cut: values that were cut off at the end of the range.
        """
        self.num_rows += len(w)
        self.signal = self.signal + (w * w).sum(0)
        self.product = self.product + (w * q).sum(0)
        self.energy = self.energy + (q * q).sum(0)
        error = np.divide(q - w, step, out=np.zeros_like(w), where=(step > 0) & ~is_cut)
        self.squares = self.squares + np.square(error).sum(0)
        if self.is_integer:
            member = np.eye(self.groups.max() + 1)[self.groups]
            count = (~is_cut).astype(np.float64) @ member
            with np.errstate(all="ignore"):
                mean = (error @ member) / count
                chance = MIN_DEVIATION * np.sqrt((np.square(error) @ member / count - np.square(mean)).clip(min=0) / count)
                self.shifts.append(np.where((count >= _MIN_VALUES) & (np.abs(mean) > chance), mean, 0.0))

    def _off(self, max_error: float) -> np.ndarray:
        """Columns whose gain is too far from 1 for chance and for rounding, bool [C]."""
        with np.errstate(all="ignore"):
            gains = self.product / self.signal
            noise = (self.signal - 2 * self.product + self.energy).clip(min=0) / self.signal
            chance = MIN_DEVIATION * np.sqrt(noise / self.num_rows)
            off: np.ndarray = (np.abs(gains - 1) > np.maximum(max_error, chance)) & (self.squares > _ROUNDED * self.num_rows)
        return off

    def foreign(self, max_error: float) -> list[str]:
        """Name the columns that are neither faithful nor zero.

        Args:
            max_error: greatest distance of a gain from 1.
        Returns:
            A line for each.
        """
        found = np.flatnonzero(self._off(max_error) & (self.energy > 0))
        return [f"column {place}: gain {self.product[place] / self.signal[place]:.2f}: random, or another column's" for place in found]

    def zeroed(self, max_error: float) -> list[int]:
        """Return the columns that are zero, and not by rounding.

        Args:
            max_error: greatest distance of a gain from 1.
        Returns:
            Their numbers.
        """
        return [int(place) for place in np.flatnonzero(self._off(max_error) & (self.energy == 0))]

    def shifted(self) -> list[str]:
        """Name the groups whose codes are off by a step.

        Returns:
            A line for each, or one for the whole weight.
        """
        if not self.shifts:
            return []
        means = np.concatenate(self.shifts)
        off = np.abs(means) > _SHIFT
        if off.mean() > 0.5:
            return [f"the codes of {off.sum():,} of {off.size:,} groups are off by {np.median(means[off]):+.1f} steps on average"]
        return [
            f"row {row}, group {group}: its codes are off by {means[row, group]:+.1f} steps on average" for row, group in np.argwhere(off)
        ]


def some_columns(places: list[int]) -> str:
    """Write down the first few numbers of columns.

    Args:
        places: numbers.
    Returns:
        The text.
    """
    return ", ".join(map(str, places[:_SHOWN])) + (", ..." if len(places) > _SHOWN else "")
