"""Times a variant against the original, beside a control: the original against itself, in the same calling convention and the same rounds.

Four programs take turns. `tape` is the operator as the tape runs it, mostly through its `out=` overload. `original` computes and copies,
as a variant has to; `control` is the very same program a second time, so its ratio is nothing but noise; `variant` is the new one. Only a
ratio whose interval leaves that of the control says anything, and `tape` shows what the calling convention itself costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.training.operators import Op
from harness.replay.kernel_exchange import Variant, device_of, exchanged, wrapped_original
from harness.replay.timing import Ratio, Run, interleave, ratios, repeats_for

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
    def verdict(self) -> str:
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
            "verdict": self.verdict,
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
