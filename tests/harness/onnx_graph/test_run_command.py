"""`harness onnx run` protects a command, and says when it protected nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest

from harness.cli import main

pytest.importorskip("onnxsim")

SCRIPT = "import sys, onnx, onnxsim; onnx.save(onnxsim.simplify(onnx.load(sys.argv[1]))[0], sys.argv[2])"


def _command(attention_graph: onnx.ModelProto, folder: Path, code: str = SCRIPT) -> list[str]:
    onnx.save(attention_graph, folder / "in.onnx")
    return ["--", sys.executable, "-c", code, str(folder / "in.onnx"), str(folder / "out.onnx"), "", " "]  # as unset variables give


def test_the_command_keeps_its_projections_and_the_calls_are_written(
    attention_graph: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "calls.json"
    skip = "fuse_qkv,fuse_attention"
    assert main(["onnx", "run", "--skip", skip, "--json", str(report), *_command(attention_graph, tmp_path)]) == 0
    kept = onnx.load(tmp_path / "out.onnx")
    assert sum(node.op_type == "MatMul" for node in kept.graph.node) == 6
    assert "1 call of an optimizer, 1 of them with forced skips" in capsys.readouterr().out
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["exit_code"] == 0 and set(written["calls"][0]["used"]) >= set(skip.split(","))


def test_a_command_that_calls_no_optimizer_or_fails_is_not_a_pass(
    attention_graph: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["onnx", "run", "--skip", "fuse_qkv", *_command(attention_graph, tmp_path, "pass")]) == 2
    assert "nothing was protected" in capsys.readouterr().err
    assert main(["onnx", "run", "--skip", "fuse_qkv", *_command(attention_graph, tmp_path, "raise SystemExit(7)")]) == 2
    assert "exit code 7" in capsys.readouterr().err
    swallowed = "import contextlib, onnxsim\nwith contextlib.suppress(TypeError): onnxsim.onnxsim_cpp2py_export.simplify(None, b'', [])"
    assert main(["onnx", "run", "--skip", "fuse_qkv", *_command(attention_graph, tmp_path, swallowed)]) == 2
    assert "nothing was protected: every call of onnxsim failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--skip", "fuse_qvk", "--", "true"], "did you mean 'fuse_qkv'"),
        (["--skip", "fuse_qkv", "--", "no-such-command"], "'no-such-command' is no command that can be run"),
    ],
)
def test_bad_input_is_exit_code_3_with_the_reason(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", "run", *arguments]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--skip", "fuse_qkv"], ["--skip", "fuse_qkv", "--"]])
def test_a_missing_command_is_a_wrong_argument(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", "run", *arguments]) == 3
    assert "no command was given" in capsys.readouterr().err
