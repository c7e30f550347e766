"""`harness verify package.module:MyModifier` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.cli import main

_MODULE = """
from compressor.lifecycle import Modifier

class Good(Modifier):
    def on_initialize(self, state):
        return True

class Mute(Modifier):
    size: int = 1
    def on_initialize(self, state):
        pass

fresh = Good()
number = 3
"""
WORKER = "harness.lifecycle.driving.probes:CalibratingWorker"
QUICK = ["--check", "lifecycle.completes"]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_modifiers.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_modifiers", raising=False)


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        (["my_modifiers:Good", *QUICK], 0, "Good: pass"),
        (["my_modifiers:fresh", *QUICK], 0, "Good: pass"),
        (["my_modifiers:Mute", *QUICK], 1, "returned None"),
        (["my_modifiers:Mute", *QUICK, "--settings", '{"size": 2}'], 1, "returned None"),
        (["my_modifiers:number"], 1, "no modifier"),
        (["compressor.modifiers.gptq:GPTQModifier"], 2, "neither scheme nor config_groups"),
        (["compressor.modifiers.quantization:QuantizationModifier", *QUICK, "--settings", '{"scheme": "W8A16"}'], 0, "pass"),
        ([WORKER, "--check", "lifecycle.state_machine", "--profile", "dev", "--time-limit", "30"], 0, "steps"),
        ([WORKER, "--check", "lifecycle.already_quantized", "--tag", "idempotent"], 2, "declares 'idempotent'"),
    ],
)
def test_the_exit_code_is_the_verdict(given: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *given]) == code
    assert says in " ".join(capsys.readouterr().out.split())


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "my_modifiers:Mute", *QUICK, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "regression"
    assert data["checks"][1]["name"] == "lifecycle.completes"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["my_modifiers:Goood"], "did you mean 'Good'"),
        (["my_modifiers"], "package.module:Name"),
        (["no_such_module:Good"], "cannot be imported"),
        (["my_modifiers:Mute", "--settings", '{"sice": 2}'], "sice"),
        (["my_modifiers:fresh", "--settings", '{"size": 2}'], "no modifier class"),
        (["my_modifiers:Good", "--check", "completes"], "there is no check"),
        (["my_modifiers:Good", "--tag", "inplace"], "did you mean 'in_place'"),
    ],
)
def test_bad_input_gives_no_verdict(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *given]) == 3
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("given", [["--settings", "{"], ["--settings", "[]"], ["--time-limit", "0"], ["--profile", "ci"]])
def test_arguments_that_make_no_sense(given: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["verify", "my_modifiers:Good", *given])
    assert error.value.code == 3
