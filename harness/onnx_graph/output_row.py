"""Two arrays that one output gave before and after: how far apart they are, or why that says nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.onnx_graph.similarity import sqnr_db

_SLICE_MARGIN_DB = 60.0
_SLICE_FLOOR = 1e-10
"""Share of the mean power of an output: a slice weaker than this is held against it, for rounding leaves noise in what is nearly zero."""


@dataclass(frozen=True)
class OutputRow:
    """One output compared.

    Attributes:
        name: of the output, as the first graph has it.
        max_abs: largest absolute difference; infinite where the two cannot be subtracted.
        sqnr_db: signal to noise; infinite for equal outputs.
        weakest_db: the same of the slice, along any axis, that is worst: what is small beside something large is seen here.
        changed: what differs beside the numbers, in words; else empty.
        unknown: why the comparison is no evidence, in words; else empty.
    """

    name: str
    max_abs: float
    sqnr_db: float
    weakest_db: float = np.inf
    changed: str = ""
    unknown: str = ""

    def wrong(self, limit_db: float) -> bool:
        """Whether the output is another one.

        Args:
            limit_db: that the whole output must reach; a slice may lie 60 dB below it.

        Returns:
            True if it must not pass.
        """
        return bool(self.changed) or not self.sqnr_db >= limit_db or not self.weakest_db >= limit_db - _SLICE_MARGIN_DB

    def text(self, limit_db: float) -> str:
        """Return one line, for people.

        Args:
            limit_db: as for `wrong`.

        Returns:
            The output, what was found, and the limit.
        """
        if self.changed or self.unknown:
            return f"output {self.name}: {self.changed or self.unknown}"
        numbers = f"max abs {self.max_abs:.3g}, SQNR {self.sqnr_db:.1f} dB, limit {limit_db:.0f} dB"
        weak = self.weakest_db < limit_db - _SLICE_MARGIN_DB
        worst = f"; its weakest slice has {self.weakest_db:.1f} dB, limit {limit_db - _SLICE_MARGIN_DB:.0f} dB" if weak else ""
        return f"output {self.name}: {numbers}{worst}"


def output_row(name: str, expected: np.ndarray, actual: np.ndarray) -> OutputRow:
    """Compare.

    Args:
        name: of the output.
        expected: before.
        actual: after.

    Returns:
        What was found.
    """
    changed = _kind_changed(expected, actual)
    if changed:
        return OutputRow(name, np.inf, -np.inf, changed=changed)
    if not _is_number(expected):
        if np.array_equal(expected, actual):
            return OutputRow(name, 0.0, np.inf)
        return OutputRow(name, np.inf, -np.inf, changed=f"{int((expected != actual).sum())} of {expected.size} values changed")
    unknown = _no_evidence(name, expected)
    before, after = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(before) & np.isfinite(after)
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    if odd := int((~finite & ~same).sum()):
        return OutputRow(name, np.inf, -np.inf, changed=f"NaN or infinite in one of the graphs only, or of another sign, at {odd} places")
    before, after = np.where(finite, before, 0), np.where(finite, after, 0)
    max_abs = float(np.abs(before - after).max()) if before.size else 0.0
    return OutputRow(name, max_abs, sqnr_db(before, after), _weakest_db(before, after), unknown="" if max_abs else unknown)


def _kind_changed(expected: np.ndarray, actual: np.ndarray) -> str:
    if expected.shape != actual.shape:
        return f"shape {list(expected.shape)} became {list(actual.shape)}"
    return f"{expected.dtype} became {actual.dtype}" if expected.dtype != actual.dtype else ""


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuf" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def _no_evidence(name: str, expected: np.ndarray) -> str:
    """Say why equal outputs are no evidence. Truth values are often the same everywhere, and one number has nothing to differ from."""
    if expected.size == 0:
        return f"nothing was compared: output {name} is empty"
    values = expected.astype(np.float64)
    if np.isnan(values).all():
        return f"nothing was compared: output {name} is NaN everywhere"
    if expected.dtype.kind != "b" and (expected.size > 1 or not values.any()) and (values == values.flat[0]).all():
        return f"nothing was compared: output {name} is constant, {values.flat[0]:.6g} everywhere"
    return ""


def _weakest_db(expected: np.ndarray, actual: np.ndarray) -> float:
    """Signal to noise of the worst slice along any axis; each is held at least against a small share of the mean power."""
    worst = np.inf
    power, noise = np.square(expected), np.square(expected - actual)
    if not noise.any():
        return worst
    floor = _SLICE_FLOOR * float(power.mean())
    for axis in range(expected.ndim):
        others = tuple(one for one in range(expected.ndim) if one != axis)
        signals, noises = np.maximum(power.mean(axis=others), floor), noise.mean(axis=others)
        ratios = signals[noises > 0] / noises[noises > 0]
        worst = min(worst, float(10 * np.log10(max(ratios.min(), np.finfo(np.float64).tiny))))
    return worst
