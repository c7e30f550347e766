"""How often the judgement cries wolf, and how soon it sees what is there: histories with known noise and known changes.

A night has 20 repetitions with a spread of 2 %. What differs between the kinds is what nights have in common:

- white: every night is off by 0.3 %.
- drifting: the machine drifts by 5 % between seasons and walks by 0.3 % a night, of which a ratio to an interleaved reference keeps a
  twentieth.
- bimodal: a quarter of the repetitions take 4.5 % longer (memory that lies badly).
- heavy: repetitions and nights follow Student's t with three degrees of freedom.
- autocorrelated: a night is off by 0.4 %, and resembles the one before with a correlation of 0.6.

What a history of one's own holds is noise, too: `recorded` draws stretches of its nights, with the repetitions that they had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserInputError
from compressor.progress import Progress, SilentProgress
from harness.nightly.judging.bridging import hodges_lehmann, standard_errors
from harness.nightly.judging.shifts import Shifts, find_shifts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.nightly.history import History
    from harness.nightly.measurement import Measurement

    Noise = Callable[[int, np.random.Generator], NDArray[np.float64]]

REPETITIONS, SPREAD = 20, 0.02
NIGHTS_BEFORE, NIGHTS_JUDGED = 40, 100
METRIC_NIGHTS = 5000
"""50 metrics over 100 nights: the unit of false alarms."""
_NIGHTS_WATCHED = 30  # after a planted change
_NIGHTS_RECORDED = 30  # a metric with fewer says too little of its noise
_STRETCH = 10  # nights that stay together, since neighbours resemble each other


def _white(nights: int, rng: np.random.Generator) -> NDArray[np.float64]:
    return rng.normal(0, 0.003, (nights, 1)) + rng.normal(0, SPREAD, (nights, REPETITIONS))


def _drifting(nights: int, rng: np.random.Generator) -> NDArray[np.float64]:
    season = 0.05 * np.sin(np.arange(nights) / 90 * 2 * math.pi + rng.uniform(0, 2 * math.pi))
    walk = np.cumsum(rng.normal(0, 0.003, nights))
    return ((season + walk) / 20)[:, None] + _white(nights, rng)


def _bimodal(nights: int, rng: np.random.Generator) -> NDArray[np.float64]:
    repetitions = rng.normal(0, SPREAD / 2, (nights, REPETITIONS)) + 0.045 * (rng.random((nights, REPETITIONS)) < 0.25)
    return repetitions + rng.normal(0, 0.003, (nights, 1))


def _heavy(nights: int, rng: np.random.Generator) -> NDArray[np.float64]:
    scale = 1 / math.sqrt(3)  # of a t distribution with three degrees of freedom, to a standard deviation of one
    return scale * (0.003 * rng.standard_t(3, (nights, 1)) + SPREAD * rng.standard_t(3, (nights, REPETITIONS)))


def _autocorrelated(nights: int, rng: np.random.Generator) -> NDArray[np.float64]:
    common = np.empty(nights)
    common[0] = rng.normal(0, 0.004)
    for night in range(1, nights):
        common[night] = 0.6 * common[night - 1] + rng.normal(0, 0.004 * math.sqrt(1 - 0.6**2))
    return common[:, None] + rng.normal(0, SPREAD, (nights, REPETITIONS))


NOISES: Mapping[str, Noise] = {
    "white": _white,
    "drifting": _drifting,
    "bimodal": _bimodal,
    "heavy": _heavy,
    "autocorrelated": _autocorrelated,
}
"""Name to a function from a number of nights to logarithms of readings [nights, repetitions]."""


def recorded(history: History) -> Noise:
    """Return the noise that a history holds: stretches of ten nights of one of its metrics, drawn at random and joined.

    Args:
        history: its nights should be of one commit, for a change among them is taken for noise; metrics that never differ are left out.

    Returns:
        The noise; every history drawn is of one metric.

    Raises:
        UserInputError: no metric has 30 nights of one environment.
    """
    drawn = [logs for name in history.metrics() if (logs := _longest_series(history.series(name))) is not None]
    if not drawn:
        told = f"no metric has {_NIGHTS_RECORDED} nights of one environment that differ"
        raise UserInputError(f"{history.path}: {told}; record more nights of one commit")

    def noise(nights: int, rng: np.random.Generator) -> NDArray[np.float64]:
        logs = drawn[rng.integers(len(drawn))]
        starts = rng.integers(len(logs) - _STRETCH + 1, size=-(-nights // _STRETCH))
        return np.concatenate([logs[start : start + _STRETCH] for start in starts])[:nights]

    return noise


def _longest_series(measured: Sequence[Measurement]) -> NDArray[np.float64] | None:
    """Logarithms [nights, repetitions] of the environment with most nights, where they are enough and differ."""
    by_environment: dict[str, list[tuple[float, ...]]] = {}
    for one in measured:
        if one.kind == "series":
            worse_is_more = one.values if one.better == "lower" else tuple(1 / value for value in one.values)
            by_environment.setdefault(one.environment, []).append(worse_is_more)
    nights = max(by_environment.values(), key=len, default=[])
    repetitions = min(map(len, nights), default=0)
    logs = np.log([values[:repetitions] for values in nights])
    return logs if len(nights) >= _NIGHTS_RECORDED and np.ptp(logs) > 0 else None


@dataclass(frozen=True)
class Planted:
    """A change that must be seen: its size a night after it began, and by which night."""

    name: str
    size: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    by_night: int


PLANTED = (
    Planted("step of 5 %", lambda nights: np.full(len(nights), math.log(1.05)), 3),
    Planted("step of 1 %", lambda nights: np.full(len(nights), math.log(1.01)), 15),
    Planted("drift of 0.2 % a night", lambda nights: 0.002 * (nights + 1), 20),
)


@dataclass(frozen=True)
class Figures:
    """What one kind of noise gave.

    Attributes:
        noise: its name.
        false_alarms: in 50 metrics over 100 nights, on average.
        between: 95 % interval of that average, since alarms are few.
        seen: name of a planted change to the share of series in which it was seen in time.
        median_night: likewise, to the night by which half of the series had seen it; infinite where fewer did.
    """

    noise: str
    false_alarms: float
    between: tuple[float, float]
    seen: Mapping[str, float]
    median_night: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; infinity as None."""
        finite = {name: None if math.isinf(night) else night for name, night in self.median_night.items()}
        return asdict(self) | {"between": list(self.between), "seen": dict(self.seen), "median_night": finite}


