"""The search: both ends are measured anew on this machine, then what git checks out between them, until one commit is left.

The history says between which commits to search. What was measured lies in files and is not measured again, so that a search that was
interrupted goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from compressor.errors import UserInputError
from compressor.progress import Progress, SilentProgress, Task
from harness.errors import HarnessError
from harness.nightly.blame.answer import BlameReport, Step
from harness.nightly.blame.deciding import LEAST_ROUNDS, decide, effect_of, is_reproduced
from harness.nightly.blame.measuring import CellMeasure, Measure, Reading
from harness.nightly.blame.outcomes import Outcomes
from harness.nightly.blame.repository import Bisection, Commit, Repository
from harness.nightly.cells import CellOutcome
from harness.nightly.history import History
from harness.nightly.judging.bridging import level
from harness.nightly.judging.judge import judge
from harness.nightly.judging.paired import NO_LOSS
from harness.nightly.judging.shifts import LEAST_AFTER
from harness.nightly.measurement import Better, Measurement
from harness.nightly.process import alone_in


class Search:
    """One metric, one good and one bad commit."""

    def __init__(self, measure: Measure, repository: Repository, folder: Path, good: Commit, bad: Commit, *, max_rounds: int) -> None:
        """Take what is searched.

        Args:
            measure: the metric.
            repository: where.
            folder: for working trees.
            good: a commit that is as it should be.
            bad: one that is worse.
            max_rounds: runs of one commit, each beside one of the good commit, after which it counts as one that cannot be told; of a
                cell, runs of each commit that the answer rests on.
        """
        self._measure, self._repository, self._folder, self._max_rounds = measure, repository, folder, max_rounds
        self._good, self._bad = good, bad
        self._rounds: dict[str, list[float]] = {}
        self._outcomes = Outcomes(measure, repository, folder, good, bad, max_runs=max_rounds) if measure.is_outcome else None

    def run(self, progress: Progress | None = None) -> BlameReport:
        """Search.

        Args:
            progress: shows a bar.

        Returns:
            What was found, without the layers.

        Raises:
            HarnessError: an end cannot be measured, or git cannot search between them.
        """
        between = self._repository.num_between(self._good.revision, self._bad.revision)
        with ExitStack() as stack, (progress or SilentProgress()).task("commits", 2 + math.ceil(math.log2(max(1, between)))) as bar:
            stack.enter_context(alone_in(self._folder, "name another --output-dir"))
            steps = self._ends(bar) if self._outcomes is None else self._ends_by_outcome(self._outcomes, bar)
            if steps[-1].mark != "bad":
                return BlameReport(self._measure.metric, tuple(steps), ())
            empty = stack.enter_context(self._repository.tree(self._bad.revision, self._folder / "bisect", with_files=False))
            search = Bisection(empty, self._good.revision, self._bad.revision)
            while not search.first_bad:
                commit = self._repository.commit(search.revision, "git bisect")
                steps.append(self._look(commit, bar))
                search.mark(steps[-1].mark)
            found = tuple(self._repository.commit(revision, "git bisect") for revision in search.first_bad)
            if self._outcomes is not None and len(found) == 1:
                bar.advance(0, note=f"{found[0].revision[:12]}: runs again")
                found, steps = self._outcomes.confirmed(found[0], steps)
            return BlameReport(self._measure.metric, tuple(steps), found)

    def _ends(self, bar: Task) -> list[Step]:
        with self._trees(self._bad):
            reading = self._measure.run(self._good.revision, self._good_tree, _name(self._bad, 1))
            if reading.measurement is None:
                raise self._no_good_end(reading.outcome, reading.note)
            bar.advance(note=f"{self._good.revision[:12]}: {reading.note}")
            bad = self._judge_number(self._bad, is_end=True)
        if bad.mark == "skip":
            raise HarnessError(f"{self._bad.revision[:12]}: the bad commit cannot be held against the good one: {bad.note}; name another")
        bar.advance(note=f"{self._bad.revision[:12]}: {bad.mark}")
        return [Step(self._good, "good", None, reading.note), bad]

    def _ends_by_outcome(self, outcomes: Outcomes, bar: Task) -> list[Step]:
        """The good commit, and the bad one where the cell passes at the good one every time."""
        good = outcomes.look(self._good)
        if good.outcomes[0] is not CellOutcome.PASS and not good.is_mixed:
            raise self._no_good_end(good.outcomes[0], good.note)
        bar.advance(note=f"{self._good.revision[:12]}: {good.note}")
        return [good, self._look(self._bad, bar)] if not good.is_mixed else [good]

    def _no_good_end(self, outcome: CellOutcome, note: str) -> HarnessError:
        return HarnessError(f"{self._good.revision[:12]}: the good commit gives {outcome} here: {note}; mend that, or name another")

    @contextmanager
    def _trees(self, commit: Commit) -> Iterator[None]:
        """A new tree of the commit and one of the good one: what one commit builds or writes decides no other, and both begin alike."""
        own, good = ((one.revision, self._folder / name) for one, name in ((commit, "tree"), (self._good, "good-tree")))
        with self._repository.tree(*own) as self._tree, self._repository.tree(*good) as self._good_tree:
            yield

    def _look(self, commit: Commit, bar: Task) -> Step:
        if self._outcomes is not None:
            step = self._outcomes.look(commit)
        else:
            with self._trees(commit):
                step = self._judge_number(commit)
        bar.advance(note=f"{commit.revision[:12]}: {step.mark}")
        return step

    def _judge_number(self, commit: Commit, *, is_end: bool = False) -> Step:
        """Run rounds until they tell; the bad commit's own also say how much rounds differ."""
        differences = self._rounds.setdefault(commit.revision, [])
        better: Better = "lower"
        least, mark, note = (LEAST_ROUNDS + 1 if is_end else 2), "skip", ""
        while len(differences) < self._max_rounds:
            ours, theirs = self._round(commit, len(differences) + 1)
            note = ours.note
            if ours.measurement is None or theirs.measurement is None:
                return self._pass_over(commit, ours.note if ours.measurement is None else f"the good commit: {theirs.note}")
            if unlike := _unlike(ours.measurement, theirs.measurement):
                return self._pass_over(commit, unlike)
            differences.append(_level(ours.measurement) - _level(theirs.measurement))
            better = ours.measurement.better
            is_settled = ours.measurement.kind == "paired"  # the same sequences: another round gives the same
            if len(differences) < least and not is_settled:
                continue
            if is_end:
                mark = "bad" if is_reproduced(commit.revision, self._rounds) else "good"
            else:
                mark = decide(commit.revision, self._bad.revision, self._rounds)
            if is_settled or mark == "bad" or (mark == "good" and not is_end):
                break
        return Step(commit, mark, effect_of(commit.revision, self._rounds, better), note)  # type: ignore[arg-type]

    def _pass_over(self, commit: Commit, note: str) -> Step:
        del self._rounds[commit.revision]  # which count in the noise of all
        return Step(commit, "skip", None, note)

    def _round(self, commit: Commit, number: int) -> tuple[Reading, Reading]:
        """The commit and the good one, back to back; which is first takes turns."""
        name = _name(commit, number)
        runs = [(commit.revision, self._tree, str(number)), (self._good.revision, self._good_tree, name)]
        if number % 2:
            return tuple(self._measure.run(*one) for one in runs)  # type: ignore[return-value]
        theirs, ours = (self._measure.run(*one) for one in reversed(runs))
        return ours, theirs


