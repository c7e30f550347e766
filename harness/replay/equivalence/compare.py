"""Is the step the same? A training step is run in eager, capture and replay, and all of its state is compared after every step.

Fresh instances from one seed run the same batches. Before any mode is held against eager, eager is held against itself: a step that does
not repeat says nothing about replay. And a comparison of nothing is no proof: a run without a replay on another batch than the captured
one, without an update, or with NaN losses only is inconclusive, never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import nn

from compressor.errors import ReplayError, UserInputError
from compressor.json_text import to_json
from compressor.settings.kinds import FUNCTION, TEXTS, WHOLE
from compressor.settings.options import checked
from compressor.training import TrainStep
from harness.errors import ContractViolation
from harness.replay.equivalence.first_difference import FirstDifference, explain, locate_refused
from harness.replay.equivalence.mode_run import ModeRun, run_mode, spell_plans, spell_run
from harness.replay.equivalence.run import Batches, Between, Factory, Plot
from harness.replay.equivalence.training_state import differing_names
from harness.reporting.record import CheckRecord, Claim, decide
from harness.reporting.verdict import Outcome, Verdict

_SEEDS = 1 << 32  # of numpy, which has the fewest

# What the runs of a comparison say: a record for each mode, and one that asks whether there was anything to see.

CLAIMS = {
    "eager": Claim("replay.repeats", "Two eager runs from one seed give the same bits"),
    "capture": Claim("replay.capture", "A recorded step gives the bits of the eager one"),
    "replay": Claim("replay.replay", "A replayed step gives the bits of the eager one"),
    "vacuity": Claim("replay.not_vacuous", "There was something to compare"),
}


def judge_eager(odd: tuple[int, list[str]] | None) -> CheckRecord:
    """Say whether eager repeats itself.

    Args:
        odd: the first step after which two eager runs differ, and what differs.

    Returns:
        The record.
    """
    if odd is None:
        return CLAIMS["eager"].record(Outcome.PASS, "two eager runs are equal bit for bit")
    number, names = odd
    return CLAIMS["eager"].record(
        Outcome.INCONCLUSIVE,
        f"eager does not repeat itself: step {number}: {names[0]} and {len(names) - 1} more differ between two eager runs from one seed; "
        "this is not about replay: seed what the factory draws, share nothing between instances, use deterministic algorithms",
        findings=names,
    )


def judge_mode(run: ModeRun, difference: FirstDifference | None, plot: Plot) -> CheckRecord:
    """Say whether a mode gave what eager gave.

    Args:
        run: of the mode.
        difference: from eager.
        plot: of the runs.

    Returns:
        The record.
    """
    claim, evidence = CLAIMS[run.mode], run.to_dict()
    if difference is not None:
        return claim.record(Outcome.FAIL, str(difference), evidence=evidence, findings=difference.names)
    if run.overwritten:
        text = f"the loss that step {run.overwritten[0]} returned was overwritten later, and so were {len(run.overwritten) - 1} more"
        return claim.record(Outcome.FAIL, text, evidence=evidence)
    refusal = run.refusal
    if refusal is not None:
        kind = "refused" if refusal.is_named else "broke without a named error"
        left = f"; not as before the call: {', '.join(refusal.changed[:3])}" if refusal.changed else ""
        operator = locate_refused(plot, refusal)
        text = f"{kind} at {refusal}{left}" + (f"\n{operator}" if operator else "")
        return claim.record(Outcome.FAIL, text, evidence=evidence, findings=refusal.changed)
    return claim.record(Outcome.PASS, f"{len(run.digests)} states of {len(run.actions)} steps are equal bit for bit", evidence=evidence)


def judge_vacuity(runs: Mapping[str, ModeRun]) -> CheckRecord:
    """Say what a pass would rest on, and call it inconclusive where that is nothing.

    Args:
        runs: by mode, eager among them.

    Returns:
        The record.
    """
    claim, eager = CLAIMS["vacuity"], runs["eager"]
    if any(run.refusal is not None for run in runs.values()):
        return claim.skipped("a mode ended early")
    reasons = list(_nothing_moved(eager))
    reasons += [f"{one} was not started in {len(eager.actions)} steps; give more steps, or a smaller start" for one in eager.unstarted]
    replay, capture = runs.get("replay"), runs.get("capture")
    if capture is not None and "capture" not in capture.actions:
        reasons.append(f"nothing was recorded in {len(capture.actions)} steps; give more than the warm-up takes, which is 2 by default")
    if replay is not None:
        needed = "warm-up, capture, proof and one replay take 5 steps by default; give more steps, or fewer kinds of batches"
        if not replay.num_replays:
            reasons.append(f"nothing was replayed in {len(replay.actions)} steps ({', '.join(dict.fromkeys(replay.actions))}): {needed}")
        elif late := [steps.start for steps in replay.unreplayed if steps.stop == len(replay.actions)]:
            reasons.append(
                f"the kind of step that began at step {late[0]} (another batch, or a modifier's work) was not replayed: {needed}"
            )
        elif not replay.proven_elsewhere:
            reasons.append("no plan ever met another batch than the one it was captured with; give batches that differ")
    if reasons:
        return claim.record(Outcome.INCONCLUSIVE, "; ".join(reasons), findings=reasons)
    replays = "" if replay is None else f"{replay.num_replays} replays of {spell_plans(replay)}, "
    passing = [] if replay is None else [steps.start for steps in replay.unreplayed]
    never = f"; the kinds of step that began at step {', '.join(map(str, passing))} came and went without a replay" if passing else ""
    return claim.record(Outcome.PASS, f"{replays}{_count_changed(eager, 'param:')} parameters moved{never}")


def _nothing_moved(eager: ModeRun) -> list[str]:
    reasons = []
    if all(math.isnan(loss) for loss in eager.losses):
        reasons.append("every loss is NaN")
    if len(eager.digests) > 1:
        if not _count_changed(eager, "param:"):
            reasons.append("no parameter ever changed: a rate of 0, or an optimizer of other parameters")
        if not _count_changed(eager, "grad:"):
            reasons.append("no gradient ever changed: the loss does not depend on the batch or on the parameters")
    return reasons


def _count_changed(run: ModeRun, prefix: str) -> int:
    states = list(run.digests.values())
    names = [name for name in states[-1] if name.startswith(prefix)]
    return sum(len({state.get(name) for state in states}) > 1 for name in names)


MODES = ("eager", "capture", "replay")


@dataclass(frozen=True)
class Equivalence:
    """What came of a comparison.

    Attributes:
        records: whether eager repeats, each mode against it, and whether there was anything to see.
        runs: by mode.
        differences: the first of each mode that differs.
    """

    records: tuple[CheckRecord, ...]
    runs: Mapping[str, ModeRun]
    differences: Mapping[str, FirstDifference] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """What the records together mean."""
        return decide(self.records)

    @property
    def passed(self) -> bool:
        """Every mode gave the same bits, and there was something to compare."""
        return self.verdict is Verdict.PASS

    @property
    def refusal(self) -> ReplayError | None:
        """The named error of the first mode that refused the step."""
        errors = (run.refusal.error for run in self.runs.values() if run.refusal is not None)
        return next((error for error in errors if isinstance(error, ReplayError)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "verdict": self.verdict.value,
            "records": [record.to_dict() for record in self.records],
            "modes": [run.to_dict() for run in self.runs.values()],
        }

    def to_json(self) -> str:
        """Return it as JSON."""
        return to_json(self.to_dict())

    def to_text(self) -> str:
        """Return a line per mode and per record."""
        lines = [spell_run(run, self.runs["eager"].seconds_per_step()) for run in self.runs.values()]
        lines += [f"{record.outcome.value:<12} {record.name}: {record.summary}" for record in self.records]
        return "\n".join([*lines, f"verdict: {self.verdict.value}"]) + "\n"


@checked(before_step=FUNCTION, modes=TEXTS, **dict.fromkeys(("steps", "seed", "every"), WHOLE))
def compare_modes(
    factory: Factory,
    batches: Batches,
    modes: Sequence[str] = MODES,
    *,
    steps: int | None = None,
    seed: int = 0,
    every: int = 1,
    before_step: Between | None = None,
) -> Equivalence:
    """Run a training step in several modes, and compare all state bit for bit: the verdict, without raising it.

    Args:
        factory: returns a fresh instance for each mode: a TrainStep, a Trainer (its settings are kept, its mode is set), a tuple
            (model, loss_fn, optimizer), or a Subject, which says besides what happens between steps.
        batches: of the steps; or a function of the step's number. What an iterator or a loader gives is kept: every mode takes the same.
        modes: of eager, capture and replay; eager is what the others are held against and runs in any case.
        steps: how many; by default one per batch, if their number is known. With more, batches come again from the first.
        seed: every generator starts from it before each call of `factory`.
        every: state is compared after every so manieth step, and after the last.
        before_step: called before each step with its number and the trainer.

    Returns:
        Records, runs and first differences.

    Raises:
        UserInputError: a setting out of range, or eager itself fails.
    """
    plot = _checked(factory, batches, modes, steps, seed, every, before_step)
    eager = _eager(plot, every)
    runs = {"eager": eager}
    again = _eager(plot, every)
    odd = _first_odd(eager, again)
    records = [judge_eager(odd)]
    if odd is not None:
        return Equivalence((*records, *(CLAIMS[mode].skipped("eager does not repeat itself") for mode in modes if mode != "eager")), runs)
    differences: dict[str, FirstDifference] = {}
    for mode in dict.fromkeys(mode for mode in modes if mode != "eager"):
        runs[mode] = run = run_mode(plot, mode, every)
        differing = _first_odd(eager, run)
        if differing is not None:
            number, names = differing
            differences[mode] = explain(plot, mode, number, run.actions[number], names)
        records.append(judge_mode(run, differences.get(mode), plot))
    records.append(judge_vacuity(runs))
    return Equivalence(tuple(records), runs, differences)


def assert_equivalent(
    factory: Factory,
    batches: Batches,
    modes: Sequence[str] = MODES,
    *,
    steps: int | None = None,
    seed: int = 0,
    every: int = 1,
    before_step: Between | None = None,
) -> Equivalence:
    """Demand that a training step gives the same bits in every mode.

    Args:
        factory: as for `compare_modes`.
        batches: likewise.
        modes: likewise.
        steps: likewise.
        seed: likewise.
        every: likewise.
        before_step: likewise.

    Returns:
        What was compared.

    Raises:
        ContractViolation: a mode differs or refuses, or there was nothing to compare; an AssertionError, whose cause is the refusal.
        UserInputError: a setting out of range, or eager itself fails.
    """
    found = compare_modes(factory, batches, modes, steps=steps, seed=seed, every=every, before_step=before_step)
    if not found.passed:
        raise ContractViolation(f"the training step is not the same in every mode\n{found.to_text()}") from found.refusal
    return found


def _checked(
    factory: Factory, batches: Batches, modes: Sequence[str], steps: int | None, seed: int, every: int, before_step: Between | None
) -> Plot:
    if isinstance(factory, nn.Module | TrainStep) or not callable(factory):
        raise UserInputError(
            f"factory: a {type(factory).__name__} was given, and each mode needs an instance of its own; give a function that returns one"
        )
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not set(modes) - {"eager"}:
        raise UserInputError(f"modes={tuple(modes)}: give capture, replay or both, which are held against eager")
    if every < 1 or (steps is not None and steps < 1):
        raise UserInputError(f"steps={steps}, every={every}: both must be at least 1")
    if not 0 <= seed < _SEEDS:
        raise UserInputError(f"seed: {seed} is none that every generator takes; give 0 to {_SEEDS - 1}")
    kept = _kept(batches, steps)
    if not callable(kept) and not len(kept):
        raise UserInputError("batches: there is none; give at least one, and two different ones to prove anything")
    num_steps = steps if steps is not None else 0 if callable(kept) else len(kept)
    return Plot(factory, kept, num_steps, seed, before_step)


def _kept(batches: Batches, steps: int | None) -> Sequence[Any] | Callable[[int], Any]:
    """Give batches that every mode can take anew: a function, a sequence, or a list of what anything else gives for so many steps."""
    kind = type(batches).__name__
    is_many = isinstance(batches, Iterable) or (hasattr(batches, "__len__") and hasattr(batches, "__getitem__"))
    if not callable(batches) and (not is_many or isinstance(batches, str | bytes | Mapping) or getattr(batches, "ndim", 1) == 0):
        raise UserInputError(f"batches: a {kind} was given, which is no row of batches; give a list of them, or a function of the number")
    try:
        has_length = len(batches) >= 0  # type: ignore[arg-type]
    except TypeError:  # a function, an iterator, a loader over a stream
        has_length = False
    if steps is None and not has_length:
        raise UserInputError(f"batches: a {kind} has no length; give steps=..., for example 12")
    if callable(batches) or (has_length and hasattr(batches, "__getitem__")):
        return batches  # type: ignore[return-value]
    return list(islice(batches, steps))


def _eager(plot: Plot, every: int) -> ModeRun:
    run = run_mode(plot, "eager", every)
    if run.refusal is not None:
        raise UserInputError(f"the eager step itself fails at {run.refusal}; make it run eagerly first") from run.refusal.error
    return run


def _first_odd(eager: ModeRun, other: ModeRun) -> tuple[int, list[str]] | None:
    for number, digests in other.digests.items():
        names = differing_names(eager.digests[number], digests)
        if names:
            return number, names
    return None
