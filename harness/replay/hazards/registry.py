"""Hazards: what broke captured training steps elsewhere, each a small step of its own. The outcome is *equal or the named error, never
silent*, and which of the two stands in the table.

The tables are the files of `python_side` and `torch_side`, one per theme; a new hazard is a line there.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from compressor.errors import CompressorError, UserInputError
from compressor.spelling import suggest
from harness.errors import HarnessError
from harness.replay.equivalence.compare import MODES, Equivalence, compare_modes
from harness.replay.equivalence.first_difference import FirstDifference
from harness.replay.equivalence.run import Batches, Refusal, Subject
from harness.replay.hazards.building_blocks import vectors
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome, Verdict

# Each theme, and the module that holds its table.
THEMES: Mapping[str, str] = MappingProxyType(
    {
        "host": "harness.replay.hazards.python_side.host_reads",
        "randomness": "harness.replay.hazards.python_side.randomness",
        "escapes": "harness.replay.hazards.torch_side.escapes",
        "addresses": "harness.replay.hazards.torch_side.addresses",
        "facts": "harness.replay.hazards.python_side.host_facts",
        "python": "harness.replay.hazards.python_side.python_state",
        "settings": "harness.replay.hazards.python_side.settings",
        "control": "harness.replay.hazards.python_side.control_flow",
        "kernels": "harness.replay.hazards.torch_side.kernels",
        "autograd": "harness.replay.hazards.torch_side.autograd",
        "optimizers": "harness.replay.hazards.torch_side.optimizers",
        "batches": "harness.replay.hazards.torch_side.batches",
        "models": "harness.replay.hazards.torch_side.models",
        "modifiers": "harness.replay.hazards.torch_side.modifiers",
        "search": "harness.replay.hazards.python_side.guard_search",
        "audit": "harness.replay.hazards.python_side.audited",
    }
)


@dataclass(frozen=True)
class Hazard:
    """One thing that a captured step may get wrong.

    Attributes:
        name: short.
        what: what the step does, in a line.
        stage: makes a fresh step, and what happens between its steps.
        expected: the error that the replaying trainer refuses it with; None where the bits are equal.
        match: a piece of the error's message.
        source: where it bit others, as repository#issue or a document.
        batches: of the steps.
        steps: of a run.
        may_leave: names of state that the step itself has moved for good when it is refused.
        late: steps that may have been replayed wrongly before an audit refuses the next one.
    """

    name: str
    what: str
    stage: Callable[[], Subject]
    expected: type[CompressorError] | None = None
    match: str = ""
    source: str = ""
    batches: Batches = vectors
    steps: int = 8
    may_leave: tuple[str, ...] = ()
    late: int = 0


class HazardOutcome(StrEnum):
    """What became of a hazard; all but the first two are red."""

    EQUAL = "equal"
    REFUSED = "refused"
    SILENT = "SILENT"
    UNNAMED = "unnamed error"
    LEFT = "state changed"
    UNEXPECTED = "unexpected"
    VACUOUS = "vacuous"

    @property
    def verdict(self) -> Verdict:
        """What that means for who asked: the bits were equal, or the named error came; as the table says."""
        return Verdict.PASS if self in (HazardOutcome.EQUAL, HazardOutcome.REFUSED) else Verdict.REGRESSION


@dataclass(frozen=True)
class HazardResult:
    """What became of one hazard.

    Attributes:
        theme: of the hazard.
        hazard: the hazard.
        outcome: what was seen.
        detail: the error, or the first difference.
        seconds: it took.
    """

    theme: str
    hazard: Hazard
    outcome: HazardOutcome
    detail: str
    seconds: float

    @property
    def is_well(self) -> bool:
        """It is not red."""
        return self.outcome.verdict is Verdict.PASS

    def record(self) -> CheckRecord:
        """Return the record of this hazard."""
        expected = "equal" if self.hazard.expected is None else self.hazard.expected.__name__
        evidence = {"fate": self.outcome.value, "source": self.hazard.source}
        claim = Claim(f"hazards.{self.theme}.{self.hazard.name}", self.hazard.what)
        return claim.record(self.outcome.verdict.outcome, f"{self.outcome.value}: {self.detail}", limit=expected, evidence=evidence)


def all_hazards() -> dict[str, tuple[str, Hazard]]:
    """Import every table.

    Returns:
        Name to theme and hazard, in the order of the tables.

    Raises:
        HarnessError: two hazards have one name.
    """
    found: dict[str, tuple[str, Hazard]] = {}
    for theme, module in THEMES.items():
        table: tuple[Hazard, ...] = importlib.import_module(module).HAZARDS
        for hazard in table:
            if hazard.name in found:
                raise HarnessError(f"{module}: another hazard is called {hazard.name!r}; give it another name")
            found[hazard.name] = (theme, hazard)
    return found


def chosen_hazards(names: Iterable[str] | None) -> dict[str, tuple[str, Hazard]]:
    """Find hazards by name or theme.

    Args:
        names: of hazards or themes; None for all.

    Returns:
        The hazards.

    Raises:
        UserInputError: a name that none has.
    """
    known = all_hazards()
    if names is None:
        return known
    wanted = list(names)
    for name in wanted:
        if name not in known and name not in THEMES:
            raise UserInputError(f"hazards: there is no hazard {name!r}; {suggest(name, [*known, *THEMES])}")
    return {name: entry for name, entry in known.items() if name in wanted or entry[0] in wanted}


def run_hazard(theme: str, hazard: Hazard, seed: int = 0, modes: Sequence[str] = MODES) -> HazardResult:
    """Run one hazard.

    Args:
        theme: of the hazard.
        hazard: the hazard.
        seed: of every generator.
        modes: replay, and capture where there is time.

    Returns:
        What became of it.
    """
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():  # what torch warns of is what the hazard is about
            warnings.simplefilter("ignore")
            found = compare_modes(hazard.stage, hazard.batches, modes, steps=hazard.steps, seed=seed)
        outcome, detail = _judge(hazard, found)
    except CompressorError as error:
        outcome, detail = _judge_error(hazard, error)
    return HazardResult(theme, hazard, outcome, detail, time.perf_counter() - begin)


def _judge(hazard: Hazard, found: Equivalence) -> tuple[HazardOutcome, str]:
    if found.records[0].outcome is not Outcome.PASS:
        return HazardOutcome.VACUOUS, found.records[0].summary
    silent = [one for mode, one in found.differences.items() if _was_silent(found.runs[mode].refusal, one, hazard)]
    if silent:
        return HazardOutcome.SILENT, str(silent[0])
    for run in found.runs.values():
        if run.overwritten:
            return HazardOutcome.SILENT, f"{run.mode}: the loss that step {run.overwritten[0]} returned was overwritten by a later step"
        refusal = run.refusal
        if refusal is not None and not refusal.is_named:
            return HazardOutcome.UNNAMED, f"{run.mode}: {refusal}"
        left = [] if refusal is None else [name for name in refusal.changed if not name.startswith(hazard.may_leave or ("\0",))]
        if left:
            return HazardOutcome.LEFT, f"{run.mode}: {refusal} leaves {', '.join(left[:3])}"
    refusal = found.runs["replay"].refusal
    if refusal is not None:
        return _judge_error(hazard, refusal.error)
    if hazard.expected is not None:
        return HazardOutcome.UNEXPECTED, f"equal, but {hazard.expected.__name__} was expected"
    if found.records[-1].outcome is Outcome.INCONCLUSIVE:
        return HazardOutcome.VACUOUS, found.records[-1].summary
    return HazardOutcome.EQUAL, found.records[-2].summary


def _was_silent(refusal: Refusal | None, difference: FirstDifference, hazard: Hazard) -> bool:
    """Say whether more steps were wrong than an audit may take to find it."""
    return refusal is None or refusal.number > difference.step + hazard.late


def _judge_error(hazard: Hazard, error: Exception) -> tuple[HazardOutcome, str]:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if hazard.expected is None:
        return HazardOutcome.UNEXPECTED, f"{text}, but equal bits were expected"
    if type(error) is not hazard.expected or hazard.match not in text:
        return HazardOutcome.UNEXPECTED, f"{text}, but {hazard.expected.__name__} with {hazard.match!r} was expected"
    return HazardOutcome.REFUSED, text


def run_hazards(names: Iterable[str] | None = None, see: Callable[[HazardResult], Any] = lambda result: None) -> list[HazardResult]:
    """Run hazards.

    Args:
        names: of hazards or themes; None for all.
        see: called with each result as it comes.

    Returns:
        The results, in the order of the tables.
    """
    results = []
    for theme, hazard in chosen_hazards(names).values():
        results.append(run_hazard(theme, hazard))
        see(results[-1])
    return results