def _name(commit: Commit, number: int) -> str:
    """Of the good commit's run in a round of another one."""
    return f"{commit.revision[:12]}-{number}"


def _unlike(ours: Measurement, theirs: Measurement) -> str:
    """Why two measurements are none of one metric, in words; empty where they are."""
    facts = ["kind", "better"] + (["environment"] if ours.kind == "series" else [])  # sequences are the same everywhere
    given = [(name, getattr(ours, name), getattr(theirs, name)) for name in facts]
    if ours.kind == theirs.kind == "paired":
        given.append(("number of sequences", len(ours.values), len(theirs.values)))
    return next((f"its {name} is {own}, the good commit's {other}" for name, own, other in given if own != other), "")


def _level(measured: Measurement) -> float:
    """As the nights have it; of paired values the mean, which is what is judged there."""
    if measured.kind == "series":
        return level(measured.values, measured.better)
    mean = math.log(float(np.mean(measured.values)) or NO_LOSS)
    return mean if measured.better == "lower" else -mean


# Between which commits to search: what the history says of a metric, or of a cell.


def find_ends(
    repository: Repository, metric: str, history: History | None, good: str | None = None, bad: str | None = None
) -> tuple[Commit, Commit]:
    """Find the commits to search between.

    Args:
        repository: that has them.
        metric: its name, or that of a cell.
        history: with its nights; None where both ends are given.
        good: a commit that is as it should be, as git takes it; by default one of some nights before the change.
        bad: one that is worse; by default one of some nights after.

    Returns:
        The good commit and the bad one.

    Raises:
        UserInputError: the history shows no change, or names no commits; or a name that was given is none.
    """
    if good is None or bad is None:
        found = _of_history(metric, history) if history is not None else ("", "")
    ends = (
        repository.commit(good, "--good") if good is not None else _noted(repository, found[0], "--good"),
        repository.commit(bad, "--bad") if bad is not None else _noted(repository, found[1], "--bad"),
    )
    if ends[0] == ends[1]:
        raise UserInputError(f"{metric}: both ends are commit {ends[0].revision[:12]}; what changed is no commit, or name --good and --bad")
    return ends


