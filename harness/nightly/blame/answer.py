"""What a search found: as text for people, as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness.nightly.blame.repository import Commit, Mark
from harness.nightly.judging.shifts import LEAST_EFFECT
from harness.reporting.verdict import EXIT_CODES, Verdict

if TYPE_CHECKING:
    from harness.bisect.report import BisectReport
    from harness.nightly.blame.deciding import Effect


@dataclass(frozen=True)
class Step:
    """What was seen of a commit.

    Attributes:
        commit: it.
        mark: what it is like; `skip` where it could not be measured, or not told.
        effect: against the good commit; None where the outcome of a cell is searched for, or nothing was measured.
        note: in a line.
    """

    commit: Commit
    mark: Mark
    effect: Effect | None
    note: str

    def __str__(self) -> str:
        """A line."""
        effect = f"{self.effect}  " if self.effect is not None else ""
        return f"{self.mark:<5} {self.commit.revision[:12]}  {effect}{self.note}"


@dataclass(frozen=True)
class BlameReport:
    """What was found.

    Attributes:
        metric: name of the metric, or of the cell.
        steps: what was measured, in order: the good commit, the bad one, then those between.
        first_bad: the commit that made it worse; several where they could not be told apart; none where
            the bad commit is not worse here.
        layers: the search among the layers of the checkpoints on both sides of it; None where the metric is none of a checkpoint.
    """

    metric: str
    steps: tuple[Step, ...]
    first_bad: tuple[Commit, ...]
    layers: BisectReport | None = None

    @property
    def verdict(self) -> Verdict:
        """REGRESSION where one commit was found; PASS where the bad one is as good here, within what counts as a change."""
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
            "layers": self.layers.to_dict() if self.layers is not None else None,
        }

    def to_text(self) -> str:
        """Return lines for people."""
        lines = [f"metric      {self.metric}", *map(str, self.steps), *self._found_lines()]
        return "\n".join(lines) + "\n" + (f"\n{self.layers.to_text()}" if self.layers is not None else "")

    def _found_lines(self) -> list[str]:
        if not self.first_bad:
            good, bad = (step.commit.revision[:12] for step in self.steps[:2])
            return [f"answer      {bad} is not worse than {good} when both run here; name other commits, or run where it was"]
        if len(self.first_bad) == 1:
            return [f"answer      {self.first_bad[0]}"]
        return [f"answer      one of {len(self.first_bad)} commits that could not be told apart:", *(f"  {one}" for one in self.first_bad)]
