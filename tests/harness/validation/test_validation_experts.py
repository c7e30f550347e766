"""Experts are compared one by one in what transformers fuses; what transformers cannot load is judged with our reader."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from compressor import oneshot
from harness.reporting.verdict import Outcome
from harness.validation.behaviour.acceptance import check_loads
from harness.validation.format.files import check_tensors
from harness.validation.inspection import inspect_modules
from harness.validation.subject import read_subject

W4 = {"config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 8}}}}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of one layer."""
    folder = tmp_path_factory.mktemp("base") / "mixtral"
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_local_experts": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    return folder


def _compressed(base: Path, out: Path, **settings: Any) -> Path:
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], **settings}}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oneshot(base, recipe=recipe, output_dir=out)
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


def test_what_only_our_reader_loads_is_judged_with_it_and_never_passes_as_loaded(mixtral: Path, tmp_path: Path) -> None:
    subject = read_subject(mixtral, _compressed(mixtral, tmp_path / "out", scheme="W8A8"))
    record, loaded = check_loads(subject, allow_dequantize_load=False)
    assert record.outcome is Outcome.INCONCLUSIVE and "compressor.load_compressed does" in record.summary
    assert all(module.num_different == 0 for module in inspect_modules(subject, loaded))


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
