"""One operator and its variant on the operator's real inputs, at the moment of the step when it runs: error, truth and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.random_state import RandomState
from compressor.training.capture.operators import Op
from compressor.training.step.digests import same_bits
from harness.replay.kernels.exchange import (
    Kept,
    Variant,
    checked_call,
    device_of,
    exchanged,
    overlaps_any,
    targets,
    tensor_arguments,
    wrapped_original,
    written,
)
from harness.replay.kernels.float64_reference import Truth, against_truth, left_by, names_of, true_results
from harness.replay.kernels.timing import KernelTiming, time_kernel
from harness.tolerance.measures import Distance, measure


@dataclass(frozen=True)
class LocalError:
    """How far a variant's result is from the operator's, on the same inputs.

    Attributes:
        name: `result`, `result 1`, or the argument that is written.
        distance: between the two.
        scale: largest magnitude of the operator's result; an error on nothing but zeros says nothing.
        truth: both against float64, or None.
    """

    name: str
    distance: Distance
    scale: float
    truth: Truth | None

    @property
    def bitwise_equal(self) -> bool:
        """No bit differs."""
        return self.distance.num_changed == 0

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "name": self.name,
            "bitwise_equal": self.bitwise_equal,
            "scale": self.scale,
            **distance_dict(self.distance),
            "truth": None if self.truth is None else self.truth.to_dict(),
        }


@dataclass(frozen=True)
class Site:
    """One operator of the tape that was exchanged.

    Attributes:
        index: its position on the tape.
        place: position, phase, module and operator in words.
        line: its line of the signature.
        variant: name of what took its place.
        errors: one per tensor that it leaves.
        no_truth: why there is no run in float64; "" where there is one.
        control_equal: the original gave the same bits in the variant's calling convention.
        repeatable: the variant gave the same bits twice.
        timing: of the operator alone; None where none was wanted.
    """

    index: int
    place: str
    line: str
    variant: str
    errors: tuple[LocalError, ...]
    no_truth: str
    control_equal: bool
    repeatable: bool
    timing: KernelTiming | None

    @property
    def bitwise_equal(self) -> bool:
        """No bit of any result differs."""
        return all(error.bitwise_equal for error in self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "index": self.index,
            "place": self.place,
            "line": self.line,
            "variant": self.variant,
            "bitwise_equal": self.bitwise_equal,
            "control_bitwise_equal": self.control_equal,
            "repeatable": self.repeatable,
            "no_truth": self.no_truth or None,
            "results": [error.to_dict() for error in self.errors],
            "timing": None if self.timing is None else self.timing.to_dict(),
        }


def distance_dict(distance: Distance) -> dict[str, Any]:
    """Return what reports show of a distance as JSON types."""
    return {
        "max_abs": distance.max_abs,
        "max_ulp": distance.max_ulp,
        "relative_error": distance.relative_error,
        "num_changed": distance.num_changed,
        "num_elements": distance.num_elements,
    }


def examine(op: Op, variant: Variant, name: str, rounds: int, generators: Sequence[torch.Generator] = ()) -> Site:
    """Hold a variant against an operator, at the moment when the operator is to run. The operator has run once afterwards.

    Args:
        op: the operator; all before it on the tape have run.
        variant: the implementation.
        name: of the variant.
        rounds: of the timing; 0 for none.
        generators: random generators that the step names itself.

    Returns:
        What was found.

    Raises:
        UserInputError: the variant cannot take the operator's place.
    """
    moment = _Moment(op, generators)
    assert op.run is not None
    original = moment.left_after(op.run)
    draws = moment.has_drawn()
    moment.rewind()
    truth = true_results(op, draws)
    control = moment.left_after(wrapped_original(op))
    moment.rewind()
    results = checked_call(op, variant, name)
    first = [tensor.clone() for tensor in ([results[position] for position, _ in targets(op)] + written(op))]
    again = moment.left_after(exchanged(op, variant))
    errors = []
    for number, (label, own, new) in enumerate(zip(names_of(op), original, first, strict=True)):
        exact = None if isinstance(truth, str) else against_truth(own, new, truth[number])
        errors.append(LocalError(label, measure(new, own), _scale(own), exact))
    timing = None
    if rounds:
        timing = time_kernel(op, variant, rounds, moment.rewind if moment.drifts else None)
    moment.rewind()
    op.run()
    return Site(
        op.index,
        op.place,
        op.line,
        name,
        tuple(errors),
        truth if isinstance(truth, str) else "",
        all(map(same_bits, original, control)),
        all(map(same_bits, first, again)),
        timing,
    )


class _Moment:
    """What an operator reads, kept from before it runs; so that it can run again."""

    def __init__(self, op: Op, generators: Sequence[torch.Generator]) -> None:
        self._op, self._generators, self._device = op, generators, device_of(op)
        given = tensor_arguments(op)
        # The results may lie where an argument lies that nobody reads any more.
        self.drifts = bool(written(op)) or any(overlaps_any(out, given) for _, out in targets(op))
        self._kept = Kept.of(given)
        self._rng = RandomState.current(foreign=False, devices=self._device, generators=generators)

    def rewind(self) -> None:
        """Make everything that the operator reads as it was."""
        self._kept.put_back()
        self._rng.restore(self._generators)

    def has_drawn(self) -> bool:
        """Say whether a random generator has moved since."""
        return not self._rng.equals(RandomState.current(foreign=False, devices=self._device, generators=self._generators))

    def left_after(self, run: Callable[[], object]) -> list[Tensor]:
        """Run from the start, and copy what was left."""
        self.rewind()
        run()
        return [tensor.clone() for tensor in left_by(self._op)]


def _scale(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float((tensor.abs() if tensor.is_complex() else tensor.to(torch.float64).abs()).max())


def worst(sites: Sequence[Site]) -> Mapping[str, float]:
    """Return the largest local errors of all sites.

    Args:
        sites: what was found.

    Returns:
        `max_abs`, `relative_error` and `max_ulp`; a result that is no floating number and differs is infinitely many units away.
    """
    distances = [error.distance for site in sites for error in site.errors]
    return {
        "max_abs": max((distance.max_abs or 0.0 for distance in distances), default=0.0),
        "relative_error": max((distance.relative_error for distance in distances), default=0.0),
        "max_ulp": max((_ulp(distance) for distance in distances), default=0.0),
    }


def _ulp(distance: Distance) -> float:
    if distance.max_ulp is None:
        return 0.0 if distance.num_changed == 0 else float("inf")
    return float(distance.max_ulp)