def simulate(num_series: int = 200, seed: int = 0, progress: Progress | None = None, noises: Mapping[str, Noise] = NOISES) -> list[Figures]:
    """Judge simulated histories night by night.

    Args:
        num_series: histories of each kind; planted changes are tried on a quarter of as many.
        seed: of the noise.
        progress: shows a bar.
        noises: the kinds.

    Returns:
        The figures of each kind of noise.
    """
    found = []
    with (progress or SilentProgress()).task("histories", len(noises) * (1 + len(PLANTED))) as task:
        for name, noise in noises.items():
            rng = np.random.default_rng(seed)
            alarms = sum(_false_alarms(noise(NIGHTS_BEFORE + NIGHTS_JUDGED, rng)) for _ in range(num_series))
            task.advance(note=name)
            seen, median = {}, {}
            for planted in PLANTED:
                nights = np.array([_night_seen(noise, planted, rng) for _ in range(max(1, num_series // 4))])
                seen[planted.name] = float((nights <= planted.by_night).mean())
                median[planted.name] = float(np.median(nights))
                task.advance()
            unit = METRIC_NIGHTS / (num_series * NIGHTS_JUDGED)
            low, high = poisson_interval(alarms)
            found.append(Figures(name, alarms * unit, (low * unit, high * unit), seen, median))
    return found


def poisson_interval(count: int) -> tuple[float, float]:
    """Return between which numbers the mean lies, with 95 %, of what was counted once.

    Args:
        count: of rare events.

    Returns:
        Lower and upper end, within 3 % of the exact ones where there are none, or three or more.

    Source: Wilson and Hilferty 1931, in Garwood's interval.
    """
    z, more = NormalDist().inv_cdf(0.975), count + 1
    low = count * (1 - 1 / (9 * count) - z / (3 * math.sqrt(count))) ** 3 if count else 0.0
    return low, more * (1 - 1 / (9 * more) + z / (3 * math.sqrt(more))) ** 3


def _found(logs_NR: NDArray[np.float64]) -> Shifts:
    return find_shifts(hodges_lehmann(logs_NR), standard_errors(logs_NR), densely=True)


def _false_alarms(logs_NR: NDArray[np.float64]) -> int:
    """Count what is taken for worse, as it is night by night; its level holds for what follows, as if it were accepted."""
    return sum(shift.effect > 0 and shift.seen > NIGHTS_BEFORE for shift in _found(logs_NR).found)


def _night_seen(noise: Noise, planted: Planted, rng: np.random.Generator) -> float:
    before = 60
    logs = noise(before + _NIGHTS_WATCHED, rng)
    logs[before:] += planted.size(np.arange(_NIGHTS_WATCHED, dtype=np.float64))[:, None]
    seen = [shift.seen - before for shift in _found(logs).found if shift.effect > 0]
    return next((float(night) for night in seen if night > 0), math.inf)
