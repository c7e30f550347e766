"""Checkpoints with experts: transformers reads back what was in memory, or the run says beforehand that it will not, and our reader does"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from compressor import load_compressed, oneshot
from compressor.entrypoints.oneshot import OneshotResult
from compressor.errors import ModelError
from compressor.model.checkpoints.format import unpacks_as_it_reads
from compressor.model.experts.unfuse import UnfusedModel, unfuse_into
from tests import tiny

MoE = Callable[..., nn.Module]
IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(5))
W4 = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}}
FP8 = {"weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}}


def _compress(model: nn.Module, out: Path, groups: dict[str, Any] | str, ignore: list[str], *, quiet: bool = True) -> OneshotResult:
    settings: dict[str, Any] = {"scheme": groups} if isinstance(groups, str) else {"config_groups": groups}
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"targets": ["Linear"], "ignore": ignore, **settings}}}}
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("error")
        return oneshot(model, recipe=recipe, output_dir=out)


def _all(scheme: dict[str, Any]) -> dict[str, Any]:
    return {"all": {"targets": ["Linear"], **scheme}}


def _reloaded(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return model.eval(), {key: value for key, value in info.items() if value}


def _same(left: nn.Module, right: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(left(IDS).logits, right(IDS).logits)


def _close(left: nn.Module, right: nn.Module, atol: float = 1e-6) -> bool:
    """Equal but for the order of sums: products of floats depend on where weights lie in memory, and on whether one is made of two."""
    with torch.no_grad():
        return torch.allclose(left(IDS).logits, right(IDS).logits, rtol=0, atol=atol)


def _same_weights(fused: nn.Module, ours: nn.Module) -> bool:
    """Every weight of a model of transformers, its experts taken apart, bit for bit that of ours. Changes the first model."""
    unfuse_into(UnfusedModel(fused))
    pairs = [(layer.weight, ours.get_submodule(name)) for name, layer in fused.named_modules() if isinstance(layer, nn.Linear)]
    return len(pairs) > 10 and all(
        torch.equal(weight, getattr(own, "dequantized_weight", lambda own=own: own.weight)()) for weight, own in pairs
    )


def _keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1.weight_packed"),
        ("qwen3_moe", "model.layers.0.mlp.experts.3.gate_proj.weight_packed"),
        ("deepseek_v3", "model.layers.1.mlp.experts.3.gate_proj.weight_packed"),
    ],
)
def test_transformers_reads_packed_experts_back_bit_for_bit(tiny_moe: MoE, tmp_path: Path, kind: str, stored: str) -> None:
    result = _compress(tiny_moe(kind), tmp_path / "out", _all(W4), ["lm_head"])
    assert stored in _keys(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dequantize"] is True
    model, complaints = _reloaded(tmp_path / "out")
    assert complaints == {}
    assert _close(model, result.model) and _same_weights(model, result.model)
    assert _same(load_compressed(tmp_path / "out"), result.model)
    assert _same(load_compressed(tmp_path / "out", model_class=type(model).__name__), result.model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_transformers_reads_experts_in_mxfp4_as_bfloat16(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny.mixtral(hidden_size=64, intermediate_size=64).to(dtype)
    is_told = dtype != torch.bfloat16 and unpacks_as_it_reads()
    with pytest.warns(UserWarning, match="keeps quantized experts .* in bfloat16, whatever") if is_told else nullcontext():
        result = _compress(model, tmp_path / "out", "MXFP4A16", ["lm_head"], quiet=not is_told)
    assert any("in bfloat16" in note for note in result.report.notes) == (dtype != torch.bfloat16)
    again, complaints = _reloaded(tmp_path / "out")
    experts = [tensor.dtype for name, tensor in again.state_dict().items() if ".experts." in name]
    assert complaints == {} and experts and set(experts) == {torch.bfloat16}
    assert dtype != torch.bfloat16 or _same_weights(again, result.model)
    assert _close(load_compressed(tmp_path / "out"), result.model, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "scheme", "ignore"),
    [
        ("mixtral", W4, ["lm_head", "re:.*experts.*"]),
        ("gpt_oss", W4, ["lm_head", "re:.*experts.*"]),
        ("qwen3_moe", FP8, ["lm_head", "re:.*experts.*"]),
        ("deepseek_v3", W4, ["lm_head", r"re:.*experts\..*down_proj"]),
        ("mixtral", W4, ["lm_head", "re:.*self_attn.*"]),
        ("qwen3_moe", FP8, ["lm_head"]),
    ],
)
def test_floats_beside_quantized_layers_are_read_back(
    tiny_moe: MoE, tmp_path: Path, kind: str, scheme: dict[str, Any], ignore: list[str]
) -> None:
    is_told = (kind, ignore[-1]) == ("mixtral", "re:.*experts.*")  # that servers do not find them
    with pytest.warns(UserWarning, match="stay floats and are stored fused") if is_told else nullcontext():
        result = _compress(tiny_moe(kind), tmp_path / "out", _all(scheme), ignore, quiet=not is_told)
    model, complaints = _reloaded(tmp_path / "out")
    assert complaints == {}
    # Before 5.21 transformers unpacks experts of 8-bit floats to bfloat16, also in a model that computes in float32 as this one.
    is_rounded = scheme is FP8 and ignore == ["lm_head"] and not unpacks_as_it_reads()
    assert _close(model, result.model, atol=1e-2 if is_rounded else 1e-6)
    assert _close(load_compressed(tmp_path / "out"), result.model)


@pytest.mark.parametrize("scheme", ["NVFP4", "NVFP4A16", "MXFP4A16", "MXFP8A16", "W8A8", "FP8"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_stay_floats_are_read_back_beside_any_scheme_and_servers_are_told_of_each(
    tmp_path: Path, kind: str, scheme: str
) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16} | ({"intermediate_size": 64} if kind == "mixtral" else {"moe_intermediate_size": 64})
    model = {"mixtral": tiny.mixtral, "qwen3_moe": tiny.qwen3_moe}[kind](**sizes).to(torch.bfloat16)
    base = {name: value.clone() for name, value in model.state_dict().items() if "experts" in name}
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"targets": ["re:.*self_attn.*_proj$"], "scheme": scheme}}}}
        result = oneshot(tmp_path / "base", recipe=recipe, dataset=IDS, output_dir=tmp_path / "out")
    again, complaints = _reloaded(tmp_path / "out")
    found = again.state_dict()
    assert complaints == {} and base and all(torch.equal(found[name], value) for name, value in base.items())
    assert _same(load_compressed(tmp_path / "out"), result.model)
    said = [note for note in result.report.notes if "stay floats and are stored fused, as transformers loads them" in note]
    loads_singly = scheme in ("MXFP8A16", "FP8")
    assert len(said) == (not loads_singly) and any(".experts.0." in key for key in _keys(tmp_path / "out")) is loads_singly
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    single = "model.layers.0.mlp.experts.0.gate_proj"  # as vLLM asks
    assert any(re.match(pattern.removeprefix("re:"), single) for pattern in ignore if pattern.startswith("re:"))


def test_experts_may_have_a_scheme_of_their_own(tiny_moe: MoE, tmp_path: Path) -> None:
    groups = {"dense": {"targets": [r"re:.*self_attn\.[qkvo]_proj"], **FP8}, "experts": {"targets": [r"re:.*\.experts\.\d+\.w[123]"], **W4}}
    result = _compress(tiny_moe("mixtral"), tmp_path / "out", groups, [])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    patterns = [target for group in config["config_groups"].values() for target in group["targets"] if target.startswith("re:")]
    assert patterns and all("experts" in pattern for pattern in patterns)
    model, complaints = _reloaded(tmp_path / "out")
    assert complaints == {}
    assert _close(model, result.model) and _same_weights(model, result.model)
    assert _same(load_compressed(tmp_path / "out"), result.model)


@pytest.mark.parametrize(
    ("kind", "scheme", "ignore", "told"),
    [
        ("gpt_oss", _all(W4), ["lm_head"], "no rule that merges single experts into GptOssExperts"),
        ("mixtral", "W8A8", ["lm_head"], "unpacks symmetric pack-quantized, fp8 and mxfp4 weights, not int-quantized"),
        ("qwen3_moe", _all(W4), ["lm_head", r"re:.*experts\.2\.down_proj"], "stay floats while others are quantized"),
    ],
)
def test_what_transformers_cannot_read_is_said_before_the_run_and_read_by_us(
    tiny_moe: MoE, tmp_path: Path, kind: str, scheme: Any, ignore: list[str], told: str
) -> None:
    with pytest.warns(UserWarning, match=f"transformers 5.23 will not load these experts.*{told}"):
        result = _compress(tiny_moe(kind), tmp_path / "out", scheme, ignore, quiet=False)
    assert any(told in note for note in result.report.notes)
    loaded = load_compressed(tmp_path / "out")
    assert _same(loaded, result.model)
    wanted = result.model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()


def test_quantized_inputs_that_transformers_drops_are_said(tiny_moe: MoE, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="inputs are not quantized there"):
        result = _compress(tiny_moe("mixtral"), tmp_path / "out", "FP8_DYNAMIC", ["lm_head"], quiet=False)
    model, complaints = _reloaded(tmp_path / "out")
    assert complaints == {}
    assert not _close(model, result.model)
    assert _same(load_compressed(tmp_path / "out"), result.model)


@pytest.mark.parametrize("fault", ["missing", "left over", "another shape"])
def test_our_reader_never_makes_numbers_up(tiny_moe: MoE, tmp_path: Path, fault: str) -> None:
    _compress(tiny_moe("qwen3_moe"), tmp_path / "out", _all(W4), ["lm_head"])
    path, key = tmp_path / "out" / "model.safetensors", "model.layers.0.mlp.experts.3.up_proj.weight_scale"
    tensors = load_file(path)
    if fault == "missing":
        del tensors[key.replace("weight_scale", "weight_packed")]
    elif fault == "left over":
        tensors["model.layers.0.mlp.experts.9.up_proj.weight_packed"] = tensors[key].clone()
    else:
        tensors[key] = tensors[key][:, :1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"1 tensors are .*{fault}"):
        load_compressed(tmp_path / "out")


def test_a_folder_that_is_not_compressed_is_refused(tiny_moe: MoE, tmp_path: Path) -> None:
    tiny_moe("qwen3_moe").save_pretrained(tmp_path / "float")  # type: ignore[operator]
    with pytest.raises(ModelError, match="names no compressed-tensors groups"):
        load_compressed(tmp_path / "float")
