"""`harness verify` on the command line: what each flag changes, what each exit code means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main

MODULE = """
import time
from compressor import Modifier

class Good(Modifier):
    def on_initialize(self, state):
        return True

class NeedsAWord(Modifier):
    word: str

    def on_initialize(self, state):
        return True

class Hangs(Modifier):
    def on_initialize(self, state):
        time.sleep(30)
        return True

class Forgets(Modifier):
    def on_initialize(self, state):
        pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with modifiers in the folder where the command is run."""
    name = f"subjects_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["verify", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_good_modifier_passes_and_a_forgetful_one_does_not(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, f"{module}:Good", "--profile", "dev")
    assert (code, report["verdict"], report["profile"]) == (0, "pass", "dev")
    code, report = verify(capsys, f"{module}:Forgets", "--profile", "dev", "--check", "lifecycle.completes")
    assert (code, report["verdict"]) == (1, "regression")
    assert "returned None" in json.dumps(report)


def test_settings_make_a_modifier_that_needs_them(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--check", "lifecycle.completes")
    assert verify(capsys, f"{module}:NeedsAWord", *flags)[0] == 2
    assert verify(capsys, f"{module}:NeedsAWord", *flags, "--settings", '{"word": "yes"}')[0] == 0


def test_check_runs_only_what_is_named(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = verify(capsys, f"{module}:Good", "--check", "lifecycle.recipe")
    names = {record["name"] for record in report["checks"]}
    assert "lifecycle.recipe" in names
    assert "lifecycle.state_machine" not in names


def test_the_time_limit_ends_a_callback_that_hangs(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, f"{module}:Hangs", "--check", "lifecycle.completes", "--time-limit", "0.5")
    assert code == 1
    assert "longer than 0.5 s, in Hangs.on_initialize" in json.dumps(report)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["no_such_module_here:Good"], "no_such_module_here"),
        (["{module}:Gud"], "Good"),
        (["{module}:Good", "--settings", "not json"], "not JSON"),
        (["{module}:Good", "--time-limit", "0"], "above 0"),
        (["{module}:Good", "--tag", "no_such_tag"], "no_such_tag"),
        (["{module}:Good", "--check", "lifecycle.nothing"], "lifecycle.nothing"),
    ],
)
def test_bad_input_exits_with_3_and_one_line(arguments: list[str], hint: str, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["verify", *(argument.format(module=module) for argument in arguments)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 3
    assert hint in capsys.readouterr().err
