"""What a search found: as text for people, as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness.nightly.blame.repository import Commit, Mark
from harness.nightly.judging.shifts import LEAST_EFFECT
from harness.reporting.verdict import EXIT_CODES, Verdict

if TYPE_CHECKING:
    from harness.bisect.report import BisectReport
    from harness.nightly.blame.deciding import Effect
    from harness.nightly.cells import CellOutcome


@dataclass(frozen=True)
class Step:
    """What was seen of a commit.

    Attributes:
        commit: it.
        mark: what it is like; `skip` where it could not be measured, or not told.
        effect: against the good commit; None where the outcome of a cell is searched for, or nothing was measured.
        note: in a line.
        outcomes: of a cell, what each of its runs ended in.
    """

    commit: Commit
    mark: Mark
    effect: Effect | None
    note: str
    outcomes: tuple[CellOutcome, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """Whether runs of this one commit ended in several ways."""
        return len(set(self.outcomes)) > 1

    @property
    def runs(self) -> str:
        """How often the cell ended how, in words."""
        counts = " and ".join(f"{outcome} in {count}" for outcome, count in Counter(self.outcomes).items())
        return f"{counts} of {len(self.outcomes)} runs"

    def __str__(self) -> str:
        """A line."""
        effect = f"{self.effect}  " if self.effect is not None else ""
        runs = f"{self.runs}: " if len(self.outcomes) > 1 else ""
        return f"{self.mark:<5} {self.commit.revision[:12]}  {effect}{runs}{self.note}"


@dataclass(frozen=True)
class BlameReport:
    """What was found.

    Attributes:
        metric: name of the metric, or of the cell.
        steps: what was measured, in order: the good commit, the bad one, then those between.
        first_bad: the commit that made it worse; several where they could not be told apart; none where
            the bad commit is not worse here, or where the cell fails by chance.
        layers: the search among the layers of the checkpoints on both sides of it; None where the metric is none of a checkpoint.
        quarantine: the evidence by which the nights have the cell in quarantine; None where they have not.
    """

    metric: str
    steps: tuple[Step, ...]
    first_bad: tuple[Commit, ...]
    layers: BisectReport | None = None
    quarantine: str | None = None

    @property
    def by_chance(self) -> tuple[Step, ...]:
        """The commits at which the cell ended in several ways."""
        return tuple(step for step in self.steps if step.is_mixed)

    @property
    def verdict(self) -> Verdict:
        """REGRESSION where one commit was found; PASS where the bad one is as good here, within what counts as a change."""
        if self.by_chance:
            return Verdict.INCONCLUSIVE
        if self.first_bad:
            return Verdict.REGRESSION if len(self.first_bad) == 1 else Verdict.INCONCLUSIVE
        end = self.steps[-1]
        is_equal = end.mark == "good" and (end.effect is None or end.effect.high < LEAST_EFFECT)
        return Verdict.PASS if is_equal else Verdict.INCONCLUSIVE

    @property
    def exit_code(self) -> int:
        """Of the command line."""
        return EXIT_CODES[self.verdict]

    @property
    def effects(self) -> Mapping[str, Effect]:
        """Revision to effect, where it was measured."""
        return {step.commit.revision: step.effect for step in self.steps if step.effect is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "metric": self.metric,
            "verdict": self.verdict.value,
            "first_bad": [asdict(commit) for commit in self.first_bad],
            "steps": [asdict(step) for step in self.steps],
            "by_chance": {step.commit.revision: step.runs for step in self.by_chance},
            "quarantine": self.quarantine,
            "layers": self.layers.to_dict() if self.layers is not None else None,
        }

    def to_text(self) -> str:
        """Return lines for people."""
        quarantine = [f"quarantine  {self.quarantine}"] if self.quarantine else []
        lines = [f"metric      {self.metric}", *quarantine, *map(str, self.steps), *self._found_lines()]
        return "\n".join(lines) + "\n" + (f"\n{self.layers.to_text()}" if self.layers is not None else "")

    def _found_lines(self) -> list[str]:
        if self.by_chance:
            seen = [f"  {step.commit.revision[:12]}: {step.runs}" for step in self.by_chance]
            todo = "  mend the cell there and search again; at two such commits that nights run twice it goes into quarantine by itself"
            return ["answer      no commit: the cell ends by chance, in several ways with the same code", *seen, todo]
        if not self.first_bad:
            good, bad = (step.commit.revision[:12] for step in self.steps[:2])
            return [f"answer      {bad} is not worse than {good} when both run here; name other commits, or run where it was"]
        if len(self.first_bad) == 1:
            return [f"answer      {self.first_bad[0]}"]
        return [f"answer      one of {len(self.first_bad)} commits that could not be told apart:", *(f"  {one}" for one in self.first_bad)]
