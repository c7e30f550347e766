"""The numbers of a run go to the trackers that were asked for, and to none otherwise. Stand-ins take the place of their packages."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from compressor import oneshot, train
from compressor.cli.main import main
from compressor.errors import UserInputError

ROUND = "quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: W8A16, ignore: [lm_head]}}}"
WRITE = """
import json, pathlib

def write(*what):
    with pathlib.Path(__file__).with_name("told.jsonl").open("a") as file:
        print(json.dumps(what), file=file)
"""
WANDB = """
class Run:
    def __enter__(self): return self
    def __exit__(self, *error): write("end", error[0] is not None)
    def log(self, values, step): write("log", values, step)

def init(project, config):
    write("begin", project, config)
    return Run()
"""
MLFLOW = """
class Run:
    def __enter__(self): return self
    def __exit__(self, *error): write("end", error[0] is not None)

def active_run(): return None
def start_run(nested): return Run()
def log_dict(config, file): write("begin", "compressor", config)
def log_metrics(values, step): write("log", values, step)
"""
TENSORBOARD = """
class SummaryWriter:
    def __init__(self, log_dir): pass
    def add_text(self, name, text): write("begin", "compressor", dict(line.strip().split(": ", 1) for line in text.splitlines()[:1]))
    def add_scalar(self, name, value, step): write("log", {name: value}, step)
    def close(self): write("end", False)
"""
PACKAGES = {"wandb": WANDB, "mlflow": MLFLOW, "tensorboard": TENSORBOARD}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the stand-ins; what they are told is written there."""
    for name, text in PACKAGES.items():
        (tmp_path / f"{name}.py").write_text(WRITE + text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    # torch's own half wants the whole package behind it
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", importlib.import_module("tensorboard"))
    return tmp_path / "told.jsonl"


def _read(told: Path) -> list[Any]:
    return [json.loads(line) for line in told.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tracker_gets_every_stage(name: str, told: Path, llama_dir: Path, tokens_file: Path) -> None:
    result = oneshot(llama_dir, recipe=ROUND, dataset=tokens_file, pipeline="sequential", report_to=name)
    begin, *logs, end = _read(told)
    assert begin[1] == "compressor" and begin[2]["model"] == str(llama_dir)
    assert end == ["end", False]
    errors = {step: values["stage/error"] for _, values, step in logs if "stage/error" in values}
    compressed = {number: stage.error for number, stage in enumerate(result.stages, 1) if stage.error is not None}
    assert errors == compressed and len(errors) > 1


def test_several_trackers_get_the_loss_of_every_step_from_the_command_line(
    told: Path, llama_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "train",
        str(llama_dir),
        "--dataset",
        str(tokens_file),
        "--output-dir",
        str(tmp_path / "o"),
        "--steps",
        "2",
        "--mode",
        "eager",
    ]
    assert main([*command, "--report-to", "wandb", "--report-to", "mlflow", "--quiet", "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    logs = [values["train/loss"] for kind, *rest in _read(told) if kind == "log" for values in rest[:1] if "train/loss" in values]
    assert logs == [losses[0], losses[0], losses[1], losses[1]]


def test_a_run_that_fails_is_told_as_failed(told: Path, llama_dir: Path) -> None:
    with pytest.raises(UserInputError, match="nowhere"):
        oneshot(llama_dir, recipe=ROUND.replace("lm_head", "nowhere"), report_to="wandb")
    assert _read(told)[-1] == ["end", True]


def _break(told: Path, line: str) -> None:
    """Let the stand-in of wandb fail, where it would say that."""
    stand_in = told.with_name("wandb.py")
    text = stand_in.read_text(encoding="utf-8")
    assert line in text
    stand_in.write_text(text.replace(line, "raise LookupError('the network is gone\\nand more')"), encoding="utf-8")


def test_a_tracker_that_does_not_start_is_an_error_in_one_line(told: Path, llama_dir: Path, tmp_path: Path) -> None:
    _break(told, 'write("begin", project, config)')
    words = r"report_to: 'wandb' does not start \(LookupError: the network is gone\); correct its settings, or leave report_to out\Z"
    with pytest.raises(UserInputError, match=words):
        oneshot(llama_dir, recipe=ROUND, report_to=["mlflow", "wandb"], output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert _read(told)[-1] == ["end", True]  # of the other


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('write("log", values, step)', "at stage 1 (LookupError: the network is gone); nothing is logged after it"),
        ('write("end", error[0] is not None)', "as it finished (LookupError: the network is gone); what it was sent may not all be there"),
    ],
)
def test_a_tracker_that_fails_ends_no_run(line: str, words: str, told: Path, llama_dir: Path, tokens_file: Path, tmp_path: Path) -> None:
    keywords = {"recipe": ROUND, "dataset": tokens_file, "pipeline": "sequential"}
    plain = oneshot(llama_dir, **keywords, output_dir=tmp_path / "plain")
    _break(told, line)
    with pytest.warns(UserWarning, match="tracker wandb failed") as warned:
        result = oneshot(llama_dir, **keywords, output_dir=tmp_path / "out", report_to=["wandb", "mlflow"])
    note = f"tracker wandb failed {words}"
    assert [str(one.message) for one in warned] == [note]
    assert result.report.notes == [*plain.report.notes, note]
    assert sum(kind == "log" for kind, *_ in _read(told)) == len(result.stages) * (1 if "stage" in words else 2)  # the other gets all
    written = {path.name for path in (tmp_path / "plain").iterdir()}
    assert written == {path.name for path in (tmp_path / "out").iterdir()}
    assert all((tmp_path / "plain" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in written)


def test_a_tracker_that_fails_ends_no_training(told: Path, llama_dir: Path, tokens_file: Path, tmp_path: Path) -> None:
    _break(told, 'write("log", values, step)')
    with pytest.warns(UserWarning, match="tracker wandb failed at step 1"):
        result = train(
            llama_dir, dataset=tokens_file, output_dir=tmp_path / "out", steps=2, mode="eager", report_to="wandb", progress=False
        )
    assert len(result.losses) == 2 and "tracker wandb failed at step 1" in result.report.notes[-1]
    assert (tmp_path / "out" / "config.json").is_file()


def test_the_error_of_a_run_is_not_that_of_its_tracker(told: Path, llama_dir: Path) -> None:
    _break(told, 'write("end", error[0] is not None)')
    with pytest.warns(UserWarning, match="as it finished"), pytest.raises(UserInputError, match="nowhere"):
        oneshot(llama_dir, recipe=ROUND.replace("lm_head", "nowhere"), report_to="wandb")


def test_no_tracker_is_told_unless_asked(told: Path, llama_dir: Path) -> None:
    oneshot(llama_dir, recipe=ROUND)
    oneshot(llama_dir, recipe=ROUND, report_to="none")
    assert not told.exists()


def test_a_missing_package_and_an_unknown_name_are_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserInputError, match=r"report_to: 'mlflow' needs the package mlflow, which is not installed; pip install mlflow"):
        oneshot("nowhere", recipe=ROUND, report_to=["mlflow"])
    with pytest.raises(UserInputError, match=r"report_to: 'tensorbord' is no tracker; did you mean 'tensorboard'"):
        train("nowhere", dataset="nowhere", output_dir="out", report_to="tensorbord")
