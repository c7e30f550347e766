"""What damage shows in a quantized weight where nobody noted what was written: rows that are dead, random or another's, and spoilt words.

Three statistics, each of which a sound quantizer keeps within bounds whatever the weight looks like (see `Policy`):

* the gain of a row, <w, q> / <w, w>. Rounding errors are nearly orthogonal to the weight, so it lies close to 1; of a row of zeros it is 0,
  of a random row, or of the row of another neuron, about 0.
* the squared error of a row in rounding steps, beside that of the other rows. A random row may have a gain far from 0 by chance, and one
  that is like another a gain of its own; both are many times as far from the base's as the other rows are.
* the noise of eight neighbouring weights, which share one or two stored words. An error counts in units of its rounding step and of its
  row's noise, relative to the errors of its column: a second-order solver makes large errors in columns that hardly matter, but in all
  rows alike. Values cut off at the end of the range do not count. A sound weight has 1 on average.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from harness.validation.format.decoder import DecodedModule
from harness.validation.format.scheme import WeightScheme

# What damage shows across the rows of a quantized weight: columns that are dead, random or another's, and codes that are shifted.
#
# * The gain of a column, <w, q> / <w, w>, as that of a row (see `rows`). Its chance follows from the column's own noise, because a
#   second-order solver makes large errors in columns that hardly matter; a column that lies within rounding (half a step) says nothing.
# * The mean error of what shares a scale, in steps. Rounding keeps it below a half, wherever the values lie; of codes that are packed with
#   another offset, or that have another zero point, it is a whole step. Values cut off at the end of the range do not count.
#
# * The mean error of the whole weight, in steps. Each rounding error is as likely up as down, so it lies close to 0; of codes that were
#   rounded down it is half a step. What lies on the grid by itself, as zeros do, is not asked; and where all errors stay within half a
#   step, as those of equal values do, it is rounding after all.
#
# A column of zeros alone may be rightly so in checkpoints of other tools: some zero what no calibration token reached.
#
# Shapes: R rows, C columns, G groups.

MIN_DEVIATION = 6.0
"""Standard deviations that a gain must be off, so that short rows and columns do not count."""

_ROUNDED = 0.5  # mean squared error in steps that rounding cannot make: it stays below a quarter
_SHIFT = 0.75  # mean error in steps
_BIAS = 0.25  # mean error in steps of a whole weight
_BIASED = 0.28  # mean squared error in steps beside it: rounding stays below a quarter, and codes that were rounded down have a third
_MIN_VALUES = 12  # that a mean is taken over
_SHOWN = 8
_STRANGE = "random, or another column's"


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
        nearest: of columns that have lost half of their squares, the base's column that is most like them, [C]; empty before it is known.
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
    nearest: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    row_errors: list[np.ndarray] = field(default_factory=list)
    """Of each row so far the count, the sum and the sum of squares of its errors in steps, blocks of [R, 3]."""

    def add(self, w: np.ndarray, q: np.ndarray, step: np.ndarray, is_cut: np.ndarray) -> np.ndarray:
        """Take in some rows.

        Args:
            w: the base's, float64 [R, C].
            q: the decoded ones.
            step: rounding steps.
            is_cut: values that were cut off at the end of the range.

        Returns:
            Their errors in steps, [R, C]; 0 for values that were cut off.
        """
        self.num_rows += len(w)
        self.signal = self.signal + (w * w).sum(0)
        self.product = self.product + (w * q).sum(0)
        self.energy = self.energy + (q * q).sum(0)
        error = np.divide(q - w, step, out=np.zeros_like(w), where=(step > 0) & ~is_cut)
        self.squares = self.squares + np.square(error).sum(0)
        if self.is_integer:
            asked = (~is_cut & (w != 0)).astype(np.float64)
            self.row_errors.append(np.stack([asked.sum(1), (error * asked).sum(1), (np.square(error) * asked).sum(1)], axis=1))
            member = np.eye(self.groups.max() + 1)[self.groups]
            count = (~is_cut).astype(np.float64) @ member
            with np.errstate(all="ignore"):
                mean = (error @ member) / count
                chance = MIN_DEVIATION * np.sqrt((np.square(error) @ member / count - np.square(mean)).clip(min=0) / count)
                self.shifts.append(np.where((count >= _MIN_VALUES) & (np.abs(mean) > chance), mean, 0.0))
        return error

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
        others = self.nearest if len(self.nearest) else np.arange(len(self.energy))
        is_others = (others != np.arange(len(others))) & (self.squares > _ROUNDED * self.num_rows)
        found = np.flatnonzero((self._off(max_error) | is_others) & (self.energy > 0))
        words = {place: f"another column's, it is most like column {others[place]}" for place in np.flatnonzero(is_others)}
        gains = self.product / np.maximum(self.signal, 1e-300)
        return [f"column {place}: gain {gains[place]:.2f}: {words.get(place, _STRANGE)}" for place in found]

    def zeroed(self, max_error: float) -> list[int]:
        """Return the columns that are zero, and not by rounding.

        Args:
            max_error: greatest distance of a gain from 1.
        Returns:
            Their numbers.
        """
        return [int(place) for place in np.flatnonzero(self._off(max_error) & (self.energy == 0))]

    def shifted(self, *, singly: bool) -> list[str]:
        """Name the groups whose codes are off by a step.

        Args:
            singly: ask each group, not only the whole weight. Where inputs sum to zero, as those of a LayerNorm do, GPTQ is free to move
                the codes of a group.

        Returns:
            A line for each, or one for the whole weight.
        """
        if not self.shifts:
            return []
        means = np.concatenate(self.shifts)
        off = np.abs(means) > _SHIFT
        if off.mean() > 0.5:
            return [f"the codes of {off.sum():,} of {off.size:,} groups are off by {np.median(means[off]):+.1f} steps on average"]
        if not singly:
            return []
        return [
            f"row {row}, group {group}: its codes are off by {means[row, group]:+.1f} steps on average" for row, group in np.argwhere(off)
        ]

    def biased(self) -> list[str]:
        """Say whether the codes of the whole weight were rounded to one side.

        Returns:
            A line, or none.
        """
        rows = np.concatenate(self.row_errors or [np.zeros((0, 3))])
        rows = rows[rows[:, 0] > 0]
        if not len(rows):
            return []
        count, total, squares = rows.sum(0)
        mean, square = total / count, squares / count
        # Errors of one row may hang together, as a second-order solver passes them on; those of two rows do not.
        chance = MIN_DEVIATION * max(np.sqrt(max(0.0, square - mean * mean) / count), np.std(rows[:, 1] / rows[:, 0]) / np.sqrt(len(rows)))
        if abs(mean) <= max(_BIAS, chance) or square <= _BIASED:
            return []
        return [f"its codes are off by {mean:+.2f} steps on average: they were rounded {'down' if mean < 0 else 'up'}, not to the nearest"]


def some_columns(places: list[int]) -> str:
    """Write down the first few numbers of columns.

    Args:
        places: numbers.
    Returns:
        The text.
    """
    return ", ".join(map(str, places[:_SHOWN])) + (", ..." if len(places) > _SHOWN else "")


RUN = 8
"""Neighbouring columns whose noise is judged together."""

_ELEMENTS_AT_ONCE = 1 << 22
_LOST, _MOST_ROWS = 0.5, 1024  # share of its squares from which on a row is held against all rows of the base, and how many at most
_LIKE, _MORE_LIKE = 0.75, 0.15  # cosines: so like another one it is, and by so much more; what a solver does to a row leads it nowhere
_HALF = 0.501  # a step that is rounded to the nearest, in whatever dtype that was computed


@dataclass(frozen=True)
class RowNoise:
    """The rows of one quantized weight against the base's.

    Attributes:
        gains: of each row, float64 [R]; 1 where the base's row is zero and so is this one, NaN where nothing can be asked of the row.
        signals: |w|^2 of the base's rows, [R].
        energies: |q|^2 of these rows, [R].
        least_error: a gain within this distance from 1 is chance.
        flat: rows of one code throughout that are farther from the base's than zeros would be, bool [R]: a zeroed row where codes are
            stored with an offset, whose gain is chance.
        squares: mean squared error in steps of each row, [R]; values that were cut off count as rounded.
        nearest: of rows that have lost half of their squares, the base's row that is most like them, [R]; their own number for all others.
        num_columns: C.
        noise: of the noisiest run of eight columns of each row, [R].
        runs: which run that is, [R].
        noise_of_zeros: the noise that a run of zeroed stored bits would have in the middle of the weight.
        columns: the same weight across its rows.
    """

    gains: np.ndarray
    signals: np.ndarray
    energies: np.ndarray
    least_error: float
    flat: np.ndarray
    squares: np.ndarray
    nearest: np.ndarray
    num_columns: int
    noise: np.ndarray
    runs: np.ndarray
    noise_of_zeros: float
    columns: ColumnNoise

    @property
    def worst_gain_error(self) -> float:
        """The greatest |gain - 1| of all rows that can be asked."""
        return float(np.nanmax(np.abs(self.gains - 1), initial=0.0))

    @property
    def is_blind(self) -> bool:
        """Whether chance alone may make a sound row look dead, so that a dead one cannot be told."""
        return self.least_error >= 1

    def dead_or_foreign(self, max_error: float, max_squares: float) -> list[str]:
        """Name the rows whose gain is too far from 1, be it half as far where their error is too far from that of the others.

        Args:
            max_error: the limit of the gain.
            max_squares: the limit of the error, in medians of all rows.
        Returns:
            A line for each.
        """
        off = ~(np.abs(self.gains - 1) <= max(max_error, self.least_error)) & ~np.isnan(self.gains)
        # Where few tokens were seen, as by an expert, a solver is free to go as far with a row, and keeps its gain near 1.
        off |= (self.squares > max(_ROUNDED, max_squares * float(np.median(self.squares)))) & (np.abs(self.gains - 1) > max_error / 2)
        off |= self.nearest != np.arange(len(self.nearest))
        return [f"row {row}: {self._said_of(row)}" for row in np.flatnonzero(off | self.flat).tolist()]

    def spoilt_runs(self, max_noise: float) -> list[str]:
        """Name the noisiest run of each row that holds one above a limit.

        Args:
            max_noise: the limit.
        Returns:
            A line for each.
        """
        return [
            f"row {row}, columns {start} to {start + RUN - 1}: {self.noise[row]:.0f} times the noise of their columns"
            for row, start in zip(np.flatnonzero(self.noise > max_noise), RUN * self.runs[self.noise > max_noise], strict=True)
        ]

    def _said_of(self, row: int) -> str:
        if self.signals[row] == 0:
            return "the base's is zero, this one is not"
        if self.nearest[row] != row and self.energies[row]:
            return f"gain {self.gains[row]:.2f}: another row's, it is most like row {self.nearest[row]}"
        if self.flat[row] and self.energies[row]:
            return "dead: one code throughout"
        return "dead: all zero" if self.energies[row] == 0 else f"gain {self.gains[row]:.2f}: random, or another row's"


def row_noise(base: torch.Tensor, decoded: DecodedModule, scheme: WeightScheme) -> RowNoise:
    """Measure the rows of a decoded weight.

    Args:
        base: the base's weight [R, C].
        decoded: the same weight as decoded.
        scheme: its format.
    Returns:
        The statistics; computed by blocks of rows.
    """
    signals, products, energies, squares, rounded, same, total = [], [], [], [], [], [], np.zeros(base.shape[1])
    groups = np.zeros(base.shape[1], int) if decoded.groups is None else decoded.groups
    columns = ColumnNoise(groups, scheme.type == "int")
    for rows in _blocks(base.shape):
        w, q, step = _block(base, decoded, rows)
        signals.append((w * w).sum(1))
        products.append((w * q).sum(1))
        energies.append((q * q).sum(1))
        same.append((decoded.codes[rows] == decoded.codes[rows][:, :1]).all(1))
        rounded.append((np.abs(q - w) <= _HALF * step).all(1))
        is_cut = _is_cut(w, q, *_ends(decoded, scheme, rows))
        error = columns.add(w, q, step, is_cut)
        squares.append(np.square(error).mean(1))
        total += _relative(w, q, step, is_cut).sum(0)
    signal, product, energy, square, is_rounded, is_same = map(np.concatenate, (signals, products, energies, squares, rounded, same))
    column = total / len(base)
    column = np.maximum(column, max(column.mean(), 1e-12))
    worst = []
    for rows in _blocks(base.shape):
        w, q, step = _block(base, decoded, rows)
        worst.append(_worst_runs(_relative(w, q, step, _is_cut(w, q, *_ends(decoded, scheme, rows))) / column))
    noise, runs = (np.concatenate(parts) for parts in zip(*worst, strict=True))
    with np.errstate(all="ignore"):
        gains = np.where(signal > 0, product / signal, np.where(energy > 0, np.inf, 1.0))
        ratio = np.median(((signal - 2 * product + energy) / signal)[signal > 0]) if signal.any() else 0.0
    gains[is_rounded] = np.nan  # where a scale is shared by rows, small ones round to next to nothing, rightly
    least_error = MIN_DEVIATION * float(np.sqrt(max(0.0, ratio) / base.shape[1]))
    flat = is_same & (energy > 2 * product) & ~is_rounded
    zeros = _noise_of_zeros(base, decoded, scheme, column)
    nearest = _nearest(base, decoded.weight, _share(signal, product, energy))
    columns.nearest = _nearest(base.T, decoded.weight.T, _share(columns.signal, columns.product, columns.energy))
    return RowNoise(gains, signal, energy, least_error, flat, square, nearest, base.shape[1], noise, runs, zeros, columns)


def _nearest(base_RC: torch.Tensor, weight_RC: torch.Tensor, share_R: np.ndarray) -> np.ndarray:
    """The base's row that each is most like by its cosine, of the worst rows that have lost half of their squares; else its own."""
    nearest = np.arange(len(share_R))
    worst = np.argsort(-share_R, kind="stable")[:_MOST_ROWS]
    worst = worst[share_R[worst] > _LOST]
    norms = base_RC.float().norm(dim=1).clamp(min=1e-30)
    for rows in np.array_split(worst, -(-len(worst) * len(base_RC) // _ELEMENTS_AT_ONCE)) if len(worst) else ():
        own_FC = torch.nn.functional.normalize(weight_RC[rows].float(), dim=1)
        products = [own_FC @ base_RC[part].float().T for part in _blocks(base_RC.shape)]
        cosines_FR = torch.cat(products, dim=1).div(norms).nan_to_num(nan=-1.0)
        best, places = cosines_FR.max(dim=1)
        is_other = (best > _LIKE) & (best > cosines_FR.gather(1, torch.from_numpy(rows)[:, None])[:, 0] + _MORE_LIKE)
        for row, place in zip(rows[is_other.numpy()].tolist(), places[is_other].tolist(), strict=True):
            nearest[row] = place if _is_lost(base_RC[[row, place]], weight_RC[row]) else row
    return nearest


def _is_lost(own_and_other_2C: torch.Tensor, row_C: torch.Tensor) -> bool:
    """Whether a row has next to nothing of its own beside what it has of another: a solver that saw few tokens may add of that one."""
    pair_2C = own_and_other_2C.double()
    share = torch.linalg.lstsq(pair_2C.T, row_C.double()[:, None]).solution[0, 0]
    return bool(share < _LOST)


def _share(signal: np.ndarray, product: np.ndarray, energy: np.ndarray) -> np.ndarray:
    """Squared errors of rows or columns as a share of their squares; 0 where these are."""
    return np.divide(signal - 2 * product + energy, signal, out=np.zeros_like(signal), where=signal > 0)


def _blocks(shape: torch.Size) -> Iterator[slice]:
    height = max(1, _ELEMENTS_AT_ONCE // shape[1])
    return (slice(start, start + height) for start in range(0, shape[0], height))


def _block(base: torch.Tensor, decoded: DecodedModule, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Base, decoded weight and rounding step of some rows; what is not finite is for other checks, and zero here."""
    w, q = (np.nan_to_num(part[rows].to(torch.float64).numpy(), posinf=0.0, neginf=0.0) for part in (base, decoded.weight))
    return w, q, np.nan_to_num(decoded.steps(rows), posinf=0.0, neginf=0.0)


def _ends(decoded: DecodedModule, scheme: WeightScheme, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Say which codes are the least and the greatest of the format."""
    codes = decoded.codes[rows]
    if scheme.type == "int":
        low, high = scheme.code_range
        return codes == low, codes == high
    return codes == (scheme.largest_float | 128), codes == scheme.largest_float


def _is_cut(w: np.ndarray, q: np.ndarray, is_least: np.ndarray, is_greatest: np.ndarray) -> np.ndarray:
    """Say which values were cut off at the end of the range."""
    return np.asarray((is_least & (w < q)) | (is_greatest & (w > q)))


def _relative(w: np.ndarray, q: np.ndarray, step: np.ndarray, is_cut: np.ndarray) -> np.ndarray:
    """Squared errors in units of the step and of the row's noise; 0 for values that were cut off."""
    error = np.where(is_cut, 0.0, np.square(w - q))
    return error / (np.square(step) + error.mean(1, keepdims=True) + 1e-300)


def _worst_runs(relative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the noise of the noisiest run of each row, and which it is; the last run may be shorter."""
    starts = np.arange(0, relative.shape[1], RUN)
    noise = np.add.reduceat(relative, starts, axis=1) / np.minimum(RUN, relative.shape[1] - starts)
    runs = noise.argmax(1)
    return noise[np.arange(len(noise)), runs], runs


def _noise_of_zeros(base: torch.Tensor, decoded: DecodedModule, scheme: WeightScheme, column: np.ndarray) -> float:
    """Plant zeroed bits in the middle of the weight: all codes become the least one where codes are packed with an offset, else zero."""
    row, start = len(base) // 2, base.shape[1] // 2 // RUN * RUN
    rows, columns = slice(row, row + 1), slice(start, start + RUN)
    w, q, step = _block(base, decoded, rows)
    least, greatest = (end.copy() for end in _ends(decoded, scheme, rows))
    q = q.copy()
    if scheme.is_packed:
        q[:, columns] -= (decoded.codes[rows, columns] - scheme.code_range[0]) * step[:, columns]
    else:
        q[:, columns] = 0
    least[:, columns], greatest[:, columns] = scheme.is_packed, False
    return float((_relative(w, q, step, _is_cut(w, q, least, greatest)) / column)[0, columns].mean())
