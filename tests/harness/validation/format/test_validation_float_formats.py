"""The independent decoder reads fp4, the MX formats, NVFP4 and blocks of fp8 as the layers that wrote them, and sees what is wrong."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor import oneshot
from compressor.model.checkpoints.format import quantization_config
from compressor.nn import QuantizedLayer, quantized
from compressor.numerics import make_observer, preset_scheme
from harness.reporting.verdict import Outcome
from harness.validation.behaviour.acceptance import check_accepted
from harness.validation.format.decoder import decode_module, expected_parts, float8_values
from harness.validation.format.files import check_tensors
from harness.validation.format.scheme import WeightScheme, fp4_as_fp8, read_config_groups
from harness.validation.policy import Policy
from harness.validation.subject import read_subject
from harness.validation.weights import check_weights

PRESETS = ("FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP4XFP8", "MXFP8", "MXFP8A16")


def stored(preset: str, rows: int = 7, columns: int = 384, dtype: torch.dtype = torch.bfloat16) -> tuple[QuantizedLayer, WeightScheme]:
    linear, scheme, inputs = nn.Linear(columns, rows, bias=False, dtype=dtype), preset_scheme(preset), None
    with torch.no_grad():
        linear.weight.copy_(torch.rand(linear.weight.shape, generator=torch.Generator().manual_seed(rows)) * 4 - 2)
        linear.weight[0] = 0
    args = scheme.input_activations
    if args is not None and args.dynamic is not True:
        observer = make_observer(args)
        observer.update(torch.ones(3))
        inputs = observer.qparams()
    layer = quantized(linear, scheme, input_qparams=inputs)
    group = read_config_groups(quantization_config({"proj": scheme}, []))[0]
    assert group.scheme is not None, group.reason
    return layer, group.scheme


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rows", [1, 7, 131])
def test_the_decoder_reads_what_the_layer_computes_with(preset: str, rows: int) -> None:
    layer, scheme = stored(preset, rows)
    parts = dict(layer.state_dict())
    assert expected_parts(scheme, layer.weight_size) == {key: tuple(value.shape) for key, value in parts.items()}
    decoded = decode_module(parts, scheme)
    weight = layer.dequantized_weight()
    assert decoded.weight.dtype == weight.dtype and torch.equal(decoded.weight, weight)
    assert torch.equal(torch.from_numpy(float8_values()[decoded.codes]), layer.codes().double())


def test_every_byte_of_fp4_is_two_codes() -> None:
    from compressor.numerics import unpack_fp4

    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    assert torch.equal(torch.from_numpy(fp4_as_fp8(packed.numpy())), unpack_fp4(packed).view(torch.uint8))


def _shifted(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).roll(1, -1).view(scale.dtype)


DAMAGE = {
    "nibbles swapped": lambda parts: parts.update(weight_packed=(parts["weight_packed"] << 4) | (parts["weight_packed"] >> 4)),
    "scales of the next group": lambda parts: parts.update(weight_scale=_shifted(parts["weight_scale"])),
    "global scale halved": lambda parts: parts.update(weight_global_scale=parts["weight_global_scale"] / 2),
    "exponents off by one": lambda parts: parts.update(
        weight_scale=(parts["weight_scale"].view(torch.uint8) + 1).view(parts["weight_scale"].dtype)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_planted_fault_changes_what_is_read(damage: str) -> None:
    layer, scheme = stored("NVFP4A16")
    parts = dict(layer.state_dict())
    DAMAGE[damage](parts)
    assert not torch.equal(decode_module(parts, scheme).weight, layer.dequantized_weight())


@pytest.mark.parametrize(
    ("preset", "key", "value", "message"),
    [
        ("NVFP4A16", "weight_global_scale", None, "weight_global_scale is missing"),
        ("NVFP4A16", "weight_scale", torch.ones(7, 24), "weight_scale has the dtype torch.float32"),
        ("MXFP4A16", "weight_scale", torch.ones(7, 12).to(torch.float8_e4m3fn), "weight_scale has the dtype torch.float8_e4m3fn"),
        ("MXFP4A16", "weight_packed", torch.ones(7, 192, dtype=torch.int8), "weight_packed has the dtype torch.int8"),
        ("FP8_BLOCK", "weight_scale", torch.ones(2, 3), r"weight_scale has the shape \[2, 3\]"),
        ("NVFP4", "input_global_scale", None, "input_global_scale is missing"),
    ],
)
def test_what_does_not_fit_is_named(preset: str, key: str, value: Tensor | None, message: str) -> None:
    layer, scheme = stored(preset)
    parts = dict(layer.state_dict())
    parts.pop(key)
    if value is not None:
        parts[key] = value
    with pytest.raises(ValueError, match=message):
        decode_module(parts, scheme)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "strategy group"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor_group", "group_size": 16}, "float weights of 8 bits"),
        ({"num_bits": 4, "type": "int", "strategy": "tensor_group", "group_size": 16}, "with int weights"),
    ],
)
def test_formats_that_contradict_themselves_are_not_read(weights: dict[str, object], reason: str) -> None:
    config = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": "nvfp4-pack-quantized"}}}
    group = read_config_groups(config)[0]
    assert group.scheme is None and reason in str(group.reason)


@pytest.mark.parametrize(
    "kv", [{"strategy": "tensor"}, {"strategy": "attn_head", "symmetric": False}, {"strategy": "token", "dynamic": True}]
)
def test_scales_of_keys_and_values_belong_to_the_folder(kv: dict[str, object], reference_model: Path, tmp_path: Path) -> None:
    settings = {"scheme": "NVFP4A16", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8, "type": "float", **kv}}
    if kv.get("symmetric") is False:
        settings["kv_cache_scheme"] = {"num_bits": 8, **kv}
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": settings}}}
    data = {"dataset": reference_model / "calibration.safetensors", "num_calibration_samples": 2}
    by_token = pytest.warns(UserWarning, match="one scale for each sequence and head") if kv["strategy"] == "token" else nullcontext()
    with by_token:
        oneshot(reference_model, recipe=recipe, output_dir=tmp_path / "out", **data)
    assert check_tensors(read_subject(reference_model, tmp_path / "out")).outcome is Outcome.PASS
    stored_tensors = load_file(tmp_path / "out" / "model.safetensors")
    planted = {"model.layers.0.mlp.k_scale": torch.ones(1)}
    save_file(stored_tensors | planted, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    record = check_tensors(read_subject(reference_model, tmp_path / "out"))
    assert record.outcome is Outcome.FAIL and "mlp.k_scale: is unexpected" in record.findings[0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_of_queries_belong_to_the_folder_where_attention_is_a_target(symmetric: bool, reference_model: Path, tmp_path: Path) -> None:
    attention = {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8, "strategy": "attn_head", "symmetric": symmetric}}
    weights = {"targets": ["re:.*mlp..*_proj"], "weights": {"num_bits": 8, "strategy": "channel"}}
    groups = {"attention": attention} if symmetric else {"attention": attention, "weights": weights}
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"config_groups": groups}}}}
    data = {"dataset": reference_model / "calibration.safetensors", "num_calibration_samples": 2}
    oneshot(reference_model, recipe=recipe, output_dir=tmp_path / "out", **data)
    subject = read_subject(reference_model, tmp_path / "out")
    assert subject.quantizes_weights is not symmetric and bool(subject.modules) is not symmetric and not subject.problems
    assert check_tensors(subject).outcome is check_accepted(subject).outcome is Outcome.PASS
    stored_tensors = load_file(tmp_path / "out" / "model.safetensors")
    del stored_tensors["model.layers.1.self_attn.q_scale"]
    stored_tensors["model.layers.0.self_attn.q_scale"].fill_(0)
    save_file(stored_tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    damaged = read_subject(reference_model, tmp_path / "out")
    assert "layers.1.self_attn.q_scale: is missing" in check_tensors(damaged).findings[0]
    assert "layers.0.self_attn.q_scale: is not finite and above 0" in check_weights(damaged, (), Policy())[0].findings[0]
