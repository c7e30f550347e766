"""Explain names the guilty passes, the smallest set of skips, and what each of them holds back."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import helper

from compressor.errors import UserInputError
from harness.cli import main
from harness.onnx_graph.contracts.roles import SeparateQKV
from harness.onnx_graph.roundtrip.explain import explain
from harness.onnx_graph.roundtrip.optimizers import optimize

pytest.importorskip("onnxsim")


def test_two_passes_take_turns_and_both_must_be_skipped(attention_graph: onnx.ModelProto) -> None:
    explanation = explain(attention_graph, SeparateQKV())
    assert explanation.kept and set(explanation.skips) == {"fuse_qkv", "fuse_attention"}
    assert explanation.num_calls <= 12
    assert "packed as columns" in explanation.masked["fuse_qkv"].message
    assert "absorbed by Attention" in explanation.masked["fuse_attention"].message
    assert SeparateQKV().check(attention_graph, optimize(attention_graph, "onnxsim", explanation.skips)).holds
    for name in explanation.skips:
        rest = [other for other in explanation.skips if other != name]
        assert not SeparateQKV().check(attention_graph, optimize(attention_graph, "onnxsim", rest)).holds, f"{name} is not needed"


def test_other_backends_have_their_own_answer(attention_graph: onnx.ModelProto) -> None:
    pytest.importorskip("onnxoptimizer")
    assert explain(attention_graph, SeparateQKV(), "onnxoptimizer").skips == ("fuse_qkv",)
    held = explain(attention_graph, SeparateQKV(), "ort")
    assert held.kept and not held.skips and "holds with nothing skipped" in held.text()
    with pytest.raises(UserInputError, match="choose from onnxsim, onnxoptimizer, ort"):
        explain(attention_graph, SeparateQKV(), "onnxslim")


def test_the_search_finds_a_guilty_pass_that_no_name_gives_away(attention_graph: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.onnx_graph.roundtrip import explain as module
    from harness.onnx_graph.roundtrip.optimizers import Optimized

    passes = [f"pass_{number}" for number in range(40)]

    def run(model: onnx.ModelProto, name: str, skip: list[str], *, log: bool) -> Optimized:
        broken = not {"pass_17", "pass_31"} <= set(skip)
        result = optimize(model, "onnxsim") if broken else model
        return Optimized(result, tuple(one for one in passes if one not in skip), 0.0)

    monkeypatch.setattr(module, "run_optimizer", run)
    monkeypatch.setattr(module, "effective_passes", lambda backend: type("P", (), {"effective": tuple(passes), "version": "0"}))
    explanation = explain(attention_graph, SeparateQKV())
    assert explanation.kept and set(explanation.skips) == {"pass_17", "pass_31"}


def test_a_model_that_is_fused_itself_blames_no_pass(attention_graph: onnx.ModelProto) -> None:
    explanation = explain(optimize(attention_graph, "onnxsim"), SeparateQKV())
    assert not explanation.kept and not explanation.skips and explanation.num_calls == 0
    assert "before any optimizer" in explanation.text()


def test_an_optimizer_that_crashes_is_not_analysed(
    attention_graph: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = attention_graph.graph
    graph.node.append(helper.make_node("NoSuchOperator", ["y"], ["z"]))
    onnx.save(attention_graph, tmp_path / "m.onnx")
    assert main(["onnx", "explain", str(tmp_path / "m.onnx"), "--backend", "ort"]) == 2
    assert "it failed with" in capsys.readouterr().out


def test_the_commands_have_exit_codes_and_json(
    attention_graph: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = str(tmp_path / "before.onnx"), str(tmp_path / "after.onnx")
    onnx.save(attention_graph, before)
    onnx.save(optimize(attention_graph, "onnxsim"), after)
    assert main(["onnx", "census", before]) == 0 and "SEPARATE" in capsys.readouterr().out
    assert main(["onnx", "census", after, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"FUSED": 1}
    assert main(["onnx", "check", before, after]) == 1
    assert "packed as columns" in capsys.readouterr().out
    assert main(["onnx", "check", before, after, "--contract", "same-block-count,numeric-equal", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holding"] == "holds"
    assert main(["onnx", "check", before, str(tmp_path / "none.onnx")]) == 3
    assert main(["onnx", "check", before, after, "--contract", "seperate-qkv"]) == 3
    assert "did you mean 'separate-qkv'" in capsys.readouterr().err
    assert main(["onnx", "explain", before, "--contract", "separate-qkv,same-block-count", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skips"] == ["fuse_qkv", "fuse_attention"]
    assert main(["onnx", "explain", after, "--backend", "onnxsim"]) == 1
