"""Experts are compared one by one in what transformers fuses; what transformers cannot load is judged with our reader."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from compressor import oneshot
from harness.reporting.verdict import Outcome
from harness.validation.behaviour.acceptance import check_loads
from harness.validation.format.files import check_tensors
from harness.validation.format.fused import fused_again
from harness.validation.format.record import check_digests
from harness.validation.inspection import inspect_modules
from harness.validation.loading import load_with_our_reader
from harness.validation.policy import Policy
from harness.validation.serving.checks import check_serving
from harness.validation.subject import read_subject
from tests import tiny

W4 = {"config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 8}}}}

ATTENTION = {"all": {**W4["config_groups"]["all"], "targets": ["re:.*self_attn.*_proj$"]}}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of one layer."""
    folder = tmp_path_factory.mktemp("base") / "mixtral"
    with torch.random.fork_rng():
        tiny.mixtral(intermediate_size=48, num_hidden_layers=1).save_pretrained(folder)
    return folder


def _compressed(base: Path, out: Path, **settings: Any) -> Path:
    given = {name: value for name, value in {"targets": ["Linear"], "ignore": ["lm_head"], **settings}.items() if value is not None}
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": given}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oneshot(base, recipe=recipe, dataset=torch.arange(64).view(4, 16) % 32, output_dir=out)
    return out


def test_every_expert_is_compared_with_what_transformers_fused(mixtral: Path, tmp_path: Path) -> None:
    subject = read_subject(mixtral, _compressed(mixtral, tmp_path / "out", **W4))
    record, loaded = check_loads(subject, allow_dequantize_load=False)
    assert record.outcome is Outcome.PASS
    found = inspect_modules(subject, loaded)
    experts = [module for module in found if ".experts." in module.name]
    assert len(experts) == 12 and all(module.num_different == 0 for module in found)
    assert loaded is not None
    loaded.get_parameter("model.layers.0.mlp.experts.down_proj").data[2, 0, 0] += 1  # a planted error of the loader
    changed = [module.name for module in inspect_modules(subject, loaded) if module.num_different]
    assert changed == ["model.layers.0.block_sparse_moe.experts.2.w2"]


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ANNOUNCED: dict[str, tuple[dict[str, Any], str]] = {
    "int8": ({"scheme": "W8A8"}, "transformers does not load it"),
    "keys and values alone": ({"targets": None, "ignore": None, "kv_cache_scheme": KV}, "transformers does not load it"),
    "static inputs": ({"scheme": "FP8"}, "transformers does not load its input scales"),
}


@pytest.mark.parametrize("what", ANNOUNCED)
def test_what_only_our_reader_loads_is_judged_with_it_and_never_passes_as_loaded(what: str, mixtral: Path, tmp_path: Path) -> None:
    settings, said = ANNOUNCED[what]
    out = _compressed(mixtral, tmp_path / "out", **settings)
    subject = read_subject(mixtral, out)
    record, loaded = check_loads(subject, allow_dequantize_load=False)
    assert record.outcome is Outcome.INCONCLUSIVE
    assert f"{said}, as the run said beforehand; compressor.load_compressed does" in record.summary
    assert all(module.num_different == 0 for module in inspect_modules(subject, loaded))
    notes = out / "compression.json"
    notes.write_text(json.dumps(json.loads(notes.read_text("utf-8")) | {"notes": []}), "utf-8")
    assert check_loads(subject, allow_dequantize_load=False)[0].outcome is Outcome.FAIL


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.input_scale", "model.layers.0.self_attn.stray"])
def test_what_was_announced_excuses_nothing_else(name: str, mixtral: Path, tmp_path: Path) -> None:
    out = _compressed(mixtral, tmp_path / "out", scheme="FP8")
    tensors = load_file(out / "model.safetensors")
    if tensors.pop(name, None) is None:
        tensors[name] = torch.ones(1)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert check_loads(read_subject(mixtral, out), allow_dequantize_load=False)[0].outcome is Outcome.FAIL


def test_a_failure_that_nobody_announced_stays_a_failure(mixtral: Path, tmp_path: Path) -> None:
    out = _compressed(mixtral, tmp_path / "out", **W4)
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight_packed"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    record, loaded = check_loads(read_subject(mixtral, out), allow_dequantize_load=False)
    assert record.outcome is Outcome.FAIL and loaded is None


