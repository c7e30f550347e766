"""`compressor trace`: every flag changes what it says, a config alone is enough, and mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor.cli.main import main
from compressor.entrypoints.trace import trace_model
from compressor.errors import TracingError
from tests import tiny


@pytest.fixture(scope="module")
def config_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Nothing but the configs of two Llamas, of 6 and of 28 layers."""

    folders = {}
    for num_layers in (6, 28):
        folders[num_layers] = tmp_path_factory.mktemp("config")
        tiny.config(
            "llama",
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=2,
            num_hidden_layers=num_layers,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folders[num_layers])
    return folders


class Trace:
    """Runs the verb."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def text(self, *flags: str) -> str:
        assert main(["trace", str(self.folder), *flags]) == 0
        return self.capsys.readouterr().out

    def json(self, *flags: str) -> dict[str, Any]:
        return dict(json.loads(self.text("--json", *flags)))

    def error(self, *flags: str) -> str:
        assert main(["trace", str(self.folder), *flags]) == 1
        lines = self.capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]


@pytest.fixture
def trace(config_dirs: dict[int, Path], capsys: pytest.CaptureFixture[str]) -> Trace:
    return Trace(config_dirs[6], capsys)


def test_a_config_alone_gives_29_subgraphs_and_a_picture(
    config_dirs: dict[int, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = Trace(config_dirs[28], capsys)
    text = trace.text("--engine", "graph", "--draw", str(tmp_path / "out.svg"), "--ignore", "lm_head")
    assert text.startswith("traced into 29 subgraphs\n")
    assert "weights: random (the folder holds no weights)" in text
    assert "model.layers repeats LlamaDecoderLayer 28x" in text
    assert "masking_utils.py:" in text and "of one batch live at subgraph 1 (model.layers.0)" in text
    assert f"picture:  {tmp_path / 'out.svg'} (drawn by " in text
    picture = (tmp_path / "out.svg").read_text()
    assert "subgraphs 2 to 27: 26 alike" in picture and "ignored: stays as it is" in picture
    assert "no .svg file" in trace.error("--draw", str(tmp_path / "out.png"))


def test_engine_and_print(trace: Trace) -> None:
    graph, suspend = trace.text("--engine", "graph", "--print"), trace.text("--engine", "suspend", "--print")
    assert "| graph():" in graph and "| graph():" not in suspend
    for text in (graph, suspend):
        assert "subgraph 6: model.layers.5 (LlamaDecoderLayer)" in text
        assert "in:  hidden_states [2, 12, 16] float32, 1.5 kB, given out by subgraph 5" in text


def test_targets(trace: Trace) -> None:
    named = trace.json("--sequential-targets", "LlamaMLP")
    assert named["num_subgraphs"] == 7 and named["targets"][0] == "model.layers.0.mlp"
    grouped = trace.json("--targets-per-subgraph", "4")
    assert grouped["num_subgraphs"] == 3 and len(grouped["stages"][0]["targets"]) == 4
    ignored = trace.json("--ignore", r"re:model\.layers\.[0-2]$", "lm_head")
    assert ignored["num_subgraphs"] == 4 and "lm_head" in ignored["ignored"] and "3 of these are ignored" in ignored["reason"]


def test_variants_leaves_and_verification(trace: Trace) -> None:
    few = ("--sequential-targets", "model.layers.0")
    plain = trace.json(*few, "--verify", "off")
    assert plain["num_variants"] == 2 and "0 batches verified" in plain["planning"]
    assert "2 batches verified" in trace.json(*few, "--verify", "all")["planning"]
    assert trace.json(*few, "--max-variants", "1")["engine"] == "suspend"
    leaf = trace.json(*few, "--leaf", "transformers.masking_utils:create_causal_mask")
    assert any("create_causal_mask" in one["name"] for one in leaf["leaves"])
    assert len(leaf["guards"]) < len(plain["guards"])


def test_class_modality_and_dataset(trace: Trace, tmp_path: Path) -> None:
    assert trace.json()["model_class"] == "LlamaForCausalLM"
    assert trace.json("--model-class", "LlamaModel", "--modality", "text")["model_class"] == "LlamaModel"
    assert "reads no images" in trace.error("--modality", "vision")
    arrays = {"input_ids": torch.arange(30).reshape(5, 6), "attention_mask": torch.ones(5, 6, dtype=torch.int64)}
    save_file({name: array[:0] for name, array in arrays.items()}, tmp_path / "none.safetensors")
    assert "is empty, of shape [0, 6]; give at least one row" in trace.error("--dataset", str(tmp_path / "none.safetensors"))
    save_file(arrays, tmp_path / "in.safetensors")
    assert "attention_mask (5, 6), input_ids (5, 6)" in trace.json("--dataset", str(tmp_path / "in.safetensors"))["batches"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5]}\n')
    assert "2 samples of the dataset: input_ids (1, 3)" in trace.json("--dataset", str(rows))["batches"]
    assert "holds text" in trace.error("--dataset", str(rows), "--modality", "audio")


def test_mistakes_are_one_line(trace: Trace, tmp_path: Path) -> None:
    assert "model: --ignore 'lm_haed' matches no module" in trace.error("--ignore", "lm_haed")
    assert "every layer that could be a target is ignored" in trace.error("--ignore", "LlamaDecoderLayer")
    assert "are ignored as well" in trace.error("--ignore", "LlamaDecoderLayer", "--sequential-targets", "LlamaDecoderLayer")
    trace.folder = tmp_path / "nothing"
    assert "is not a folder" in trace.error("--trust-remote-code")


def test_targets_that_no_batch_reaches_are_named_with_the_modality_that_would() -> None:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = tiny.config("llama", num_key_value_heads=1, **sizes)  # type: ignore[arg-type]
    vision = CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=16, **sizes)  # type: ignore[arg-type]
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=60, image_token_id=60))
    report = trace_model(model.eval())
    towers = [f"model.vision_tower.encoder.layers.{index}" for index in range(2)]
    assert report.to_dict()["unreached"] == dict.fromkeys(towers, "vision") and len(report.stops) == 2
    assert any(line.startswith("unreached: ") and line.endswith("--modality vision reaches them") for line in report.lines())
    assert trace_model(model, modality="vision").to_dict()["unreached"] == {}
    with pytest.raises(TracingError, match=r"no batch calls any of the sequential targets .*; --modality vision reaches some"):
        trace_model(model, sequential_targets=["CLIPEncoderLayer"])


def test_why_no_batch_of_a_modality_can_be_made_is_said_with_the_targets_that_it_might_reach() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 64, "num_key_value_heads": 1, "head_dim": 8, **sizes}
    vision = {"image_size": 32, "patch_size": 8, **sizes}  # 16 patches, of which no 256 tokens can be pooled
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=60, mm_tokens_per_image=256)
    report = trace_model(Gemma3ForConditionalGeneration(config).eval())
    told = next(line for line in report.lines() if line.startswith("unreached: "))
    assert (
        "--modality vision is not possible (Gemma3ForConditionalGeneration: cannot run a vision batch made from its config (stride" in told
    )
