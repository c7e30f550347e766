"""A cell that fails by chance blames no commit: what an answer rests on is run again, and said with how often it ended how."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.cli import main
from harness.errors import HarnessError
from harness.nightly.blame.answer import BlameReport
from harness.nightly.blame.measuring import Reading
from harness.nightly.blame.repository import Repository
from harness.nightly.blame.search import Search
from harness.nightly.cells import CellOutcome
from harness.nightly.environment import Environment
from harness.nightly.history import History
from harness.nightly.measurement import CellRow
from harness.reporting.verdict import Verdict
from tests.harness.nightly.blame.test_blame import commit, git

PASS, FAIL, TIMEOUT, ERROR = CellOutcome.PASS, CellOutcome.REGRESSION, CellOutcome.TIMEOUT, CellOutcome.ERROR


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A repository of four commits; the last two are bad."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q")
    return folder, [commit(folder, f"change {number}", state="good" if number < 2 else "bad") for number in range(4)]


@dataclass
class Chancy:
    """Passes where the tree is good; commits that are named end in turn as is said. What a run leaves in its tree spoils the next."""

    turns: dict[str, list[CellOutcome]] = field(default_factory=dict)
    metric: str = "probe"
    is_outcome: bool = True
    runs: list[str] = field(default_factory=list)
    names: set[tuple[str, str]] = field(default_factory=set)

    def run(self, revision: str, tree: Path, name: str) -> Reading:
        self.runs.append(revision)
        self.names.add((revision, name))
        state = (tree / "state").read_text()
        (tree / "state").write_text("spoiled")
        plain = {"good": PASS, "bad": FAIL}.get(state, ERROR)
        turns = self.turns.get(revision, [plain])
        return Reading(None, turns[min(self.runs.count(revision), len(turns)) - 1], "ended")


def search(place: tuple[Path, list[str]], turns: dict[int, list[CellOutcome]], *, rounds: int = 4) -> tuple[BlameReport, list[int]]:
    """The report, and how often each commit ran."""
    repository, commits = Repository(place[0]), place[1]
    measure = Chancy({commits[number]: outcomes for number, outcomes in turns.items()})
    ends = (repository.commit(commits[number], "test") for number in (0, 3))
    with tempfile.TemporaryDirectory() as folder:
        found = Search(measure, repository, Path(folder), *ends, max_rounds=rounds).run()
    counts = Counter(measure.runs)
    assert len(measure.names) == len(measure.runs)  # each run under a name of its own, or what one left would be read again
    return found, [counts[revision] for revision in commits]


@pytest.mark.parametrize(("rounds", "runs"), [(4, 4), (1, 2)])
def test_what_is_named_and_what_it_was_told_apart_from_ran_as_often_as_was_asked(
    place: tuple[Path, list[str]], rounds: int, runs: int
) -> None:
    found, counts = search(place, {}, rounds=rounds)
    assert [one.revision for one in found.first_bad] == [place[1][2]] and found.verdict is Verdict.REGRESSION
    assert counts == [1, runs, runs, 1]
    assert f"bad   {place[1][2][:12]}  regression in {runs} of {runs} runs: ended" in found.to_text()


@pytest.mark.parametrize(
    ("turns", "runs", "told"),
    [
        ({2: [FAIL, FAIL, PASS]}, (2, 3), "regression in 2 and pass in 1 of 3 runs"),
        ({2: [FAIL, TIMEOUT]}, (2, 2), "regression in 1 and timeout in 1 of 2 runs"),
        ({1: [PASS, FAIL]}, (1, 2), "pass in 1 and regression in 1 of 2 runs"),
        ({3: [PASS, PASS, FAIL]}, (3, 3), "pass in 2 and regression in 1 of 3 runs"),
        ({0: [FAIL, PASS]}, (0, 2), "regression in 1 and pass in 1 of 2 runs"),
    ],
    ids=["named", "named_otherwise", "before", "bad_end", "good_end"],
)
def test_a_cell_that_fails_by_chance_blames_no_commit(
    place: tuple[Path, list[str]], turns: dict[int, list[CellOutcome]], runs: tuple[int, int], told: str
) -> None:
    found, counts = search(place, turns)
    where = place[1][runs[0]]
    assert (found.first_bad, found.verdict, found.exit_code) == ((), Verdict.INCONCLUSIVE, 2)
    assert counts[runs[0]] == runs[1] and found.to_dict()["by_chance"] == {where: told}
    assert next(step for step in found.steps if step.commit.revision == where).mark == "skip"
    assert "answer      no commit: the cell ends by chance" in found.to_text() and f"  {where[:12]}: {told}\n  mend" in found.to_text()


def test_a_bad_commit_is_as_good_here_where_it_passes_every_time(place: tuple[Path, list[str]]) -> None:
    found, counts = search(place, {3: [PASS]})
    assert found.verdict is Verdict.PASS and counts == [1, 0, 0, 4]


@pytest.mark.parametrize(("outcome", "runs"), [(FAIL, 4), (ERROR, 1)])
def test_a_good_commit_that_fails_every_time_is_none_and_one_without_a_verdict_at_once(
    place: tuple[Path, list[str]], outcome: CellOutcome, runs: int
) -> None:
    turns = [outcome] * runs + [PASS]  # so that another run would be seen
    with pytest.raises(HarnessError, match=f"the good commit gives {outcome} here: ended; mend that, or name another"):
        search(place, {0: turns})


def test_a_merge_is_told_apart_by_what_was_good_on_each_side(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    base = commit(tmp_path, "base", a="0")
    git(tmp_path, "checkout", "-qb", "side")
    side, later = commit(tmp_path, "side", b="1"), commit(tmp_path, "later", b="2")
    git(tmp_path, "checkout", "-q", "main")
    main_line = commit(tmp_path, "main", c="1")
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "merge", side)
    merge, repository = git(tmp_path, "rev-parse", "HEAD"), Repository(tmp_path)
    assert repository.told_apart_by(merge, [base, main_line, side]) == [main_line, side]
    assert repository.told_apart_by(merge, [base, main_line, later]) == [main_line, later]  # side was good because later is
    assert repository.told_apart_by(merge, [later, main_line, side]) == [main_line, side]  # the last one asked is the nearest
    assert repository.told_apart_by(later, [base, side, main_line]) == [side]
    assert repository.told_apart_by(base, [side]) == []
    git(tmp_path, "checkout", "-q", "--orphan", "other")
    assert repository.told_apart_by(side, [base, commit(tmp_path, "of no common commit")]) == [base]


def test_a_cell_in_quarantine_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tmp_path, "init", "-q")
    config = json.dumps({"models": {"m": "."}, "checks": [], "commands": {"lint": "python lint.py"}})
    commits = [commit(tmp_path, f"{code}", **{"lint.py": f"raise SystemExit({code})", "n.yaml": config}) for code in (0, 1)]
    history, environment = History(tmp_path / "h.sqlite"), Environment({"device": "cpu"})
    for night, (revision, outcome) in enumerate([(commits[0], "pass"), (commits[0], "error"), (commits[1], "pass"), (commits[1], "error")]):
        row = CellRow(str(night), environment.digest, revision, "lint", 1, outcome, 1.0, 1, "")
        history.add_cell(row, [], environment=environment)
    asked = ["nightly", "blame", "lint", "--config", str(tmp_path / "n.yaml"), "--history", str(tmp_path / "h.sqlite"), "--quiet"]
    assert main([*asked, "--good", commits[0], "--bad", commits[1], "--rounds", "2"]) == 1
    text = capsys.readouterr().out
    assert "quarantine  passes and fails at the same revision in 2 of 2 that were tried twice" in text
    assert f"answer      {commits[1][:12]}" in text
