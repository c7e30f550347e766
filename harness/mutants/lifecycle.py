"""Every planted bug of the lifecycle against every check and machine: who kills whom.

The checks look at two well-behaved modifiers, one of a calibration and one of a training; the machines drive probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from compressor.errors import UserInputError
from compressor.modifiers.registry import suggest
from harness.lifecycle.judge import describe
from harness.lifecycle.limits import TimeLimitError, run_limited
from harness.lifecycle.probes import CalibratingWorker, TinyModel, TrainingWorker, tiny_batches
from harness.lifecycle.stages import drive_modifier, drive_session, probe_stage
from harness.lifecycle.subject import Subject
from harness.lifecycle.template import read_tags
from harness.lifecycle.verify import chosen_checks
from harness.mutants.lifecycle_modifier import MODIFIER_MUTANTS
from harness.mutants.lifecycle_rest import HOOK_MUTANTS, RECIPE_MUTANTS, STATE_MUTANTS
from harness.mutants.lifecycle_session import SESSION_MUTANTS
from harness.mutants.patches import Mutant
from harness.profiles import PROFILES
from harness.verdict import Outcome

MUTANTS: Mapping[str, Mutant] = {
    mutant.name: mutant for mutant in (*MODIFIER_MUTANTS, *SESSION_MUTANTS, *HOOK_MUTANTS, *STATE_MUTANTS, *RECIPE_MUTANTS)
}
MACHINES = ("machine.modifier", "machine.session")
# Fixed draws, so that a survivor survives every time.
PROFILE = PROFILES["pr"]
TIME_LIMIT = 20.0

Killer = Callable[[], str | None]
"""Returns what it saw that is wrong, or None."""


@dataclass(frozen=True)
class Fate:
    """What became of one planted bug.

    Attributes:
        mutant: the bug.
        killed_by: what each check or machine that saw it says, by name.
    """

    mutant: Mutant
    killed_by: Mapping[str, str]

    @property
    def only_machines(self) -> bool:
        """No check sees it, and a state machine does."""
        return bool(self.killed_by) and self.killed_by.keys() <= set(MACHINES)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "name": self.mutant.name,
            "kind": self.mutant.kind,
            "wrong": self.mutant.wrong,
            "killed_by": dict(self.killed_by),
            "only_machines": self.only_machines,
        }


def killers(share: float = 1.0) -> dict[str, Killer]:
    """Return every check and machine by its name; each looks once and says what is wrong.

    Args:
        share: of the runs that a machine makes.

    Returns:
        Name to a function that returns what it found, or None.
    """
    checks: dict[str, Killer] = {
        check.name: partial(_check, check.name) for check in chosen_checks(None) if check.name != "lifecycle.state_machine"
    }
    return {
        **checks,
        "machine.modifier": partial(_machine, lambda: drive_modifier(PROFILE, share, shrink=False)),
        "machine.session": partial(_machine, lambda: drive_session(probe_stage(), PROFILE, share, shrink=False)),
    }


def fate_of(mutant: Mutant, names: Iterable[str] | None = None, share: float = 1.0) -> Fate:
    """Plant a bug, and let checks and machines look.

    Args:
        mutant: the bug; it is taken out again.
        names: of checks and machines; by default all. A recipe is nothing that a machine could see.
        share: of the runs that a machine makes.

    Returns:
        Who saw it.
    """
    table = killers(share)
    wanted = [name for name in (table if names is None else names) if not (mutant.kind == "recipe" and name in MACHINES)]
    killed_by = {}
    with mutant.planted():
        for name in wanted:
            seen = table[name]()
            if seen is not None:
                killed_by[name] = seen
    return Fate(mutant, killed_by)


def chosen_mutants(names: Iterable[str] | None) -> list[Mutant]:
    """Find planted bugs by their names.

    Args:
        names: of the bugs; None for all.

    Returns:
        The bugs, in the order of the names.

    Raises:
        UserInputError: a name that none has.
    """
    wanted = list(MUTANTS) if names is None else list(names)
    unknown = [name for name in wanted if name not in MUTANTS]
    if unknown:
        raise UserInputError(f"mutants: there is no planted bug {unknown[0]!r}; {suggest(unknown[0], MUTANTS)}")
    return [MUTANTS[name] for name in wanted]


def subjects() -> list[Subject]:
    """Return the well-behaved modifiers that the checks look at."""
    workers = (CalibratingWorker(), TrainingWorker(start=1.0, end=3.0, update=2.0))
    return [Subject(worker, TinyModel(8), tiny_batches(1), read_tags(worker, ()), is_tiny=False) for worker in workers]


def _check(name: str) -> str | None:
    (check,) = chosen_checks([name])
    for subject in subjects():
        try:
            record = run_limited(partial(check.run, subject), subject.stopwatch, TIME_LIMIT)
        except TimeLimitError as error:
            return describe(error)
        if record.outcome is Outcome.FAIL:
            return record.summary
    return None


def _machine(drive: Callable[[], object]) -> str | None:
    try:
        drive()
    except Exception as error:  # noqa: BLE001 - whatever a planted bug makes of a run, it was seen
        return describe(error)
    return None
