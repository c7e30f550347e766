"""A whole run in one mode: what the trainer did, a digest of all state after every step, and how it ended."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from compressor.training import Trainer
from harness.replay.equivalence.run import Plot, Refusal, rehearse

Digests = Mapping[str, str]


@dataclass
class ModeRun:
    """What one mode did.

    Attributes:
        mode: eager, capture or replay.
        actions: per step, what the trainer said that it did.
        digests: per compared step, everything that the state holds.
        losses: per step.
        seconds: per step.
        num_replays: steps that the trainer replayed, and in which no module ran in Python.
        num_plans: captured plans at the end.
        num_ops: operators of the largest of them.
        unreplayed: of each plan key of which no step was replayed, the steps from its first to its last.
        unstarted: modifiers with a start that the run did not reach.
        proven_elsewhere: a plan was proven on a batch that it had not been captured with.
        overwritten: steps whose returned loss was another one when the run was over.
        refusal: the step that raised, after which the run ended.
    """

    mode: str
    actions: list[str] = field(default_factory=list)
    digests: dict[int, Digests] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_replays: int = 0
    num_plans: int = 0
    num_ops: int = 0
    unreplayed: list[range] = field(default_factory=list)
    unstarted: list[str] = field(default_factory=list)
    proven_elsewhere: bool = False
    overwritten: list[int] = field(default_factory=list)
    refusal: Refusal | None = None

    def seconds_per_step(self) -> float | None:
        """Return the median of the steps that show what the mode costs; None where there was none."""
        telling = [second for action, second in zip(self.actions, self.seconds, strict=True) if action == self.mode]
        return statistics.median(telling) if telling else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "mode": self.mode,
            "num_steps": len(self.actions),
            "actions": {action: self.actions.count(action) for action in dict.fromkeys(self.actions)},
            "num_replays": self.num_replays,
            "num_plans": self.num_plans,
            "num_ops": self.num_ops,
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "seconds_per_step": self.seconds_per_step(),
            "refusal": None if self.refusal is None else str(self.refusal),
        }


def run_mode(plot: Plot, mode: str, every: int) -> ModeRun:
    """Run to the end, or to the step that raises.

    Args:
        plot: what to run.
        mode: eager, capture or replay.
        every: state is taken after every so manieth step, and after the last.

    Returns:
        What was seen.
    """
    run = ModeRun(mode)
    returned: list[Tensor] = []
    try:
        with closing(rehearse(plot, mode)) as moments:  # type: ignore[type-var]
            for moment in moments:
                run.actions.append(moment.action)
                run.losses.append(float(moment.loss))
                returned.append(moment.loss)
                run.seconds.append(moment.seconds)
                run.num_replays += moment.action == "replay" and not moment.num_forwards
                if moment.number % every == 0 or moment.number + 1 == plot.num_steps:
                    run.digests[moment.number] = moment.state().digests()
                _note_plans(run, moment.trainer)
    except Refusal as refusal:
        run.refusal = refusal
    pairs = zip(returned, run.losses, strict=True)
    run.overwritten = [number for number, (loss, then) in enumerate(pairs) if repr(float(loss)) != repr(then)]  # NaN is NaN
    return run


def _note_plans(run: ModeRun, trainer: Trainer) -> None:
    run.num_plans = len(trainer.plans)
    run.num_ops = max((len(plan.captured.ops) for plan in trainer.plans), default=0)
    session = trainer.step.session
    modifiers = () if session is None else session.modifiers
    run.unstarted = [one.label for one in modifiers if one.start is not None and not one.started]
    run.unreplayed = trainer.unreplayed
    run.proven_elsewhere = any(plan.proven_with_other_batch for plan in trainer.plans)


def spell_run(run: ModeRun, eager_seconds: float | None) -> str:
    """Spell a run on one line.

    Args:
        run: the run.
        eager_seconds: what a step of eager took, to compare with.

    Returns:
        The line.
    """
    kinds = ", ".join(f"{run.actions.count(action)} {action}" for action in dict.fromkeys(run.actions))
    text = f"{run.mode:<8} {len(run.actions)} steps ({kinds})"
    if run.num_plans:
        text += f"; {spell_plans(run)} of up to {run.num_ops} operators, {run.num_replays} replays"
    seconds = run.seconds_per_step()
    if seconds is not None:
        text += f"; {1000 * seconds:.1f} ms a step"
        if run.mode != "eager" and eager_seconds:
            text += f", {eager_seconds / seconds:.2f}x as fast as eager"
    return text


def spell_plans(run: ModeRun) -> str:
    """Count the plans of a run in words."""
    return f"{run.num_plans} plan{'' if run.num_plans == 1 else 's'}"
