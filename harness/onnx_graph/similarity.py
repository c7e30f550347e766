"""How close two arrays are, in the one measure that limits are stated in."""

from __future__ import annotations

import numpy as np


def sqnr_db(expected: np.ndarray, actual: np.ndarray) -> float:
    """Signal to noise ratio.

    Args:
        expected: the signal.
        actual: the same shape, else the result is minus infinity.

    Returns:
        10 log10(sum expected^2 / sum (expected - actual)^2) in dB; infinite for equal arrays.
    """
    if expected.shape != actual.shape:
        return -np.inf
    signal = float(np.square(expected, dtype=np.float64).sum())
    noise = float(np.square(expected.astype(np.float64) - actual).sum())
    if not np.isfinite(noise):
        return -np.inf
    return np.inf if noise == 0 else float(10 * np.log10(max(signal, np.finfo(np.float64).tiny) / noise))
