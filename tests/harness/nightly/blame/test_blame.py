"""Blame finds the commit by the statistic of the nights, leaves the user's tree alone, goes on where it was, says what it cannot tell."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from compressor.errors import UserInputError
from harness.cli import main
from harness.errors import HarnessError
from harness.nightly.blame.answer import BlameReport
from harness.nightly.blame.deciding import decide, effect_of, is_reproduced
from harness.nightly.blame.measuring import CommandMeasure, Reading
from harness.nightly.blame.repository import Repository
from harness.nightly.blame.search import Search, find_ends
from harness.nightly.cells import CellOutcome
from harness.nightly.environment import Environment
from harness.nightly.history import History
from harness.nightly.measurement import CellRow, Kind, Measurement
from harness.reporting.verdict import Verdict

ENVIRONMENT = Environment({"device": "cpu"})


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    dated = os.environ | dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-01T00:00:00Z")  # equal commits in every run
    done = subprocess.run(["git", *named, *arguments], cwd=folder, env=dated, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, subject: str, **files: str) -> str:
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", subject, "--allow-empty")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def history_of_seconds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A repository of ten commits; the seconds are 1.02 from the fourth on, and 1.2 from the seventh."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q")
    seconds = ["1.0"] * 3 + ["1.02"] * 3 + ["1.2"] * 4
    return folder, [commit(folder, f"change {place}", seconds=text) for place, text in enumerate(seconds)]


@dataclass
class Measured:
    """Reads a file of the tree, with noise; a commit that is named ends in an error."""

    noise: float = 0.0
    kind: Kind = "series"
    is_outcome: bool = False
    is_lossless: bool = False
    broken: tuple[str, ...] = ()
    metric: str = "seconds"
    runs: list[tuple[str, str]] = field(default_factory=list)
    unlike: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def run(self, revision: str, tree: Path, name: str) -> Reading:
        self.runs.append((revision, name))
        if revision in self.broken:
            return Reading(None, CellOutcome.ERROR, "does not build")
        seconds = float((tree / "seconds").read_text())
        if self.is_outcome:
            return Reading(None, CellOutcome.PASS if seconds < 1.1 else CellOutcome.TIMEOUT, "ended")
        generator = random.Random(f"{revision}{name}")
        seconds = 0.0 if self.is_lossless and seconds < 1.1 else seconds
        values = tuple(seconds * math.exp(generator.gauss(0, self.noise)) for _ in range(3))
        measured = Measurement(name, "e", revision, self.metric, "lower", values, self.kind)
        return Reading(replace(measured, **self.unlike.get(revision, {})), CellOutcome.PASS, "ended")  # type: ignore[arg-type]


class Building(Measured):
    """Builds in the tree what is missing there, of what git ignores, and writes into what it holds."""

    def run(self, revision: str, tree: Path, name: str) -> Reading:
        if not (tree / "built").exists():
            (tree / "built").write_text((tree / "seconds").read_text())
        (tree / "seconds").write_text((tree / "built").read_text())
        return super().run(revision, tree, name)


def search(place: tuple[Path, list[str]], measure: Measured, good: int = 0, bad: int = 9) -> BlameReport:
    repository, commits = Repository(place[0]), place[1]
    ends = (repository.commit(commits[one], "test") for one in (good, bad))
    with tempfile.TemporaryDirectory() as folder:
        return Search(measure, repository, Path(folder), *ends, max_rounds=8).run()


@pytest.mark.parametrize(
    "measure",
    [Measured(), Measured(noise=0.03), Measured(kind="paired"), Measured(kind="paired", is_lossless=True), Measured(is_outcome=True)],
    ids=["exact", "noisy", "paired", "lossless", "outcome"],
)
def test_the_commit_that_makes_most_of_it_is_found_and_the_tree_of_the_user_is_as_it_was(
    history_of_seconds: tuple[Path, list[str]], measure: Measured
) -> None:
    folder, commits = history_of_seconds
    (folder / "seconds").write_text("mine")  # uncommitted work
    found = search(history_of_seconds, measure)
    assert ([one.revision for one in found.first_bad], found.verdict) == ([commits[6]], Verdict.REGRESSION)
    assert "change 6" in found.to_text() and found.first_bad[0].author == "A"
    assert (folder / "seconds").read_text() == "mine" and len(git(folder, "worktree", "list").splitlines()) == 1
    assert git(folder, "rev-parse", "--abbrev-ref", "HEAD") == "main" and not git(folder, "for-each-ref", "refs/bisect")
    git(folder, "checkout", "-q", ".")


@pytest.mark.parametrize("measure", [Building(), Building(is_outcome=True)], ids=["number", "outcome"])
def test_what_one_commit_leaves_in_its_tree_decides_no_other_one(history_of_seconds: tuple[Path, list[str]], measure: Measured) -> None:
    found = search(history_of_seconds, measure)
    assert [one.revision for one in found.first_bad] == [history_of_seconds[1][6]]


@pytest.mark.parametrize(
    ("kind", "unlike", "told"),
    [
        ("paired", {"values": (1.2, 1.2)}, "its number of sequences is 2, the good commit's 3"),
        ("paired", {"values": (1.2,) * 6}, "its number of sequences is 6, the good commit's 3"),
        ("paired", {"kind": "series"}, "its kind is series, the good commit's paired"),
        ("series", {"better": "higher"}, "its better is higher, the good commit's lower"),
        ("series", {"environment": "other"}, "its environment is other, the good commit's e"),
    ],
)
def test_what_is_no_measurement_of_the_same_is_passed_over(
    history_of_seconds: tuple[Path, list[str]], kind: Kind, unlike: dict[str, object], told: str
) -> None:
    commits = history_of_seconds[1]
    found = search(history_of_seconds, Measured(kind=kind, unlike={commits[6]: unlike}))
    assert [commits.index(one.revision) for one in found.first_bad] in ([6, 7], [7, 6]) and told in found.to_text()
    with pytest.raises(HarnessError, match="the bad commit cannot be held against the good one: its"):
        search(history_of_seconds, Measured(kind=kind, unlike={commits[9]: unlike}))


def test_rounds_are_taken_in_turns_with_the_good_commit_and_shared_noise_spares_some(history_of_seconds: tuple[Path, list[str]]) -> None:
    commits, measure = history_of_seconds[1], Measured(noise=0.002)
    found = search(history_of_seconds, measure)
    ours = [revision for revision, _ in measure.runs[1:]]
    assert all(commits[0] in pair for pair in zip(ours[::2], ours[1::2], strict=True))
    assert [found.effects[commits[place]].num_rounds for place in (9, 6)] == [4, 2]
    effect = found.effects[commits[6]]
    assert effect.low < 0.2 < effect.high and effect.high - effect.low < 0.02


def test_a_commit_that_cannot_be_measured_is_passed_over(history_of_seconds: tuple[Path, list[str]]) -> None:
    commits = history_of_seconds[1]
    found = search(history_of_seconds, Measured(broken=(commits[5], commits[6])))
    assert {one.revision for one in found.first_bad} == {commits[place] for place in (5, 6, 7)}
    assert found.verdict is Verdict.INCONCLUSIVE and "one of 3 commits that could not be told apart" in found.to_text()
    assert "does not build" in found.to_text()
    with pytest.raises(HarnessError, match="the good commit gives error here: does not build; mend that, or name another"):
        search(history_of_seconds, Measured(broken=(commits[0],)))


@pytest.mark.parametrize("broken", [[5], [4, 5]])
def test_the_commits_before_the_guilty_one_may_be_those_that_cannot_be_measured(
    history_of_seconds: tuple[Path, list[str]], broken: list[int]
) -> None:
    commits = history_of_seconds[1]
    found = search(history_of_seconds, Measured(broken=tuple(commits[place] for place in broken)), good=3 if broken == [4, 5] else 4)
    assert {commits.index(one.revision) for one in found.first_bad} == {*broken, 6} and found.verdict is Verdict.INCONCLUSIVE


def test_the_tree_of_a_commit_has_its_submodules_and_no_part_of_it_is_left_out(tmp_path: Path) -> None:
    """The submodule stands at that commit's own, not at today's; a sparse checkout of the user's leaves files out, this tree none."""
    for name in ("inner", "library", "outer"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
    commit(tmp_path / "inner", "inner", value="i")
    commit(tmp_path / "library", "one", version="1")
    git(tmp_path / "library", "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(tmp_path / "inner"), "inner")
    commit(tmp_path / "library", "with inner")
    outer = tmp_path / "outer"
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(tmp_path / "library"), "lib")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "update", "-q", "--init", "--recursive")
    (outer / "kept").mkdir()
    (outer / "left").mkdir()
    first = commit(outer, "first", **{"kept/a": "a", "left/b": "b"})
    commit(outer / "lib", "two", version="2")
    commit(outer, "second")
    git(outer, "sparse-checkout", "set", "kept")
    assert not (outer / "left").exists()
    with Repository(outer).tree(first, tmp_path / "tree") as tree:
        assert {name: (tree / name).read_text() for name in ("kept/a", "left/b", "lib/version", "lib/inner/value")} == {
            "kept/a": "a",
            "left/b": "b",
            "lib/version": "1",
            "lib/inner/value": "i",
        }
    assert not (tmp_path / "tree").exists() and (outer / "lib" / "version").read_text() == "2"
    assert [git(folder, "worktree", "list").count("\n") for folder in (outer, outer / "lib", outer / "lib" / "inner")] == [0, 0, 0]


