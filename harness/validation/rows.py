"""What damage shows in a quantized weight where nobody noted what was written: rows that are dead, random or another's, and spoilt words.

Two statistics, each of which a sound quantizer keeps within bounds whatever the weight looks like (see `Policy`):

* the gain of a row, <w, q> / <w, w>. Rounding errors are nearly orthogonal to the weight, so it lies close to 1; of a row of zeros it is 0,
  of a random row, or of the row of another neuron, about 0.
* the noise of eight neighbouring weights, which share one or two stored words. An error counts in units of its rounding step and of its
  row's noise, relative to the errors of its column: a second-order solver makes large errors in columns that hardly matter, but in all
  rows alike. Values cut off at the end of the range do not count. A sound weight has 1 on average.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from harness.validation.columns import MIN_DEVIATION, ColumnNoise
from harness.validation.decoder import DecodedModule
from harness.validation.scheme import WeightScheme

RUN = 8
"""Neighbouring columns whose noise is judged together."""

_ELEMENTS_AT_ONCE = 1 << 22
_FAINT = 0.5  # rows below this share of a step that they do not have to themselves round to nothing, rightly


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

    def dead_or_foreign(self, max_error: float) -> list[str]:
        """Name the rows whose gain is too far from 1.

        Args:
            max_error: the limit.
        Returns:
            A line for each.
        """
        off = ~(np.abs(self.gains - 1) <= max(max_error, self.least_error)) & ~np.isnan(self.gains)
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
    signals, products, energies, faint, same, total = [], [], [], [], [], np.zeros(base.shape[1])
    groups = np.zeros(base.shape[1], int) if decoded.groups is None else decoded.groups
    columns = ColumnNoise(groups, scheme.type == "int")
    for rows in _blocks(base.shape):
        w, q, step = _block(base, decoded, rows)
        signals.append((w * w).sum(1))
        products.append((w * q).sum(1))
        energies.append((q * q).sum(1))
        same.append((decoded.codes[rows] == decoded.codes[rows][:, :1]).all(1))
        faint.append(np.abs(w).max(1) <= _FAINT * step.max(1) if scheme.strategy in ("tensor", "block") else np.zeros(len(w), bool))
        is_cut = _is_cut(w, q, *_ends(decoded, scheme, rows))
        columns.add(w, q, step, is_cut)
        total += _relative(w, q, step, is_cut).sum(0)
    signal, product, energy, is_faint, is_same = (np.concatenate(parts) for parts in (signals, products, energies, faint, same))
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
    gains[is_faint] = np.nan
    least_error = MIN_DEVIATION * float(np.sqrt(max(0.0, ratio) / base.shape[1]))
    flat = is_same & (energy > 2 * product) & ~is_faint
    zeros = _noise_of_zeros(base, decoded, scheme, column)
    return RowNoise(gains, signal, energy, least_error, flat, base.shape[1], noise, runs, zeros, columns)


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
