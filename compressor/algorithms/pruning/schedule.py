"""Schedules of gradual pruning: how much is zero at which moment between start and end.

s(t) = s_init + (s_final - s_init) * f((t - start) / (end - start))

linear            f(x) = x
cubic             f(x) = 1 - (1 - x)^3         Zhu & Gupta 2017, arXiv:1710.01878, equation 1
polynomial_decay  f(x) = 1 - (1 - x)^exponent  fast at first
polynomial        f(x) = x^exponent            slow at first
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

DEFAULT_EXPONENT = 2.0

# Name -> share of the way that is gone, from the share of the time that is gone and the exponent.
SCHEDULES: Mapping[str, Callable[[float, float], float]] = MappingProxyType(
    {
        "linear": lambda x, exponent: x,
        "cubic": lambda x, exponent: 1 - (1 - x) ** 3,
        "polynomial_decay": lambda x, exponent: 1 - (1 - x) ** exponent,
        "polynomial": lambda x, exponent: x**exponent,
    }
)


@dataclass(frozen=True)
class SparsitySchedule:
    """Sparsity over time.

    Attributes:
        kind: a name of SCHEDULES.
        init_sparsity: share of zeros at the start.
        final_sparsity: share of zeros at the end.
        start: index of the start.
        end: index of the end, after the start.
        exponent: of the polynomials, > 0.
    """

    kind: str
    init_sparsity: float
    final_sparsity: float
    start: float
    end: float
    exponent: float = DEFAULT_EXPONENT

    def at(self, index: float) -> float:
        """Say how much is to be zero.

        Args:
            index: a step or an epoch; before the start it counts as the start, after the end as the end.

        Returns:
            The share of zeros.

        Example:
            >>> SparsitySchedule("cubic", 0.0, 0.8, start=0, end=10).at(5)
            0.7000000000000001
        """
        gone = min(1.0, max(0.0, (index - self.start) / (self.end - self.start)))
        if gone == 1.0:
            return self.final_sparsity
        return self.init_sparsity + (self.final_sparsity - self.init_sparsity) * SCHEDULES[self.kind](gone, self.exponent)