def test_what_a_killed_search_left_is_cleared_and_hooks_of_the_user_do_not_run(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / ".git" / "hooks" / "post-checkout").chmod(0o755)
    first = commit(tmp_path, "first", seconds="1")
    git(tmp_path, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "-q", "left", first)
    (tmp_path / "left" / "more").write_text("of the one that was killed")
    repository = Repository(tmp_path)
    shutil.rmtree(tmp_path / "left")  # git still knows it
    with repository.tree(first, tmp_path / "left") as tree:
        assert [path.name for path in tree.iterdir() if path.name != ".git"] == ["seconds"]
        with pytest.raises(UserInputError, match="renamed: is not in this commit, and what lies there now is another one's"):
            commit(tmp_path, "second", renamed="2")
            repository.at(tmp_path / "renamed", tree)
        (tmp_path / "untracked").touch()
        assert repository.at(tmp_path / "untracked", tree) == tmp_path / "untracked"
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1 and not (tmp_path / "left").exists()


@pytest.mark.parametrize(
    ("measure", "bad", "verdict"),
    [
        (Measured(noise=0.1), 5, Verdict.INCONCLUSIVE),
        (Measured(), 2, Verdict.PASS),
        (Measured(is_outcome=True), 5, Verdict.PASS),
    ],
)
def test_a_change_that_does_not_show_here_blames_nobody(
    history_of_seconds: tuple[Path, list[str]], measure: Measured, bad: int, verdict: Verdict
) -> None:
    found = search(history_of_seconds, measure, bad=bad)
    assert (found.first_bad, found.verdict, len(found.steps)) == ((), verdict, 2)
    assert "is not worse than" in found.to_text()