def _noted(repository: Repository, revision: str, flag: str) -> Commit:
    if not revision or revision.endswith("-dirty"):
        told = f"at {revision}, with changes that no commit holds" if revision else "at an unknown commit"
        raise UserInputError(f"{flag}: that night ran {told}; name one")
    return repository.commit(revision, f"{flag}, from the history")


def _of_history(metric: str, history: History) -> tuple[str, str]:
    """Revisions on both sides of a change; a change is placed to within a night or two, so they lie that far from it."""
    outcomes = [(row.revision, CellOutcome(row.outcome) is CellOutcome.PASS) for row in history.cells() if row.cell == metric]
    series = history.series(metric)
    if outcomes:
        return _of_outcomes(metric, outcomes)
    if not series:
        raise UserInputError(f"{metric}: {history.path} knows no metric or cell of that name; name --good and --bad")
    judgement = judge(series, history.acceptances(metric))
    change = next((change for change in judgement.changes if change.acceptance is None), None)
    if change is None:
        raise UserInputError(f"{metric}: no change to blame anybody for: {judgement.summary}; name --good and --bad")
    nights = [one for one in series if one.kind == "paired" or one.environment == series[-1].environment]
    place = next(index for index, one in enumerate(nights) if one.night == change.night)
    return nights[max(0, place - LEAST_AFTER)].revision, nights[min(len(nights) - 1, place + LEAST_AFTER - 1)].revision


def _of_outcomes(metric: str, outcomes: Sequence[tuple[str, bool]]) -> tuple[str, str]:
    if outcomes[-1][1]:
        raise UserInputError(f"{metric}: passed when it last ran; name --good and --bad")
    passed = [place for place, (_, is_pass) in enumerate(outcomes) if is_pass]
    if not passed:
        raise UserInputError(f"{metric}: never passed in this history; name --good, where it did")
    return outcomes[passed[-1]][0], outcomes[passed[-1] + 1][0]


# From the commit to the layer: the checkpoints on both sides of it are held against each other, as `harness bisect` does.


def with_layers(report: BlameReport, measure: CellMeasure, progress: Progress) -> BlameReport:
    """Add the search among layers to a report that names a commit.

    Args:
        report: of the search among commits.
        measure: that it used; its checkpoints are still there.
        progress: shows bars.

    Returns:
        The report; as it was where no commit was found, or the metric says nothing of a checkpoint.
    """
    if len(report.first_bad) != 1 or measure.judged_on is None:
        return report
    from harness.bisect import bisect

    data, device = measure.judged_on
    good, bad = (measure.checkpoint(revision) for revision in (report.steps[0].commit.revision, report.first_bad[0].revision))
    return replace(report, layers=bisect(good, bad, data, device=device, progress=progress))
