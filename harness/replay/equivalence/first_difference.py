"""The first difference between two runs, in words: step, mode, tensor, how many elements, by how much, and which operator made it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressor.errors import CompressorError, ProofError
from compressor.lifecycle import EventType
from compressor.training import Plan, Trainer, locate
from compressor.training.step.batch import batch_key
from harness.replay.equivalence.run import Moment, Plot, Refusal, rehearse
from harness.replay.equivalence.training_state import TrainingState
from harness.tolerance.bits import FAR
from harness.tolerance.measures import measure


@dataclass(frozen=True)
class FirstDifference:
    """Where a mode first leaves eager.

    Attributes:
        mode: which one.
        step: its number, from 0.
        action: what the trainer said that it did there.
        names: of everything that differs after that step.
        detail: the first of them, in numbers.
        operator: the first operator that differs, where the step is a tape and a replay of it differs again; else why there is none.
    """

    mode: str
    step: int
    action: str
    names: tuple[str, ...]
    detail: str
    operator: str = ""

    def __str__(self) -> str:
        """Spell it on one line, and the operator on further ones."""
        more = f", and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"step {self.step} ({self.mode}: {self.action}): {self.names[0]}: {self.detail}{more}" + (
            f"\n{self.operator}" if self.operator else ""
        )


_ELSEWHERE = "no operator of the tape differs from eager on this batch: what differs lies outside of the tape"


def explain(plot: Plot, mode: str, moment_number: int, action: str, names: list[str]) -> FirstDifference:
    """Run both again up to the step that differs, and look at values.

    Args:
        plot: of the runs.
        mode: the one that differs from eager.
        moment_number: the first step after which it does.
        action: what the trainer said there.
        names: what differs.

    Returns:
        The difference in words.
    """
    eager, other = (_state_at(plot, which, moment_number) for which in ("eager", mode))
    detail = "both runs could not be repeated" if eager is None or other is None else _spell(names[0], eager, other)
    operator = _located(plot, moment_number) if mode == "replay" and action in ("prove", "audit", "replay") else ""
    return FirstDifference(mode, moment_number, action, tuple(names), detail, operator)


def _state_at(plot: Plot, mode: str, number: int) -> TrainingState | None:
    with closing(rehearse(plot, mode)) as moments:  # type: ignore[type-var]
        try:
            for moment in moments:
                if moment.number == number:
                    return moment.state().copied()
        except Refusal:
            return None
    return None


def _spell(name: str, eager: TrainingState, other: TrainingState) -> str:
    if name in eager.host or name in other.host:
        return f"{eager.host.get(name, 'absent')} in eager, {other.host.get(name, 'absent')} here"
    a, b = eager.tensors.get(name), other.tensors.get(name)
    if a is None or b is None:
        return f"is absent in {'eager' if a is None else 'this mode'}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} in eager, {b.dtype} {list(b.shape)} here"
    if name.startswith("rng:"):
        return "the generator stands elsewhere"
    return spell_distance(b, a)


def spell_distance(actual: Tensor, expected: Tensor) -> str:
    """Say how far two tensors of one shape and dtype are apart.

    Args:
        actual: what a mode gave.
        expected: what eager gave.

    Returns:
        Count of elements, largest difference, ULPs, and the first place.
    """
    found = measure(actual, expected)
    if not found.num_changed:
        return "no difference when the runs were repeated, so the difference does not repeat"
    ulps = "" if found.max_ulp is None else f", {found.max_ulp} ULP" if found.max_ulp < FAR else ", NaN or infinity on one side"
    if not found.max_abs:
        ulps += ", other bits of equal values (a sign of zero, or a payload of NaN)"
    where = "" if not found.first_index else f"; first at {list(found.first_index)}"
    return f"{found.num_changed} of {found.num_elements} elements differ, by up to {found.max_abs:.3e}{ulps}{where}"


def locate_refused(plot: Plot, refusal: Refusal) -> str:
    """Name the first operator that differs, where a proof has failed.

    Args:
        plot: of the run.
        refusal: how the run ended.

    Returns:
        The operator in words; empty for other errors, and where none differs.
    """
    if not isinstance(refusal.error, ProofError) or refusal.trainer is None:
        return ""
    try:
        return _locate(refusal.trainer, plot.batch(refusal.number))
    except CompressorError as error:
        return f"the operator could not be located: {error}"


def _located(plot: Plot, number: int) -> str:
    """Run up to the step, and let `locate` compare eager with the tape there."""
    last: Moment | None = None
    try:
        with closing(rehearse(plot, "replay")) as moments:  # type: ignore[type-var]
            for moment in moments:
                last = moment
                if moment.number < number - 1 or number == 0:
                    continue
                found = _locate(moment.trainer, plot.batch(number))
                if found or moment.number >= number:
                    return found or _ELSEWHERE
    except (Refusal, CompressorError) as error:
        return f"the operator could not be located: {error}"
    return "" if last is None else _ELSEWHERE


def _locate(trainer: Trainer, batch: Any) -> str:
    session = trainer.step.session
    if session is not None and session.last is not EventType.BATCH_START:
        session.send(EventType.BATCH_START)
    for plan in trainer.plans:
        if _fits(plan, batch):
            found = locate(plan, batch)
            if found is not None:
                return str(found)
    return ""


def _fits(plan: Plan, batch: Any) -> bool:
    return batch_key(plan.buffers.batch) == batch_key(batch)