def test_decisions_hold_at_their_level() -> None:
    wrong = undecided = 0
    for seed in range(300):
        noise = random.Random(seed).gauss
        rounds = {name: [level + noise(0, 0.02) for _ in range(count)] for name, level, count in (("bad", 0.1, 4), ("ours", 0.0, 2))}
        mark = decide("ours", "bad", rounds)
        wrong += mark == "bad"
        undecided += mark == "skip"
    assert wrong <= 3 and undecided < 200
    assert decide("ours", "bad", {"bad": [0.1, 0.12, 0.08, 0.1], "ours": [0.045, 0.052]}) == "skip"  # halfway
    same = {"bad": [0.01, -0.01, 0.004, -0.004]}
    assert not is_reproduced("bad", same) and effect_of("bad", same, "lower").low < 0 < effect_of("bad", same, "lower").high


def test_the_history_says_between_which_commits(history_of_seconds: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, commits = history_of_seconds
    repository, history, environment = Repository(folder), History(tmp_path / "h.sqlite"), ENVIRONMENT
    generator = random.Random(0)
    for night in range(44):
        revision = commits[0] if night < 36 else commits[min(9, night - 35)]
        values = [(1.2 if night >= 40 else 1.0) * math.exp(generator.gauss(0, 0.003)) for _ in range(3)]
        history.add(
            "m/seconds", values, environment=environment, night=(date(2026, 1, 1) + timedelta(night)).isoformat(), revision=revision
        )
    ends = find_ends(repository, "m/seconds", history)
    assert [commits.index(one.revision) for one in ends] == [3, 6]
    assert find_ends(repository, "m/seconds", history, good="HEAD~9")[0].revision == commits[0]
    with pytest.raises(UserInputError, match="'nothing' is no commit of"):
        find_ends(repository, "m/seconds", None, "nothing", "HEAD")
    with pytest.raises(UserInputError, match=r"m/other: .* knows no metric or cell of that name"):
        find_ends(repository, "m/other", history)
    history.add("quiet", [1.0], environment=environment, revision=commits[0])
    with pytest.raises(UserInputError, match="no change to blame anybody for: 1 night: too few"):
        find_ends(repository, "quiet", history)


def test_of_a_cell_the_last_night_that_passed_is_the_good_end(history_of_seconds: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, commits = history_of_seconds
    repository, history, environment = Repository(folder), History(tmp_path / "h.sqlite"), ENVIRONMENT

    def ran(night: str, revision: str, outcome: str) -> None:
        history.add_cell(CellRow(night, environment.digest, revision, "lint", 1, outcome, 1.0, 1, ""), [], environment=environment)

    ran("1", commits[1], "regression")
    with pytest.raises(UserInputError, match="lint: never passed in this history; name --good, where it did"):
        find_ends(repository, "lint", history)
    ran("2", commits[2], "pass")
    with pytest.raises(UserInputError, match="lint: passed when it last ran"):
        find_ends(repository, "lint", history)
    ran("3", commits[5], "error")
    ran("4", commits[6], "regression")
    assert [commits.index(one.revision) for one in find_ends(repository, "lint", history)] == [2, 5]
    ran("5", f"{commits[7]}-dirty", "pass")
    ran("6", commits[8], "error")
    with pytest.raises(UserInputError, match="with changes that no commit holds; name one"):
        find_ends(repository, "lint", history)


def test_outside_of_a_repository_nothing_is_searched(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="lies in no git repository"):
        Repository(tmp_path)


MEASURE = """
import sys
from harness.nightly.environment import current_environment
from harness.nightly.history import History
from work import cost
History(sys.argv[1]).add("cost", [cost(place) for place in range(9)], environment=current_environment(), kind="paired")
"""


def test_a_command_measures_the_code_of_each_commit_and_a_second_search_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "init", "-q")
    texts = [f"def cost(place):\n    return 1 + place * {factor}\n" for factor in (1, 1, 2, 2)]
    commits = [commit(tmp_path, f"change {place}", **{"work.py": text, "measure.py": MEASURE}) for place, text in enumerate(texts)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    (tmp_path / "work.py").write_text("raise RuntimeError('the tree of the user is not what is measured')\n")
    asked = ["nightly", "blame", "cost", "--command", "python measure.py {history}", "--good", commits[0], "--bad", commits[3], "--quiet"]
    assert main([*asked, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["revision"] for one in found["first_bad"]] == [commits[2]] and found["layers"] is None
    logs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("command.log")}
    assert len(logs) == 6  # three commits, each beside the good one
    assert main(asked) == 1
    assert "change 2" in capsys.readouterr().out and logs == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("command.log")}


def test_a_folder_that_no_commit_holds_is_made_in_the_tree_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started there, the command had measured the files of the user, and written among them."""
    git(tmp_path, "init", "-q")
    texts = [f"def cost(place):\n    return 1 + place * {factor}\n" for factor in (1, 2, 2)]
    commits = [commit(tmp_path, f"change {place}", **{"work.py": text, "measure.py": MEASURE}) for place, text in enumerate(texts)]
    started = tmp_path / "out"
    started.mkdir()
    monkeypatch.chdir(started)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    command = "sh -c 'cd .. && echo text > written && python measure.py {history}'"
    kept = tmp_path.parent / f"{tmp_path.name}-kept"
    asked = ["--good", commits[0], "--bad", ":/change 2", "--quiet", "--output-dir", str(kept)]
    assert main(["nightly", "blame", "cost", "--command", command, *asked]) == 1
    assert "change 1" in capsys.readouterr().out
    assert not (tmp_path / "written").exists() and not [*started.iterdir()]


def test_what_a_script_that_no_commit_holds_has_measured_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, script = tmp_path / "repository", tmp_path / "measure.py"
    folder.mkdir()
    git(folder, "init", "-q")
    texts = [f"def cost(place):\n    return 1 + place * {factor}\n" for factor in (1, 2, 2)]
    commits = [commit(folder, f"change {place}", **{"work.py": text}) for place, text in enumerate(texts)]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    asked = ["nightly", "blame", "cost", "--command", f"python {script} {{history}}", "--good", commits[0], "--bad", commits[2], "--quiet"]
    script.write_text(MEASURE.replace("from work import cost", "cost = float"))
    assert main(asked) == 0 and "is not worse" in capsys.readouterr().out
    script.write_text(MEASURE)
    assert main(asked) == 1 and "change 1" in capsys.readouterr().out


def test_a_run_that_gives_two_measurements_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    add = 'History(sys.argv[1]).add("cost", [1.0], environment=current_environment()'
    head = MEASURE.partition("from work")[0]
    (tmp_path / "twice.py").write_text(f'{head}{add})\n{add}, revision="other")\n')
    reading = CommandMeasure("python twice.py {history}", "cost", Repository(tmp_path), tmp_path / "out").run("0" * 40, tmp_path, "first")
    assert reading.measurement is None and reading.note.startswith("cost was written for 2 nights, environments or revisions; exit code 0")


def test_a_command_that_ends_well_without_the_metric_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    monkeypatch.chdir(tmp_path)
    measure = CommandMeasure("python -c pass {history}", "cost", Repository(tmp_path), tmp_path / "out")
    reading = measure.run("0" * 40, tmp_path, "first")
    assert reading.measurement is None and reading.note == "cost was not written; exit code 0; command.log is empty"


TIMED = """
import sys, time
from harness.nightly.environment import current_environment
from harness.nightly.history import History
from work import work

def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start

ratios = [seconds(work) / seconds(lambda: sum(range(100_000))) for _ in range(9)]
History(sys.argv[1]).add("work/time", ratios, environment=current_environment())
"""


@pytest.mark.nightly
def test_a_commit_that_really_takes_longer_is_found_from_what_the_nights_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "init", "-q")
    counts = [100_000] * 5 + [140_000] * 4
    texts = [f"def work():\n    return sum(range({count}))  # {place}\n" for place, count in enumerate(counts)]
    files = {"measure.py": TIMED, ".gitignore": "nightly.sqlite\nblame\n"}
    commits = [commit(tmp_path, f"change {place}", **files, **{"work.py": text}) for place, text in enumerate(texts)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    history = History("nightly.sqlite")
    for night in range(36):
        values = [(1.4 if night >= 34 else 1.0) * (1 + 0.001 * (night % 5))]
        label = (date(2026, 1, 1) + timedelta(night)).isoformat()
        history.add("work/time", values, environment=ENVIRONMENT, night=label, revision=commits[0 if night < 34 else 8])
    assert main(["nightly", "blame", "work/time", "--command", "python measure.py {history}", "--quiet", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["revision"], one["subject"]) for one in found["first_bad"]] == [(commits[5], "change 5")]
    (effect,) = (one["effect"] for one in found["steps"] if one["commit"]["revision"] == commits[5])
    assert 0.2 < effect["low"] < 0.4 < effect["high"] < 0.6


def test_a_cell_of_a_matrix_that_no_longer_passes_is_blamed_on_a_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tmp_path, "init", "-q")
    config = json.dumps({"models": {"m": "."}, "checks": [], "commands": {"lint": "python lint.py"}})
    codes = (0, 0, 7, 7)
    commits = [commit(tmp_path, f"change {code}", **{"lint.py": f"raise SystemExit({code})", "n.yaml": config}) for code in codes]
    asked = ["nightly", "blame", "lint", "--config", str(tmp_path / "n.yaml"), "--good", commits[0], "--bad", commits[3], "--quiet"]
    assert main(asked) == 1
    assert f"answer      {commits[2][:12]}" in capsys.readouterr().out


def test_a_night_of_an_older_commit_bridges_two_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tmp_path, "init", "-q")
    config = json.dumps({"models": {"m": "."}, "checks": [], "commands": {"look": "python look.py"}})
    look = "import pathlib; print(pathlib.Path('note').read_text())"
    first = commit(tmp_path, "first", **{"note": "as it was", "look.py": look, "n.yaml": config, ".gitignore": "nightly*"})
    commit(tmp_path, "second", note="as it is")
    asked = ["nightly", "run", str(tmp_path / "n.yaml"), "--night", "1", "--quiet", "--json"]
    main(asked)
    main([*asked, "--at", first])
    capsys.readouterr()
    notes = {row.revision: row.summary for row in History(tmp_path / "nightly.sqlite").cells("1")}
    assert notes[first].endswith("as it was") and notes[git(tmp_path, "rev-parse", "HEAD")].endswith("as it is")
    assert (tmp_path / "nightly" / "1").is_dir() and (tmp_path / "nightly" / f"at-{first[:12]}" / "1").is_dir()
    assert main([*asked, "--at", "nothing"]) == 3
    assert "--at: 'nothing' is no commit of" in capsys.readouterr().err


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A repository whose last commit breaks a job; data of the job lie in no commit: ignored, behind a link that leads out, and outside."""
    folder = tmp_path / "repository"
    (tmp_path / "outside").mkdir()
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "link").symlink_to("../outside")
    for path in (folder / "ignored", tmp_path / "outside" / "x"):
        path.write_text("ok")
    job = "import sys, pathlib; sys.exit(pathlib.Path(sys.argv[1]).read_text() != 'ok')"
    commit(folder, "first", **{"job.py": job, ".gitignore": "ignored\nnightly*\nblame\n*.yaml"})
    commit(folder, "second", **{"job.py": job.replace("!=", "==")})
    return folder


