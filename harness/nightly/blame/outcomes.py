"""What a cell ends in at a commit. It may fail by chance, so the commits that an answer rests on are run again, each time in a new tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.nightly.blame.answer import Step
from harness.nightly.blame.measuring import Measure, Reading
from harness.nightly.blame.repository import Commit, Mark, Repository
from harness.nightly.cells import CellOutcome

_LEAST_RUNS = 2
"""One run shows nothing of chance."""


class Outcomes:
    """Of one cell, at the commits that a search asks for."""

    def __init__(self, measure: Measure, repository: Repository, folder: Path, good: Commit, bad: Commit, *, max_runs: int) -> None:
        """Nothing has run yet.

        Args:
            measure: the cell.
            repository: where.
            folder: for working trees.
            good: the good end of the search.
            bad: the bad one, whose outcome is searched for.
            max_runs: runs of each commit that an answer rests on.
        """
        self._measure, self._repository, self._folder = measure, repository, folder
        self._good, self._bad, self._max_runs = good, bad, max(_LEAST_RUNS, max_runs)
        self._readings: dict[str, list[Reading]] = defaultdict(list)

    def look(self, commit: Commit) -> Step:
        """Run a commit once; an end of the search that is not as it should be again and again.

        Args:
            commit: it.

        Returns:
            `bad` where it ends as the bad end did, `skip` where it ends in a third way, or in several.
        """
        self._run(commit)
        first = self._first(commit)
        # what ended without a verdict at the good end was tried again by the cell's own retries, and is an error of the search
        is_unlike = first is not CellOutcome.PASS and first.is_final if commit == self._good else first is CellOutcome.PASS
        if commit in (self._good, self._bad) and is_unlike:
            self._run_again([commit])
        return self._step(commit)

    def confirmed(self, found: Commit, steps: Sequence[Step]) -> tuple[tuple[Commit, ...], list[Step]]:
        """Run the commit that a search found again, in turns with those that it was told apart from.

        Args:
            found: the first bad one.
            steps: of the search.

        Returns:
            The commit, or nothing where one of them ends in several ways; and the steps, with these runs.
        """
        good = {step.commit.revision: step.commit for step in steps if step.mark == "good"}
        self._run_again([found, *(good[one] for one in self._repository.told_apart_by(found.revision, list(good)))])
        steps = [self._step(step.commit) for step in steps]
        return () if any(step.is_mixed for step in steps) else (found,), steps

    def _run_again(self, commits: Sequence[Commit]) -> None:
        """Until one of them has ended in several ways, which more runs would not undo."""
        for commit in list(commits) * (self._max_runs - 1):
            self._run(commit)
            if self._step(commit).is_mixed:
                return

    def _run(self, commit: Commit) -> None:
        found = self._readings[commit.revision]
        name = f"{self._bad.revision[:12]}-{len(found) + 1}" if commit == self._good else str(len(found) + 1)
        with self._repository.tree(commit.revision, self._folder / "tree") as tree:
            found.append(self._measure.run(commit.revision, tree, name))

    def _first(self, commit: Commit) -> CellOutcome:
        return self._readings[commit.revision][0].outcome

    def _step(self, commit: Commit) -> Step:
        readings = self._readings[commit.revision]
        marks: dict[CellOutcome, Mark] = {CellOutcome.PASS: "good"}
        if self._bad.revision in self._readings:
            marks = {self._first(self._bad): "bad", **marks}
        step = Step(commit, marks.get(self._first(commit), "skip"), None, readings[-1].note, tuple(one.outcome for one in readings))
        return replace(step, mark="skip") if step.is_mixed else step
