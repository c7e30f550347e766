"""What an exchange of kernels showed, as text, as JSON, and held against a tolerance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.replay.kernels.call_site import Site, worst
from harness.replay.kernels.error_growth import Grown, GrownError
from harness.replay.kernels.timing import KernelTiming
from harness.tolerance.bits import FAR
from harness.tolerance.measures import Distance

_MOST_SITES = 12


@dataclass(frozen=True)
class KernelReport:
    """The whole comparison.

    Attributes:
        swaps: the exchanges in words.
        sites: one per operator that was exchanged.
        grown: after one step, and after several where asked for.
        control_equal: the originals in the variants' calling convention left the same bits after every step.
        repeatable: the steps with the variants left the same bits the second time.
        timing: of the whole step; None where none was wanted.
        num_ops: operators on the tape.
    """

    swaps: tuple[str, ...]
    sites: tuple[Site, ...]
    grown: tuple[Grown, ...]
    control_equal: bool
    repeatable: bool
    timing: KernelTiming | None
    num_ops: int

    @property
    def bitwise_equal(self) -> bool:
        """Neither an operator nor the step shows the exchange."""
        return all(site.bitwise_equal for site in self.sites) and all(grown.bitwise_equal for grown in self.grown)

    def exceeded(self, max_ulps: float | None = None, max_error: float | None = None) -> list[str]:
        """Hold the local errors against a tolerance.

        Args:
            max_ulps: units in the last place that a result may differ by.
            max_error: largest absolute difference that is allowed.

        Returns:
            What is beyond it, a sentence per operator; empty where nothing is. Bits that a later call does not repeat are beyond any.
        """
        if max_ulps is None and max_error is None:
            return []
        found = [f"{site.place}: the variant gave other bits the second time" for site in self.sites if not site.repeatable]
        first = [grown for grown in self.grown if grown.num_steps == 1]  # of the inputs on which the ops were compared
        if self.control_equal and all(site.bitwise_equal for site in self.sites) and not all(grown.bitwise_equal for grown in first):
            found.append("every op is bitwise equal, but the step is not: later calls of the variant give something else")
        if self.control_equal and not self.repeatable:
            found.append(f"{self.grown[-1].num_steps} steps with the variant gave other bits the second time")
        for site in self.sites:
            errors = worst([site])
            for key, limit, unit in (("max_ulp", max_ulps, "ulp"), ("max_abs", max_error, "absolute")):
                if limit is not None and (float(errors["max_ulp"]) == float(FAR) or not errors[key] <= limit):  # NaN beside a number
                    value = _ulps(errors[key]) if key == "max_ulp" else f"{errors[key]:.3g}"
                    found.append(f"{site.place}: {value} {unit} and {limit:g} are allowed")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "swaps": list(self.swaps),
            "num_ops": self.num_ops,
            "bitwise_equal": self.bitwise_equal,
            "control_bitwise_equal": self.control_equal,
            "variant_repeatable": self.repeatable,
            "worst": dict(worst(self.sites)),
            "truth": dict(self._truths()),
            "sites": [site.to_dict() for site in self.sites],
            "grown": [grown.to_dict() for grown in self.grown],
            "step_timing": None if self.timing is None else self.timing.to_dict(),
        }

    def text(self) -> str:
        """Return the report for people."""
        return "\n".join([*self._head(), *self._site_lines(), *self._truth_lines(), *self._grown_lines(), *self._step_lines()])

    def _head(self) -> Iterator[str]:
        total = len(self.sites)
        yield f"{'; '.join(self.swaps)}: exchanged at {total} of {self.num_ops} ops, all else as it was"

    def _site_lines(self) -> Iterator[str]:
        yield "on the op's own inputs"
        shown = sorted(self.sites, key=lambda site: -worst([site])["relative_error"])[:_MOST_SITES]
        for site in sorted(shown, key=lambda site: site.index):
            yield f"  {site.place}"
            yield from (f"    {line}" for line in _site_details(site))
        if len(self.sites) > len(shown):
            yield f"  and {len(self.sites) - len(shown)} more, none further from the original than these"

    def _truths(self) -> Counter[str]:
        return Counter(error.truth.nearness for site in self.sites for error in site.errors if error.truth is not None)

    def _truth_lines(self) -> Iterator[str]:
        truths = self._truths()
        if truths:
            counts = ", ".join(f"{nearness} at {count}" for nearness, count in sorted(truths.items()))
            yield f"against float64 the variant is: {counts}"

    def _grown_lines(self) -> Iterator[str]:
        for grown in self.grown:
            steps = f"after {grown.num_steps} step{'s' if grown.num_steps > 1 else ''}"
            if grown.bitwise_equal:
                yield f"{steps}: everything is bitwise equal, loss {grown.original_loss:.9g}"
                continue
            yield f"{steps}: loss {grown.original_loss:.9g} -> {grown.variant_loss:.9g}"
            yield from (f"  {_grown_line(error)}" for error in grown.errors if error.num_differing)
            yield f"  bitwise equal: {', '.join(error.role for error in grown.errors if not error.num_differing) or 'nothing'}"
        control = "bitwise equal" if self.control_equal else "NOT equal, so the numbers above are not the variant's alone"
        yield f"  A/A control (the original, computed and copied as the variant is): {control}"
        if not self.repeatable:
            yield "  the same steps with the variant again: NOT equal, it does not repeat its own bits"

    def _step_lines(self) -> Iterator[str]:
        if self.timing is not None:
            yield f"time of the whole step, {self.timing.control.num_rounds} interleaved rounds"
            yield from (f"  {line}" for line in timing_lines(self.timing))


def _site_details(site: Site) -> Iterator[str]:
    for error in sorted(site.errors, key=lambda error: -error.distance.relative_error)[:3]:
        label = f"{error.name}: " if len(site.errors) > 1 else ""
        if error.bitwise_equal:
            text = "bitwise equal" + (", but it is all zeros" if error.scale == 0 and error.distance.num_elements else "")
        else:
            text = f"{_spell(error.distance)}; largest value {error.scale:.3g}"
        if error.truth is not None:
            original, variant = error.truth.original_ulp, error.truth.variant_ulp
            text += f"; from float64: original {original:.3g} ulp, variant {variant:.3g} ulp, {error.truth.nearness}"
        yield label + text
    if len(site.errors) > 3:
        yield f"and {len(site.errors) - 3} more results, none further apart"
    if site.no_truth:
        yield f"no float64 to compare with: {site.no_truth}"
    if not site.control_equal:
        yield "A/A control: the original does not repeat its own bits here"
    if not site.repeatable:
        yield "the variant gave other bits the second time"
    if site.timing is not None:
        yield from timing_lines(site.timing)


def timing_lines(timing: KernelTiming) -> list[str]:
    """Spell a timing, the control beside the variant.

    Args:
        timing: to be shown.

    Returns:
        Three lines.
    """
    rows: Sequence[tuple[str, str, str]] = (
        ("A/A control", str(timing.control), "the original against itself: noise"),
        ("variant", str(timing.variant), f"{_time(timing.seconds['original'])} -> {_time(timing.seconds['variant'])}: {timing.speed}"),
        ("as on tape", str(timing.tape), f"{_time(timing.seconds['tape'])}: what the calling convention saves or costs"),
    )
    return [f"{name:<12} {ratio:<22} {note}" for name, ratio, note in rows]


def _grown_line(error: GrownError) -> str:
    assert error.distance is not None
    head = f"{error.role}: relative {error.relative_error:.2g}"
    if error.num_tensors == 1:
        return f"{head}, max {error.distance.max_abs:.3g}"
    return f"{head}, {error.num_differing} of {error.num_tensors} differ, most {error.worst} by {error.distance.max_abs:.3g}"


def _spell(distance: Distance) -> str:
    share = f"{distance.num_changed} of {distance.num_elements} elements"
    if distance.max_abs == 0:
        return f"equal numbers, but other bits (the sign of a zero, the payload of a NaN) in {share}"
    ulp = "" if distance.max_ulp is None else f", {_ulps(distance.max_ulp)} ulp"
    largest = 0.0 if distance.max_abs is None else distance.max_abs
    return f"max {largest:.3g}, relative {distance.relative_error:.2g}{ulp}, {share}"


def _ulps(count: float) -> str:
    return "infinitely many" if count >= FAR else f"{count:.0f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
