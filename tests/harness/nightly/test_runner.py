"""A night runs every cell in a process of its own; whatever becomes of it is a row, and what is done is not done again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from compressor.errors import UserInputError
from harness import cli
from harness.errors import HarnessError
from harness.nightly import History
from harness.nightly.cells import CellOutcome, all_cells
from harness.nightly.config import read_config
from harness.nightly.judging.flaky import find_flaky
from harness.nightly.judging.judgement import Judgement
from harness.nightly.measurement import CellRow
from harness.nightly.process import Ended, alone_in, run_limited
from harness.nightly.runner import Night, Runner
from harness.reporting.verdict import Verdict


def write(folder: Path, **settings: object) -> Path:
    """A config in a folder; JSON is YAML, too."""
    path = folder / "nightly.yaml"
    path.write_text(json.dumps({"models": {"m": "tiny"}, "checks": []} | settings))
    return path


def run(folder: Path, night: str = "1", **settings: object) -> Night:
    return Runner(read_config(write(folder, **settings)), night).run()


def python(code: str) -> str:
    return f'python -c "{code}"'


def test_a_second_run_in_a_folder_waits_for_the_first(tmp_path: Path) -> None:
    (tmp_path / "nightly" / "1").mkdir(parents=True)
    with alone_in(tmp_path / "nightly" / "1", "name another folder"):
        with pytest.raises(HarnessError, match=r"nightly/1: another process works there; wait for its end, or name another folder"):
            run(tmp_path, commands={"c": python("pass")})
        assert [row.outcome for row in run(tmp_path, "2", commands={"c": python("pass")}).rows] == ["pass"]
    assert [row.outcome for row in run(tmp_path, commands={"c": python("pass")}).rows] == ["pass"]


@pytest.mark.nightly
def test_a_matrix_compresses_validates_and_times_and_goes_on_where_it_ended(project: Path) -> None:
    data = {"calibration": "calibration.safetensors", "held_out": "held_out.safetensors", "max_seq_length": 16}
    settings = {"recipes": {"w8": "recipe.yaml"}, "data": data, "checks": ["speed", "compress", "validate"], "repetitions": 2}
    settings |= {"commands": {"look": python("import sys, pathlib; sys.exit(not pathlib.Path('{compressed}/config.json').exists())")}}
    found = run(project, **settings)
    outcomes = {row.cell.removeprefix("m/w8/cpu/"): row.outcome for row in found.rows}
    assert list(outcomes) == ["compress", "validate", "speed", "look"]
    assert outcomes["compress"] == outcomes["speed"] == outcomes["look"] == "pass", found
    history = History(project / "nightly.sqlite")
    metrics = {name.removeprefix("m/w8/cpu/"): history.series(name)[0] for name in history.metrics()}
    assert {"compress/time", "compress/time.compress", "compress/bytes", "compress/memory", "speed/prefill", "speed/decode"} < set(metrics)
    assert len(metrics["compress/time"].values) == 2 and metrics["compress/bytes"].values[0] > 100_000
    assert (metrics["validate/kl"].kind, len(metrics["validate/kl"].values)) == ("paired", 24)
    assert all(row.memory > 50_000_000 for row in found.rows if row.cell.endswith("compress"))
    again = run(project, **settings)
    assert (again.resumed, again.rows) == (4, found.rows)
    assert found.verdict is again.verdict


@pytest.mark.nightly
def test_replay_and_the_catalogue_are_cells_of_our_own_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    ours = yaml.safe_load((Path(__file__).parents[3] / ".ci" / "nightly.yaml").read_text())["commands"]
    found = run(tmp_path, commands={name: ours[name] for name in ("replay", "catalogue")})
    assert [(row.cell, row.outcome) for row in found.rows] == [("replay", "pass"), ("catalogue", "pass")], found.rows
    assert History(tmp_path / "nightly.sqlite").metrics() == ["catalogue/seconds", "replay/seconds"]


def test_a_run_says_how_far_it_is_and_what_became_of_a_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, commands={"first": python("pass"), "second": python("raise SystemExit(1)")})
    assert cli.main(["nightly", "run", str(config), "--night", "1"]) == 1
    assert re.fullmatch(r"cells 2/2, 0:00:\d\d: second: regression\n", capsys.readouterr().err)
    assert cli.main(["nightly", "run", str(config), "--night", "2", "--quiet"]) == 1
    assert capsys.readouterr().err == ""


def test_an_interruption_says_which_cells_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(command: list[str], log: Path, **_: object) -> Ended:
        if "second" in str(log):
            raise KeyboardInterrupt
        log.touch()
        return Ended(code=0, beyond="", seconds=1.0, memory=1)

    monkeypatch.setattr("harness.nightly.runner.run_limited", ends)
    config = write(tmp_path, commands={"first": "a", "second": "b"})
    assert cli.main(["nightly", "run", str(config), "--night", "1", "--quiet"]) == 130
    told = f"interrupted; 1 of 2 cells are in {tmp_path / 'nightly.sqlite'}, and the same command goes on behind them\n"
    assert capsys.readouterr().err.endswith(told)


def test_a_run_that_is_killed_goes_on_at_the_cell_that_it_was_in(tmp_path: Path) -> None:
    waits = python("import time, pathlib; pathlib.Path('began').touch(); time.sleep(0 if pathlib.Path('go').exists() else 60)")
    config = write(tmp_path, commands={"first": python("pass"), "second": waits})
    command = [sys.executable, "-m", "harness.cli", "nightly", "run", str(config), "--night", "1", "--quiet", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as killed:
        while not (tmp_path / "began").exists():
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    found = Runner(read_config(config), "1").run()
    assert found.resumed == 1 and [row.outcome for row in found.rows] == ["pass", "pass"]
    assert [row.cell for row in History(tmp_path / "nightly.sqlite").cells()] == ["first", "second"]


def test_what_cannot_be_judged_is_told_and_the_night_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"kl": (["nan", 1.0], "lower", "paired"), "loss": (["inf"], "lower", "series"), "fine": ([1.0], "lower", "series")}
    metrics |= {"lossless": ([0.0] * 9, "lower", "paired")}

    def ends(command: list[str], log: Path, **limits: object) -> Ended:
        Path(command[-1]).write_text(json.dumps({"outcome": "regression", "summary": "\x1b[31mworse", "metrics": metrics}))
        return Ended(code=0, beyond="", seconds=1.0, memory=1)

    monkeypatch.setattr("harness.nightly.runner.run_limited", ends)
    (tmp_path / "recipe.yaml").touch()
    data = {"calibration": "c", "held_out": "h"}
    found = run(tmp_path, recipes={"w": "recipe.yaml"}, data=data, checks=["compress"])
    told = found.rows[0].summary
    assert (
        told.startswith(r"\x1b[31mworse; not judged: m/w/cpu/compress/kl: the value nan is not finite") and "/loss: the value inf" in told
    )
    assert History(tmp_path / "nightly.sqlite").metrics() == ["m/w/cpu/compress/fine", "m/w/cpu/compress/lossless"]
    with pytest.raises(UserInputError, match=r"night: 'x\\r' is no text of one line"):
        run(tmp_path, "x\r", commands={"c": python("pass")})


ENDS = {
    "pass": ("pass", "exit code 0"),
    "raise SystemExit(1)": ("regression", "exit code 1"),
    "raise SystemExit(2)": ("inconclusive", "exit code 2"),
    "print('what was wrong'); raise SystemExit(7)": ("error", "exit code 7; c.1.log ends with: what was wrong"),
    "import os; os.kill(os.getpid(), 9)": ("killed", "ended by signal 9"),
    "import time; time.sleep(60)": ("timeout", "ended after 0.02 minutes"),
    "import time; x = bytearray(200 << 20); time.sleep(60)": ("memory", "ended after 0.1 GiB"),
}


@pytest.mark.parametrize("code", ENDS)
def test_whatever_becomes_of_a_cell_is_a_row(tmp_path: Path, code: str) -> None:
    outcome, summary = ENDS[code]
    limits = {"minutes": 0.02 if outcome == "timeout" else 1, "memory_gib": 0.1}
    found = run(tmp_path, commands={"c": python(code)}, limits=limits)
    (row,) = found.rows
    assert (row.outcome, row.summary.startswith(summary)) == (outcome, True), row
    assert found.verdict is CellOutcome(outcome).verdict
    assert History(tmp_path / "nightly.sqlite").cells("1") == [row]


def test_a_program_that_is_not_there_is_a_row(tmp_path: Path) -> None:
    (row,) = run(tmp_path, commands={"c": "no-such-program"}).rows
    assert row.outcome == "error" and "no-such-program: cannot be started" in row.summary


DAEMON = """
import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_a_process_that_detached_itself_is_ended_and_told(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    ended = run_limited([sys.executable, str(tmp_path / "daemon.py"), "pid"], tmp_path / "log", seconds=60, memory=None, cwd=tmp_path)
    assert (ended.code, ended.beyond, ended.strays) == (0, "", 1)
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert run_limited(["true"], tmp_path / "log", seconds=60, memory=None, cwd=tmp_path).strays == 0


def test_children_that_outlive_a_cell_are_ended(tmp_path: Path) -> None:
    child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    run(tmp_path, commands={"c": python(child)})
    pid = int((tmp_path / "nightly" / "1" / "c.1.log").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_cells_run_beside_the_config_and_its_commit_is_noted_wherever_the_history_lies(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    (row,) = run(tmp_path, history="far/h.sqlite", commands={"c": python("import pathlib; pathlib.Path('ran').touch()")}).rows
    assert (tmp_path / "ran").exists() and row.outcome == "pass" and len(row.revision) == 40


def test_cells_behind_a_commit_of_somebody_are_filed_under_none(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    again = "git -c user.name=n -c user.email=e commit -q --allow-empty -m m"
    subprocess.run(again.split(), check=True, cwd=tmp_path)
    rows = run(tmp_path, commands={"a": python("pass"), "b": again, "c": python("pass")}, retries=0).rows
    assert [row.outcome for row in rows] == ["pass", "error", "error"]
    assert all("the commit moved from " in row.summary for row in rows[1:])
    assert History(tmp_path / "nightly.sqlite").metrics() == ["a/seconds"]


@pytest.mark.parametrize("code", [0, 1, 2, 7])
def test_how_long_a_command_took_is_filed_where_it_passed(tmp_path: Path, code: int) -> None:
    """One that fails at once would be the level that the repaired one is worse than."""
    run(tmp_path, commands={"a": python(f"raise SystemExit({code})")}, retries=0)
    assert History(tmp_path / "nightly.sqlite").metrics() == (["a/seconds"] if code == 0 else [])


def test_attempts_are_rows_and_the_last_one_counts(tmp_path: Path) -> None:
    once = python("import pathlib, sys; p = pathlib.Path('tried'); there = p.exists(); p.touch(); sys.exit(0 if there else 9)")
    found = run(tmp_path, commands={"c": once}, retries=3)
    rows = History(tmp_path / "nightly.sqlite").cells()
    assert [(row.attempt, row.outcome) for row in rows] == [(1, "error"), (2, "pass")] and found.rows == (rows[-1],)


@pytest.mark.nightly
def test_cells_without_their_checkpoint_are_skipped_and_say_so(project: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("quant_stage: {quant_modifiers: {NoSuchModifier: {}}}")
    data = {"calibration": str(project / "calibration.safetensors"), "held_out": str(project / "held_out.safetensors")}
    settings = {"models": {"m": str(project / "tiny")}, "recipes": {"bad": "bad.yaml"}, "data": data}
    first, second = run(tmp_path, **settings, checks=["compress", "validate"]).rows
    assert first.outcome == "error" and "NoSuchModifier" in first.summary
    assert second.outcome == "skipped" and "m/bad/cpu/compress: error, so there is no checkpoint" in second.summary


def test_a_checkpoint_that_loses_nothing_does_not_end_the_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossless(command: list[str], log: Path, **_: object) -> Ended:
        log.touch()
        metrics = {"kl": [[0.0, 0.0], "lower", "paired"], "loss": [[0.0, 2.0], "lower", "paired"]}
        Path(command[-1]).write_text(json.dumps({"outcome": "pass", "summary": "", "metrics": metrics}))
        return Ended(0, "", 1.0, 1)

    monkeypatch.setattr("harness.nightly.runner.run_limited", lossless)
    (tmp_path / "r.yaml").touch()
    (row,) = run(tmp_path, recipes={"r": "r.yaml"}, data=DATA, checks=["compress"]).rows
    history = History(tmp_path / "nightly.sqlite")
    assert row.outcome == "pass" and history.metrics() == ["m/r/cpu/compress/kl", "m/r/cpu/compress/loss"]
    history.export(tmp_path / "all.csv")
    assert History(tmp_path / "other.sqlite").read_in(tmp_path / "all.csv")["measurements"] == 2


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "nightly").write_text("a file")
    with pytest.raises(HarnessError, match=r"nightly/1: cannot be made .*; name another folder"):
        run(tmp_path, commands={"c": python("pass")})
    (tmp_path / "log").mkdir()
    with pytest.raises(HarnessError, match=r"log: cannot be written .*; make room, or name another folder"):
        run_limited(["true"], tmp_path / "log", seconds=60, memory=None, cwd=tmp_path)


def test_commands_run_for_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("")
    config = write(
        tmp_path,
        models={"a": "x/a", "b": "x/b"},
        recipes={"r": "r.yaml"},
        devices=["cpu", "cuda:0"],
        commands={"all": "true", "each": "true {model}", "by": "true {recipe} {device}"},
    )
    assert [cell.name for cell in all_cells(read_config(config))] == ["all", "a/each", "b/each", "r/cpu/by", "r/cuda:0/by"]


def test_a_metric_that_is_worse_fails_the_night() -> None:
    row = CellRow("2026-02-01", "e", "r", "c", 1, "pass", 1.0, 1, "")
    worse = Judgement("c/kl", Verdict.REGRESSION, "worse", 3, (), 0.1, 0.1)
    few = Judgement("c/time", Verdict.INCONCLUSIVE, "too few", 3, (), 0.1, 0.1)
    assert Night("n", "r", (row,), (few,), {}, 0).verdict is Verdict.PASS
    assert Night("n", "r", (row,), (few, worse), {}, 0).verdict is Verdict.REGRESSION


def _rows(*outcomes: tuple[str, str]) -> list[CellRow]:
    return [CellRow("n", "e", revision, "c", 1, outcome, 1.0, 1, "") for revision, outcome in outcomes]


def test_a_cell_is_quarantined_by_evidence_alone() -> None:
    mixed = [("a", "pass"), ("a", "error"), ("b", "timeout"), ("b", "pass")]
    flaky = find_flaky(_rows(*mixed))["c"]
    assert flaky.mixed == ("a", "b") and "at the same revision in 2 of 2" in str(flaky)
    night = Night("n", "b", tuple(_rows(("b", "error"))), (), {"c": flaky}, 0)
    assert night.verdict is Verdict.INCONCLUSIVE
    for clean in (
        mixed[:3],
        [("a", "pass"), ("b", "error"), ("c", "pass"), ("d", "error")],
        [(f"{one}-dirty", word) for one, word in mixed],
    ):
        assert find_flaky(_rows(*clean)) == {}
    assert find_flaky(_rows(*mixed, *((f"r{n}", "pass") for n in range(30)))) == {}


DATA = {"calibration": "a", "held_out": "b"}
WRONG = {
    "modles: is no setting; did you mean 'models'": {"modles": {"m": "x"}},
    "retries: -1 is not allowed": {"retries": -1},
    "recipes.r: there is no file r.yaml": {"recipes": {"r": "r.yaml"}},
    "data: is missing, and compress need": {"checks": ["compress"], "recipes": {"r": "nightly.yaml"}},
    "c has &&, and no shell reads a command": {"commands": {"c": "make && pytest"}},
    "c has |, and no shell reads a command": {"commands": {"c": "echo 'a|b'|false"}},
    "{modle} in c is no place": {"commands": {"c": "true {modle}"}},
    "speed needs what compress makes": {
        "checks": ["speed"],
        "recipes": {"r": "nightly.yaml"},
        "data": {"calibration": "a", "held_out": "b"},
    },
    "checks: there are none, and no commands": {},
    "root: there is no folder elsewhere": {"root": "elsewhere", "commands": {"c": "true"}},
    "limits.minutes: 0 is not allowed": {"limits": {"minutes": 0}, "commands": {"c": "true"}},
    "limits.memory_gib: 'Infinity' is not allowed": {
        "limits": {"memory_gib": float("inf")},
        "commands": {"c": "true"},
    },
    "compress is the name of a check": {"commands": {"compress": "true"}},
}


@pytest.mark.parametrize("text", ["models: !!python/object/apply:os.system [x]", "models: " + "[" * 1_000], ids=["tag", "deep"])
def test_a_config_that_is_no_safe_yaml_is_bad_input(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert cli.main(["nightly", "run", str(tmp_path / "c.yaml")]) == 3


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_config_is_told_with_its_line(tmp_path: Path, message: str) -> None:
    path = write(tmp_path, **WRONG[message])
    with pytest.raises(UserInputError) as raised:
        read_config(path)
    assert message.replace("did you mean 'models'", "") in str(raised.value) and str(path) in str(raised.value)


def _committed(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


def test_what_has_changed_since_runs_again_in_the_same_night(tmp_path: Path) -> None:
    """A pass of other code, of another command or with other files is no reading of this one."""
    passes, fails = "raise SystemExit(0)", "raise SystemExit(1)"
    tree, beside = tmp_path / "tree", tmp_path / "beside.py"
    tree.mkdir()
    beside.write_text(passes)
    commands = {"cell": "python cell.py", "other": f"python {beside}", "third": python(passes)}
    write(tree, commands=commands)
    _committed(tree, cell__py="import helper", helper__py="", __gitignore="__pycache__\n*.log\nignored.py")

    def again() -> tuple[int, list[str], str]:
        found = Runner(read_config(tree / "nightly.yaml"), "1").run()
        return found.resumed, [row.outcome for row in found.rows], found.anew

    assert again() == (0, ["pass"] * 3, "")
    (tree / "ignored.py").write_text(fails)
    assert again() == (3, ["pass"] * 3, "")
    (tree / "helper.py").write_text(fails)
    assert again() == (0, ["regression", "pass", "pass"], "")  # of the tree that is not committed nothing was done
    (tree / "helper.py").write_text("")
    beside.write_text(fails)
    assert again() == (2, ["pass", "regression", "pass"], "other is another command, or looks at other files")
    (tree / "new.py").touch()
    assert again() == (0, ["pass", "regression", "pass"], "new.py is not as in the commit, or in none")


@pytest.mark.parametrize("folders", [("out", "out"), ("first", "second")])
def test_what_another_config_has_run_under_a_name_is_not_done(tmp_path: Path, folders: tuple[str, str]) -> None:
    """The same words are another command in another folder, and a row of the history that came from elsewhere is no result of ours."""
    for name, text in (("sa", "raise SystemExit(1)"), ("sb", "raise SystemExit(0)")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cell.py").write_text(text)
        write(tmp_path / name, commands={"t": f"{sys.executable} cell.py"}, history="../h.sqlite")
    _committed(tmp_path, __gitignore="out\nfirst\nsecond\n*.sqlite\n")

    def night(name: str, folder: str) -> tuple[int, str]:
        config = read_config(tmp_path / name / "nightly.yaml")
        found = Runner(config.model_copy(update={"folder": tmp_path / folder}), "1").run()
        return found.resumed, found.rows[0].outcome

    first, second = folders
    assert [night("sa", first), night("sb", second), night("sa", first), night("sa", first)] == [
        (0, "regression"), (0, "pass"), (0, "regression"), (1, "regression")
    ]  # fmt: skip


def test_files_that_a_cell_names_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    """In folders at any depth; a touch is no change, and a copy that keeps the old date is one."""
    inner, beside = tmp_path / "data" / "deep" / "one.txt", tmp_path / "two.txt"
    inner.parent.mkdir(parents=True)
    inner.write_text("0")
    beside.write_text("0")
    commands = {"folder": f"{python('pass')} {inner.parents[1]}", "file": f"{python('pass')} {beside}"}

    def again() -> list[str]:
        """The cells that ran."""
        config = read_config(write(tmp_path, commands=commands))
        before = {path: path.stat().st_mtime_ns for path in config.folder.rglob("*.log")}
        Runner(config, "1").run()
        return [path.name.partition(".")[0] for path in sorted(config.folder.rglob("*.log")) if before.get(path) != path.stat().st_mtime_ns]

    assert again() == ["file", "folder"]
    beside.touch()
    assert again() == []
    inner.write_text("1")
    assert again() == ["folder"]
    times = beside.stat().st_atime_ns, beside.stat().st_mtime_ns
    beside.write_text("1")
    os.utime(beside, ns=times)
    assert again() == ["file"]


def test_another_command_runs_again_where_no_commit_is_known(tmp_path: Path) -> None:
    first = run(tmp_path, commands={"cell": python("pass"), "other": python("pass")})
    found = run(tmp_path, commands={"cell": python("raise SystemExit(1)"), "other": python("pass")})
    assert (first.resumed, found.resumed, [row.outcome for row in found.rows]) == (0, 1, ["regression", "pass"])
    assert found.anew == "cell is another command, or looks at other files"
