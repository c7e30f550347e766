"""Interleaved timing: programs take turns in one run, and each is held against the first by its ratio within every round.

A machine that slows down for a second slows all of them down. The median of the ratios needs no model of the noise, and its interval is
that of order statistics: exact for any distribution.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compressor.errors import UserInputError
from compressor.training.capture.operators import Op
from harness.replay.kernels.exchange import Variant, device_of, exchanged, wrapped_original

CONFIDENCE = 0.95
SAMPLE_SECONDS = 3e-4
_MOST_REPEATS = 10_000
Run = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """The median of a ratio over rounds.

    Attributes:
        median: of the rounds.
        low: lower end of its interval.
        high: upper end.
        confidence: with which the interval covers the median; below 0.95 where there are fewer than 6 rounds.
        num_rounds: number of rounds.
    """

    median: float
    low: float
    high: float
    confidence: float
    num_rounds: int

    def __str__(self) -> str:
        """Spell it as `1.02 [0.99, 1.05]`."""
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def to_dict(self) -> dict[str, float]:
        """Return it as JSON types."""
        return asdict(self)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Return the median with its interval between order statistics.

    Args:
        values: at least one.
        confidence: two-sided; where so few values cannot give it, the interval is the whole range, and its own confidence is told.

    Returns:
        The median and its interval.

    Raises:
        UserInputError: there are no values.
    """
    if not values:
        raise UserInputError("median_interval: no values were given; measure at least one round")
    ranked, count = sorted(values), len(values)
    below = [math.comb(count, k) / 2**count for k in range(count)]
    # The interval from the k-th to the k-th last value misses the median when fewer than k values lie on one side of it.
    rank = max((k for k in range(1, count // 2 + 1) if 2 * sum(below[:k]) <= 1 - confidence), default=1)
    covered = max(0.0, 1 - 2 * sum(below[:rank]))
    return Ratio(statistics.median(ranked), ranked[rank - 1], ranked[count - rank], covered, count)


def ratios(seconds: Mapping[str, Sequence[float]], over: str) -> dict[str, Ratio]:
    """Divide each series by one of them, round by round.

    Args:
        seconds: by name, one number per round.
        over: name of the series to divide by.

    Returns:
        The median ratio of every other series.
    """
    base = seconds[over]
    return {
        name: median_interval([one / other for one, other in zip(series, base, strict=True)])
        for name, series in seconds.items()
        if name != over
    }


def interleave(
    programs: Mapping[str, Run],
    rounds: int,
    *,
    repeats: int = 1,
    before: Callable[[str], object] | None = None,
    device: torch.device | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time programs in turns; the order rotates, and turns round in every other round.

    Args:
        programs: by name.
        rounds: how often each is measured.
        repeats: calls per measurement.
        before: called with the program's name before each measurement, unmeasured.
        device: is waited for where it works behind the host's back.
        clock: gives seconds.

    Returns:
        Seconds per call, by name, one number per round.
    """
    names = list(programs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    collects = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            shift = number // 2 % len(names)
            order = names[shift:] + names[:shift]
            for name in order if number % 2 == 0 else reversed(order):
                if before is not None:
                    before(name)
                seconds[name].append(_measure(programs[name], repeats, device, clock))
    finally:
        if collects:
            gc.enable()
    return seconds


def _measure(run: Run, repeats: int, device: torch.device | None, clock: Callable[[], float]) -> float:
    wait_for(device)
    begin = clock()
    for _ in range(repeats):
        run()
    wait_for(device)
    return (clock() - begin) / repeats


def wait_for(device: torch.device | None) -> None:
    """Wait until a device has done its work.

    Args:
        device: any; only CUDA works behind the host's back.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def repeats_for(run: Run, device: torch.device | None = None, seconds: float = SAMPLE_SECONDS) -> int:
    """Find how often to call a program so that the clock's own error does not matter.

    Args:
        run: the program; it is called a few times, which also warms it up.
        device: where it works.
        seconds: length of a measurement.

    Returns:
        The number of calls, at least one.
    """
    for _ in range(2):
        run()
    took = min(_measure(run, 1, device, time.perf_counter) for _ in range(3))
    return max(1, min(_MOST_REPEATS, math.ceil(seconds / max(took, 1e-9))))


# Times a variant against the original, beside a control: the original against itself, in the same calling convention and the same rounds.
#
# Four programs take turns. `tape` is the operator as the tape runs it, mostly through its `out=` overload. `original` computes and copies,
# as a variant has to; `control` is the very same program a second time, so its ratio is nothing but noise; `variant` is the new one. Only a
# ratio whose interval leaves that of the control says anything, and `tape` shows what the calling convention itself costs.

_LEAST_CONFIDENCE = 0.9
TAPE, ORIGINAL, CONTROL, VARIANT = "tape", "original", "control", "variant"


@dataclass(frozen=True)
class KernelTiming:
    """Medians and ratios of the four programs.

    Attributes:
        seconds: median seconds per call, by program.
        control: the original over itself.
        variant: the variant over the original.
        tape: the operator as the tape runs it, over the original in the variant's calling convention.
    """

    seconds: Mapping[str, float]
    control: Ratio
    variant: Ratio
    tape: Ratio

    @property
    def speed(self) -> str:
        """`faster` or `slower` where the variant's interval leaves both the control's and 1; else `no difference shown`.

        Fewer than 5 rounds give no interval that is worth the name, and say `too few rounds to tell`.
        """
        if self.variant.confidence < _LEAST_CONFIDENCE:
            return "too few rounds to tell"
        low, high = min(self.control.low, 1.0), max(self.control.high, 1.0)
        return "faster" if self.variant.high < low else "slower" if self.variant.low > high else "no difference shown"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "median_seconds": dict(self.seconds),
            "control_over_original": self.control.to_dict(),
            "variant_over_original": self.variant.to_dict(),
            "tape_over_original": self.tape.to_dict(),
            "speed": self.speed,
        }


def timing_of(series: Mapping[str, Sequence[float]]) -> KernelTiming:
    """Work out medians and ratios.

    Args:
        series: seconds of the four programs, a number per round.

    Returns:
        The timing.
    """
    found = ratios(series, ORIGINAL)
    seconds = {name: statistics.median(values) for name, values in series.items()}
    return KernelTiming(seconds, found[CONTROL], found[VARIANT], found[TAPE])


def time_kernel(op: Op, variant: Variant, rounds: int, before: Callable[[], object] | None) -> KernelTiming:
    """Time one operator on its arguments as they lie on the tape. What it leaves is undefined afterwards.

    Args:
        op: the operator.
        variant: the implementation, checked already.
        rounds: of the interleaving.
        before: puts the arguments back, where a run changes them; then every measurement is a single call.

    Returns:
        The timing.
    """
    assert op.run is not None
    device = device_of(op)
    programs: dict[str, Run] = {
        TAPE: op.run,
        ORIGINAL: wrapped_original(op),
        CONTROL: wrapped_original(op),
        VARIANT: exchanged(op, variant),
    }
    rewind = (lambda name: before()) if before is not None else None
    for name, run in programs.items():  # each has run before it is measured, whatever it puts off until then
        if rewind is not None:
            rewind(name)
        run()
    repeats = 1 if rewind is not None else repeats_for(programs[ORIGINAL], device)
    return timing_of(interleave(programs, rounds, repeats=repeats, before=rewind, device=device))
