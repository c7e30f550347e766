"""`compressor mappings`: what may move, from a config alone, drawn and as JSON; mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compressor.cli.main import main
from compressor.entrypoints.mappings import find_mappings
from compressor.json_text import to_json
from compressor.model.loading import stand_in
from tests import tiny

NORM = "model.layers.*.input_layernorm (2) -> model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj, "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nothing but the config of a Llama."""

    tiny.config("llama", hidden_size=16, intermediate_size=32, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_config_alone_gives_lines_a_picture_and_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "out.svg"
    assert main(["mappings", str(folder), "--draw", str(drawing)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("LlamaForCausalLM: 9 scales may move, 5 kinds; 11 may not\nweights: random (the folder holds no weights)\n")
    assert NORM in text and "heads of 4, each read 2 times" in text and "not model.layers.*.mlp.gate_proj (2): it meets " in text
    assert f"picture: {drawing} (drawn by " in text and "up_proj (2)" in drawing.read_text()
    assert main(["mappings", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["pairs"]) == 9 and len(told["refused"]) == 11 and told["num_left_out"] == 0
    assert told == json.loads(to_json(find_mappings(folder).to_dict()))


def test_hidden_states_that_may_be_turned_stand_in_all_three(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "out.svg"
    assert main(["mappings", str(folder), "--draw", str(drawing)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("hidden states"))
    assert line.startswith("hidden states of 16 channels may be turned: written by model.embed_tokens, model.layers.*.self_attn.o_proj, ")
    assert "read by model.layers.*.input_layernorm, " in line and "modeling_llama.py:" in line
    assert "hidden states of 16 channels may be turned" in drawing.read_text()
    assert main(["mappings", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["basis"]["size"] == 16 and len(told["basis"]["norms"]) == 5 and told["why_no_basis"] == ""


def test_what_is_in_the_way_of_turning_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.config("gemma2", hidden_size=16, intermediate_size=32, head_dim=4, architectures=["Gemma2ForCausalLM"]).save_pretrained(
        tmp_path / "model"
    )
    assert main(["mappings", str(tmp_path / "model")]) == 0
    assert "hidden states may not be turned: model.layers.0.post_attention_layernorm adds" in capsys.readouterr().out


def test_norms_of_one_name_that_others_read_are_told_apart(tmp_path: Path) -> None:
    tiny.config("t5", d_kv=4, num_heads=4, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    report = find_mappings(tmp_path)
    norms = [line for line in report.lines() if line.startswith("decoder.block.*.layer.*.layer_norm (2) -> ")]
    read = [line.partition(" -> decoder.block.*.layer.*.")[2].split(",")[0] for line in norms]
    assert read == ["SelfAttention.q", "EncDecAttention.q", "DenseReluDense.wi"]
    drawn = report.picture()
    assert len(drawn.pairs) == len(report.kinds) == 10 and drawn.ignored is not None
    left, right = drawn.pairs[1]
    assert left.title == "encoder.block.*.layer.*.layer_norm (2)" and right.lines[0] == "encoder.block.*.layer.*.SelfAttention.q"
    said = " ".join(drawn.ignored.lines).replace("\N{NO-BREAK SPACE}", "")
    assert all(one[0].why in said for one in report.refused_kinds.values()) and report.why_no_basis in said


def test_class_and_modality(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mappings", str(folder), "--model-class", "LlamaModel", "--modality", "text"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("LlamaModel: 8 scales may move") and "not model.norm (1): it meets the model's output" in text.replace(
        "norm", "model.norm"
    )


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: str) -> str:
        assert main(["mappings", *words]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "is not a folder" in error(str(tmp_path / "nothing"))
    assert "reads no images" in error(str(folder), "--modality", "vision")
    assert "no .svg file" in error(str(folder), "--draw", str(tmp_path / "out.png"))
    config = json.loads((folder / "config.json").read_text())
    own = {
        "model_type": "own_llama",
        "architectures": ["Own"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    assert "trust_remote_code" in error(str(folder))
    assert main(["mappings", str(folder), "--trust-remote-code"]) == 0
    assert capsys.readouterr().out.startswith("Own: 9 scales may move")


def test_a_large_model_is_stood_in_for_by_a_layer_of_each_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(folder)
    config.num_hidden_layers = 6
    config.save_pretrained(folder)
    whole = find_mappings(folder)
    monkeypatch.setattr(stand_in, "MAX_RANDOM", 1000)
    report = find_mappings(folder)
    assert report.num_left_out == 4 and "4 layers that repeat earlier ones are left out" in report.weights
    assert [first for first, *_ in report.kinds] == [first for first, *_ in whole.kinds]
    monkeypatch.setattr(stand_in, "MAX_DIFFERING", 1000)
    with pytest.raises(ValueError, match="too many to be given values"):
        find_mappings(folder)
