"""What judges packers: where each code lies in the words, bit by bit, without a line of what is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

# fp4 e2m1 by its three lower bits.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _bits_of(words: np.ndarray) -> np.ndarray:
    """The bits of each row, least significant bit of the first word first, [rows, bits]."""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(words.shape[0], -1)
    return np.unpackbits(data, axis=1, bitorder="little")


def _numbers(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` fields of so many bits of each row, as unsigned numbers."""
    stream = _bits_of(words)[:, : bits * count].reshape(words.shape[0], count, bits)
    return (stream.astype(np.int64) << np.arange(bits)).sum(axis=2)


def _offset_stream(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes plus 2^(bits-1), one after another in a little-endian stream of bits: pack-quantized of compressed-tensors."""
    return _numbers(words.astype("<i4"), bits, count) - (1 << (bits - 1))


def _e2m1_nibbles(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Sign, exponent and significand of fp4 in a nibble, the first code of a pair in the lower one: fp4 of compressed-tensors."""
    nibbles = _numbers(words.astype(np.uint8), bits, count)
    return np.where(nibbles & 8, -1.0, 1.0) * np.array(_E2M1)[nibbles & 7]


def bits_behind(words: np.ndarray, bits: int, count: int) -> int:
    """Count the bits that are set behind the last code of each row.

    Args:
        words: [rows, words].
        bits: of a code.
        count: codes of a row.

    Returns:
        How many there are in all rows.
    """
    return int(_bits_of(words)[:, bits * count :].sum())


Decoder = Callable[[np.ndarray, int, int], np.ndarray]

# [rows, words], bits of a code and codes of a row -> codes [rows, count].
LAYOUTS: Mapping[str, Decoder] = MappingProxyType({"offset_stream": _offset_stream, "e2m1_nibbles": _e2m1_nibbles})