NAMED = ["ignored", "link/x", "../outside/x"]


def _matrix(folder: Path, command: str) -> str:
    (folder / "n.yaml").write_text(json.dumps({"models": {"m": "."}, "checks": [], "commands": {"job": command}}))
    return str(folder / "n.yaml")


@pytest.mark.parametrize("name", NAMED)
def test_a_file_of_a_command_that_no_commit_holds_is_named_and_no_regression(
    beside: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _matrix(beside, f"python job.py {name}")
    told = f"the command names {name}, which is here and in no commit, and so not where it ran: give its absolute path; "
    ends = ["--good", "HEAD~1", "--bad", "HEAD", "--quiet"]
    assert main(["nightly", "blame", "job", "--config", config, *ends]) == 3
    assert f"the good commit gives error here: {told}" in capsys.readouterr().err
    main(["nightly", "run", config, "--at", "HEAD~1", "--night", "1", "--quiet"])
    (row,) = History(beside / "nightly.sqlite").cells("1")
    assert (row.outcome, row.summary.startswith(told)) == ("error", True)


@pytest.mark.parametrize("name", NAMED)
def test_the_file_of_a_command_of_its_own_is_named_too(
    beside: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(beside)
    ends = ["--good", "HEAD~1", "--bad", "HEAD", "--quiet"]
    assert main(["nightly", "blame", "m", "--command", f"python job.py {name} {{history}}", *ends]) == 3
    assert f"the command names {name}, which is here and in no commit" in capsys.readouterr().err


def test_what_the_file_says_by_its_absolute_path_blames_a_commit(beside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _matrix(beside, f"python job.py {beside / 'ignored'}")
    main(["nightly", "blame", "job", "--config", config, "--good", "HEAD~1", "--bad", "HEAD", "--quiet"])
    assert f"answer      {git(beside, 'rev-parse', 'HEAD')[:12]}" in capsys.readouterr().out


def test_a_failure_that_lacks_no_file_stays_a_regression_of_its_commit(beside: Path) -> None:
    """What the command writes lies in its tree by then; and a word may be longer than any name of a file."""
    (beside / "ignored").write_text("an earlier result")
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('')" + "; 1" * 200 + "; sys.exit(1)"
    main(["nightly", "run", _matrix(beside, f'python -c "{code}" ignored'), "--at", "HEAD", "--night", "1", "--quiet"])
    assert [row.outcome for row in History(beside / "nightly.sqlite").cells("1")] == ["regression"]
    assert (beside / "ignored").read_text() == "an earlier result"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["m"], "say how to measure, and neither was given; give one"),
        (["m", "--command", "a", "--config", "c.yaml"], "and both were given; give one"),
        (["m", "--command", "a {history}"], "there is no history to tell where to search"),
        (["m", "--command", "a", "--good", "HEAD~1", "--bad", "HEAD"], "'a' has no {history} to write into"),
        (["m", "--command", "a 'b {history}", "--good", "HEAD~1", "--bad", "HEAD"], "(No closing quotation); close the quotes"),
        (["m", "--command", "a {history} | b", "--good", "HEAD~1", "--bad", "HEAD"], "and no shell reads a command"),
        (["m", "--command", "a {history}", "--good", "HEAD", "--bad", "HEAD"], "what changed is no commit"),
    ],
)
def test_what_cannot_be_searched_is_said(
    history_of_seconds: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(history_of_seconds[0])
    assert main(["nightly", "blame", *words]) == 3
    assert told in capsys.readouterr().err


@pytest.mark.nightly
def test_a_recipe_that_a_commit_spoiled_is_found_and_the_layer_in_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(project, "init", "-q")
    data = {"calibration": "calibration.safetensors", "held_out": "held_out.safetensors", "max_seq_length": 16}
    config = {"models": {"m": "tiny"}, "recipes": {"w8": "recipe.yaml"}, "data": data, "checks": ["compress", "validate"]}
    spoiled = (
        json.dumps(
            {
                "s": {
                    "m": {
                        "QuantizationModifier": {
                            "ignore": ["lm_head"],
                            "config_groups": {
                                "narrow": {"targets": ["re:.*layers.1.mlp.down_proj"], "weights": {"num_bits": 2, "strategy": "channel"}},
                                "rest": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}},
                            },
                        }
                    }
                }
            }
        )
        .replace('"m":', '"m_modifiers":')
        .replace('"s":', '"s_stage":')
    )
    (project / ".gitignore").write_text("tiny\n*.safetensors\nnightly*\nblame\n")
    files = [{"n.yaml": json.dumps(config)}, {"notes": "1"}, {"recipe.yaml": spoiled}, {"notes": "2"}]
    commits = [commit(project, f"change {place}", **one) for place, one in enumerate(files)]
    asked = ["nightly", "blame", "m/w8/cpu/validate/kl", "--config", str(project / "n.yaml"), "--good", commits[0], "--bad", commits[3]]
    assert main([*asked, "--quiet", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["revision"] for one in found["first_bad"]] == [commits[2]]
    assert [one["name"] for one in found["layers"]["layers"]] == ["model.layers.1"]


def test_an_interruption_says_what_is_kept(
    history_of_seconds: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> Reading:
        raise KeyboardInterrupt

    folder, commits = history_of_seconds
    monkeypatch.chdir(folder)
    monkeypatch.setattr("harness.nightly.blame.measuring.CommandMeasure.run", stop)
    asked = ["nightly", "blame", "m", "--command", "a {history}", "--good", commits[0], "--bad", commits[9], "--output-dir", str(tmp_path)]
    assert main(asked) == 130
    assert f"interrupted; what was measured lies in {tmp_path}" in capsys.readouterr().err
