"""Every planted bug of the lifecycle against every check and machine: who kills whom.

The checks look at two well-behaved modifiers, one of a calibration and one of a training; the machines drive probes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from harness.lifecycle.checks.registry import CHECKS
from harness.lifecycle.driving.callback_recorder import PlannedInterrupt
from harness.lifecycle.driving.compare import describe
from harness.lifecycle.driving.probes import CalibratingWorker, TinyModel, TrainingWorker, tiny_batches
from harness.lifecycle.driving.time_limit import Stopwatch, TimeLimitError, run_limited
from harness.lifecycle.machines.machine_subjects import drive_modifier, drive_session, probe_stage
from harness.lifecycle.machines.modifier_machine import SoloStage
from harness.lifecycle.subject import Subject
from harness.lifecycle.template import read_tags
from harness.lifecycle.verify import chosen_checks
from harness.mutants.family import Family, Killer
from harness.mutants.patches import Mutant
from harness.profiles import PROFILES
from harness.reporting.verdict import Outcome
from tests.mutation.lifecycle.hooks_and_state import HOOK_MUTANTS, RECIPE_MUTANTS, STATE_MUTANTS
from tests.mutation.lifecycle.modifier import MODIFIER_MUTANTS
from tests.mutation.lifecycle.session import SESSION_MUTANTS

MACHINES = ("machine.modifier", "machine.session")
# Fixed draws, so that a survivor survives every time.
PROFILE = PROFILES["pr"]
# Of the profile's runs: most bugs fall in the first few, and only what is left is worth a long look.
SHARES = (0.05, 0.25, 1.0, 2.0)
# Checks that fail at every callback of a life cost more than all others together, and so come after them.
_SLOW = ("lifecycle.nothing_left", "lifecycle.rolls_back")


def killers(mutant: Mutant | None) -> list[Killer]:
    """Return every check, the cheapest first, then the machines, each with more and more runs.

    Args:
        mutant: the bug that will be planted; a recipe is nothing that a machine could see. None for the control, which needs no early end.

    Returns:
        Those who look.
    """
    names = [check.name for check in chosen_checks(None) if check.name != "lifecycle.state_machine"]
    checks = [Killer(name, partial(_check, name)) for name in sorted(names, key=lambda name: name in _SLOW)]
    if mutant is not None and mutant.kind == "recipe":
        return checks
    shares = SHARES if mutant else (1.0,)
    return checks + [Killer(name, partial(_machine, name, share), is_machine=True) for share in shares for name in MACHINES]


def subjects() -> list[Subject]:
    """Return the well-behaved modifiers that the checks look at."""
    workers = (CalibratingWorker(), TrainingWorker(start=1.0, end=3.0, update=2.0))
    return [Subject(worker, TinyModel(8), tiny_batches(1), read_tags(worker, ()), is_tiny=False) for worker in workers]


def _check(name: str) -> str | None:
    for subject in subjects():
        try:
            record = run_limited(partial(CHECKS[name].run, subject), subject.stopwatch)
        except TimeLimitError as error:
            return describe(error)
        if record.outcome is Outcome.FAIL:
            return record.summary
    return None


def _machine(name: str, share: float) -> str | None:
    drive, stopwatch = _driver(name, share)
    try:
        run_limited(drive, stopwatch)
    except (Exception, PlannedInterrupt, TimeLimitError) as error:  # noqa: BLE001 - whatever a planted bug makes of a run, it was seen
        return describe(error)
    return None


def _driver(name: str, share: float) -> tuple[Callable[[], int], Stopwatch]:
    if name == "machine.modifier":
        solo = SoloStage()
        return partial(drive_modifier, PROFILE, share, shrink=False, stage=solo), solo.stopwatch
    stage = probe_stage()
    return partial(drive_session, stage, PROFILE, share, shrink=False), stage.stopwatch


FAMILY = Family(
    "lifecycle",
    {mutant.name: mutant for mutant in (*MODIFIER_MUTANTS, *SESSION_MUTANTS, *HOOK_MUTANTS, *STATE_MUTANTS, *RECIPE_MUTANTS)},
    killers,
)
