"""What becomes of a variant's error by the end of a step, and of several: loss, gradients, parameters, buffers, optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressor.training import Plan
from harness.replay.equivalence.training_state import TrainingState, state_of
from harness.replay.kernels.call_site import distance_dict
from harness.tolerance.measures import Distance, measure, noise_and_signal

# Prefix of a tensor's name to what reports call it, in the order of a step.
ROLES = {
    "loss": "loss",
    "grad:": "gradients",
    "param:": "parameters",
    "buffer:": "buffers",
    "opt.": "optimizer state",
    "average:": "averages",
    "rng:": "random generators",
}
_OTHER = "other tensors"


@dataclass(frozen=True)
class GrownError:
    """The difference of one kind of state.

    Attributes:
        role: which kind.
        num_tensors: how many there are.
        num_differing: of how many any bit differs.
        relative_error: |difference| / |original| of all of them together: a gradient that is nothing but rounding weighs little.
        worst: name of the tensor whose absolute error is largest; "" where none differs.
        distance: of that tensor, or None.
    """

    role: str
    num_tensors: int
    num_differing: int
    relative_error: float
    worst: str
    distance: Distance | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        distance = {} if self.distance is None else distance_dict(self.distance)
        return {
            "role": self.role,
            "num_tensors": self.num_tensors,
            "num_differing": self.num_differing,
            "relative_error": self.relative_error,
            "worst": {"name": self.worst, **distance} if self.worst else None,
        }


@dataclass(frozen=True)
class Grown:
    """All of the state after a number of steps, the variant's against the original's.

    Attributes:
        num_steps: steps since the common start.
        original_loss: loss of the last of them.
        variant_loss: that with the variant.
        errors: by kind, in the order of a step.
    """

    num_steps: int
    original_loss: float
    variant_loss: float
    errors: tuple[GrownError, ...]

    @property
    def bitwise_equal(self) -> bool:
        """No bit of any tensor differs."""
        return all(error.num_differing == 0 for error in self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "num_steps": self.num_steps,
            "original_loss": self.original_loss,
            "variant_loss": self.variant_loss,
            "bitwise_equal": self.bitwise_equal,
            "errors": [error.to_dict() for error in self.errors],
        }


def run_steps(plan: Plan, batch_at: Callable[[int], Any], marks: Sequence[int]) -> list[TrainingState]:
    """Replay steps from where the plan stands. Changes the state of the step.

    Args:
        plan: the plan.
        batch_at: gives the batch of a step by its number, from 0.
        marks: numbers of steps after which the state is kept, ascending.

    Returns:
        A state per mark.
    """
    kept = []
    for number in range(marks[-1]):
        loss = plan(batch_at(number))
        plan.step.finish()
        if number + 1 in marks:
            kept.append(state_of(plan.step, loss).copied())
    return kept


def grown_between(num_steps: int, original: TrainingState, variant: TrainingState) -> Grown:
    """Compare two states.

    Args:
        num_steps: steps since their common start.
        original: how the original left it.
        variant: how the variant left it.

    Returns:
        The differences by kind.
    """
    groups: dict[str, list[str]] = {}
    for name in original.tensors:
        groups.setdefault(next((role for prefix, role in ROLES.items() if name.startswith(prefix)), _OTHER), []).append(name)
    order = [*ROLES.values(), _OTHER]
    errors = [_error(role, groups[role], original.tensors, variant.tensors) for role in order if role in groups]
    return Grown(num_steps, _number(original), _number(variant), tuple(errors))


def _error(role: str, names: Sequence[str], original: Mapping[str, Tensor], variant: Mapping[str, Tensor]) -> GrownError:
    distances = {name: measure(variant[name], original[name]) for name in names}
    differing = [name for name in names if distances[name].num_changed]
    worst = max(differing, key=lambda name: distances[name].max_abs or 0.0, default="")
    norms = [noise_and_signal(variant[name], original[name]) for name in names]
    noise, signal = (math.sqrt(math.fsum(norm[k] ** 2 for norm in norms)) for k in (0, 1))
    relative = 0.0 if noise == 0 else math.inf if signal == 0 else noise / signal
    return GrownError(role, len(names), len(differing), relative, worst, distances.get(worst))


def _number(state: TrainingState) -> float:
    return float(state.tensors["loss"])
