"""`harness onnx` refuses before it works: other files stay as they are, unknown words get the nearest or none, exporters talk plainly."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from harness.cli import main
from harness.onnx_graph import limits, unread
from harness.onnx_graph.census import census
from harness.onnx_graph.command import ACTIONS
from harness.onnx_graph.export import ExportFailure, export
from harness.onnx_graph.forced_skips import forced_skips
from harness.onnx_graph.node_contracts import NumericEqual
from harness.onnx_graph.output_row import output_row
from harness.spelling import did_you_mean, plain_text

BAD = {
    "export dir keep.txt": "keep.txt: a file of the kind .onnx goes there",
    "export dir out": "end the name in .onnx",
    "export dir folder.onnx": "folder.onnx: it is a folder",
    "export dir none/out.onnx": "there is no folder none",
    "export dir out.onnx": "nothing was exported: dir: no config.json was found",
    "census none": "none: there is no such file or folder",
    "census a.onnx --model-class BertModel": "model_class: BertModel was given for a graph",
    "explain a.onnx --model-class BertModel": "model_class: BertModel was given for a graph",
    "check a.onnx dir": "dir: this is a folder; give an .onnx file",
    "check a.onnx a.onnx --contract SeparateQKV": "did you mean 'separate-qkv'? choose from separate-qkv, same-block-count",
    "check a.onnx a.onnx --contract all": "there is no 'all'; choose from",
    "roundtrip a.onnx --optimizer onnxsin": "did you mean 'onnxsim'?",
    "roundtrip a.onnx --optimizer tensorrt": "'tensorrt' is none that is known; choose from",
    "roundtrip a.onnx --exporter dynamo": "--exporter: a.onnx is a graph already",
    "roundtrip a.onnx --opset 21": "opset: 21 was given for a graph",
    "roundtrip a.onnx --output-dir full": "full: it is not empty (report.html), and not an earlier report",
    "roundtrip a.onnx --output-dir keep.txt": "keep.txt: it is a file",
    "fusing-cost a.onnx --figure keep.txt": "end the name in .svg or .png",
    "fusing-cost a.onnx --figure none/out.svg": "there is no folder none",
    "run --skip fuse_qkv --json keep.txt -- true": "nothing was run: keep.txt: a file of the kind .json goes there",
    "run --skip fuse_qkv --json folder.json -- true": "folder.json: it is a folder",
    "run --skip FuseQKV -- true": "did you mean 'fuse_qkv'?",
    "run --skip foo -- true": "would ignore it in silence; `harness onnx passes --json` lists all",
    "run --skip fuse_qkv -- ./keep.txt": "is no command that can be run",
}


@pytest.fixture
def _place(attention_graph: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(attention_graph, tmp_path / "a.onnx")
    for folder in ("dir", "full", "folder.onnx", "folder.json"):
        (tmp_path / folder).mkdir()
    for file in ("keep.txt", "full/report.html"):
        (tmp_path / file).write_text("precious", encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("command", BAD)
def test_bad_words_and_places_are_refused_and_nothing_is_written(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["onnx", *command.split()]) == 2
    printed = capsys.readouterr()
    assert BAD[command] in printed.err and printed.err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("_place")
def test_a_report_is_replaced_and_an_optimizer_named_twice_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxslim")
    command = ["onnx", "roundtrip", "a.onnx", "--optimizer", "onnxslim", "--optimizer", "onnxslim", "--output-dir", "report"]
    assert main(command) == 0 and main(command) == 0
    assert capsys.readouterr().out.count("onnxslim") == 2
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.html", "report.json", "junit.xml"}


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("\x1b[31mred\x1b[0m alert\nand more")


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_what_an_exporter_wraps_in_colours_and_step_counts_comes_out_plain(exporter: str) -> None:
    with pytest.raises(ExportFailure) as caught:
        export(_Fails(), {"x": torch.ones(2)}, exporter=exporter)
    assert f"{exporter}: _Fails cannot be exported: RuntimeError: red alert; try" in str(caught.value)


def test_an_opset_and_an_axis_that_do_not_exist_are_refused() -> None:
    inputs = {"input": torch.ones(2, 3)}
    for opset in (-1, 0, 99):
        with pytest.raises(ValueError, match=f"there is no opset {opset}; choose from 1 to"):
            export(nn.Linear(3, 3), inputs, opset=opset)
    with pytest.raises(ValueError, match=r"input has no axis 2; its sizes are \[2, 3\]"):
        export(nn.Linear(3, 3), inputs, dynamic={"input": {2: "rows"}})
    with pytest.raises(ValueError, match=r"given for inputs, which is no input; did you mean .input.. the inputs are input \[2, 3\]"):
        export(nn.Linear(3, 3), inputs, dynamic={"inputs": {0: "rows"}})


def test_sizes_and_a_raised_opset_are_said(repo_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.onnx"
    assert main(["onnx", "export", str(repo_root / "golden" / "reference"), str(target), "--opset", "17"]) == 0
    said = capsys.readouterr().out
    assert "opset 18, inputs input_ids [2, 12], attention_mask [2, 12], checked" in said
    assert "note: opset 18, not 17: the exporter dynamo" in said and "note: these sizes are fixed" in said
    dynamic = ["--dynamic", "input_ids:0=batch", "--dynamic", "attention_mask:0=batch"]
    assert main(["onnx", "export", str(repo_root / "golden" / "reference"), str(target), *dynamic]) == 0
    assert "inputs input_ids [batch, 12], attention_mask [batch, 12], checked\n" in capsys.readouterr().out


def test_a_word_with_nothing_near_is_left_alone() -> None:
    assert did_you_mean("role_weight", ["role-weights", "numeric-equal"]) == "did you mean 'role-weights'? "
    assert did_you_mean("quux", ["role-weights", "numeric-equal"]) == ""
    assert plain_text("\x1b[96mThis is step\x1b[0m 1/3\n of") == "This is step 1/3 of"


SAID = {
    "NOT_SEEN": (["census", "check", "roundtrip", "explain", "passes"], [unread.__doc__, census.__doc__]),
    "EVIDENCE": (["check", "roundtrip", "explain", "passes"], [NumericEqual.__doc__]),
    "OUT_OF_REACH": (["run"], [sys.modules[forced_skips.__module__].__doc__, forced_skips.__doc__]),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_not_promised_is_said_in_the_same_words_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    actions, texts = SAID[name]
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    for action in actions:
        with pytest.raises(SystemExit):
            main(["onnx", action, "--help"])
    printed = capsys.readouterr().out.split("usage: ")[1:]
    words = "".join(getattr(limits, name).split())
    missing = [text for text in (readme, *texts, *printed) if words not in "".join((text or "").split())]
    assert len(printed) == len(actions) and not missing, missing


@pytest.mark.parametrize(
    ("error", "limit_db", "is_wrong"), [(0.03, 90.0, False), (0.033, 90.0, True), (1.0, 90.0, True), (1.0, 35.0, False)]
)
def test_the_boundary_of_numeric_equal_lies_where_it_is_said(error: float, limit_db: float, is_wrong: bool) -> None:
    """A slice with so little energy that the whole output does not notice it."""
    expected = np.random.default_rng(0).standard_normal((8, 1000))
    expected[0] *= 1e-5
    actual = expected.copy()
    actual[0] *= 1 + error
    row = output_row("y", expected, actual)
    assert row.wrong(limit_db) is is_wrong and row.sqnr_db > 100


def test_help_says_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for action in ACTIONS:
        with pytest.raises(SystemExit):
            main(["onnx", action, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert "exit codes: 0 " in said and ", 2 " in said.replace(";", ",") and "; 3 wrong arguments" in said
    with pytest.raises(SystemExit, match=r"^3$"):
        main(["onnx", "census"])