def test_experts_that_were_left_alone_are_expected_as_in_the_base(mixtral: Path, tmp_path: Path) -> None:
    out = _compressed(mixtral, tmp_path / "out", targets=["re:.*self_attn.*_proj$"], scheme="FP8_DYNAMIC")
    subject = read_subject(mixtral, out)
    assert sorted(name.rpartition(".")[2] for name in subject.modules) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert check_tensors(subject).outcome is Outcome.PASS


def test_experts_that_were_fused_in_the_compressed_files_are_compared_one_by_one(mixtral: Path, tmp_path: Path) -> None:
    out = _compressed(mixtral, tmp_path / "out", targets=None, ignore=None, config_groups=ATTENTION)
    subject = read_subject(mixtral, out)
    assert check_tensors(subject).outcome is Outcome.PASS
    assert check_digests(subject.compressed.stored).outcome is Outcome.PASS
    assert check_loads(subject, allow_dequantize_load=False)[0].outcome is Outcome.PASS
    said = next(record for record in check_serving(subject, "vllm", Policy()) if record.name == "serving.layers")
    experts = "model.layers.0.block_sparse_moe.experts"
    assert list(said.findings) == [f"{experts}: lies fused in the file, and vLLM 0.33.0 reads the experts of most architectures one by one"]
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.experts.gate_up_proj"][2, 50, 3] += 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    damaged = read_subject(mixtral, out)
    record = check_tensors(damaged)
    assert record.outcome is Outcome.FAIL and len(record.findings) == 1
    assert record.findings[0].startswith("model.layers.0.block_sparse_moe.experts.2.w3.weight:")
    assert check_digests(damaged.compressed.stored).outcome is Outcome.FAIL


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random gpt-oss of one layer, whose files hold experts fused, transposed and gate beside up; and the same in 4 bits, one by one."""
    folder = tmp_path_factory.mktemp("fused")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_local_experts": 4, "head_dim": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder / "base")
    return folder / "base", _compressed(folder / "base", folder / "out", **W4)


def test_experts_that_the_base_holds_fused_are_compared_one_by_one(gpt_oss: tuple[Path, Path]) -> None:
    subject = read_subject(*gpt_oss)
    assert sum(".experts." in name for name in subject.modules) == 12
    assert check_tensors(subject).outcome is Outcome.PASS
    model = load_with_our_reader(gpt_oss[1]).model
    found = [module for module in inspect_modules(subject, model) if ".experts." in module.name]
    assert len(found) == 12 and all(module.num_different == 0 and module.sqnr_db is not None and module.sqnr_db > 15 for module in found)
    with safe_open(gpt_oss[0] / "model.safetensors", framework="pt") as file:
        whole = file.get_tensor("model.layers.0.mlp.experts.gate_up_proj")
        bias = file.get_tensor("model.layers.0.mlp.experts.gate_up_proj_bias")
    assert torch.equal(subject.base.tensor("model.layers.0.mlp.experts.2.up_proj.weight"), whole[2, :, 1::2].T)
    assert torch.equal(subject.base.tensor("model.layers.0.mlp.experts.3.gate_proj.bias"), bias[3, 0::2])


@pytest.mark.parametrize("what", ["two experts exchanged", "gate for up", "a bias"])
def test_experts_in_the_place_of_others_are_found(what: str, gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    base, out = gpt_oss
    shutil.copytree(out, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    layer = "model.layers.0.mlp.experts"
    pairs = {"two experts exchanged": ("1.up_proj.", "2.up_proj."), "gate for up": ("1.up_proj.", "1.gate_proj."), "a bias": ("", "")}
    for name in [name for name in tensors if name.startswith(f"{layer}.{pairs[what][0]}")] if what != "a bias" else []:
        other = name.replace(*pairs[what])
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
    if what == "a bias":
        tensors[f"{layer}.1.down_proj.bias"][3] += 0.01
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    subject = read_subject(base, tmp_path / "out")
    worst = min(module.sqnr_db or 0.0 for module in inspect_modules(subject, None))
    assert check_tensors(subject).outcome is Outcome.FAIL if what == "a bias" else worst < 3


def test_fused_experts_come_back_as_they_were(gpt_oss: tuple[Path, Path]) -> None:
    subject = read_subject(*gpt_oss)
    made = fused_again({name: subject.base.tensor(name) for name in subject.base.entries}, subject.base)
    files = load_file(gpt_oss[0] / "model.safetensors")
    assert made.keys() == files.keys() and all(torch.equal(made[name], files[name]) for name in files)
