"""Every check of the weights passes sound checkpoints of every format and catches the planted fault that it is there for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.validation.format import decoder
from harness.validation.inspection import inspect_modules
from harness.validation.loading import load_compressed
from harness.validation.policy import Policy, SqnrLimits
from harness.validation.rows import ColumnNoise, row_noise
from harness.validation.subject import read_subject
from harness.validation.weights import check_weights

MODULE = "model.layers.0.mlp.up_proj"
SCALE, PACKED = f"{MODULE}.weight_scale", f"{MODULE}.weight_packed"


def records(base, folder, loaded=None, policy=None):
    subject = read_subject(base, folder)
    return {record.name: record for record in check_weights(subject, inspect_modules(subject, loaded), policy or Policy())}


def text(record) -> str:
    return "\n".join([record.summary, *record.findings])


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W3A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC"])
def test_sound_weights_pass_and_equal_what_is_loaded(workspace, pristine, preset):
    folder = pristine(preset)
    attempt = load_compressed(folder)
    loaded = attempt.model or load_compressed(folder, dequantize=True).model
    found = records(workspace.base, folder, loaded)
    assert {name: record.outcome.value for name, record in found.items()} == dict.fromkeys(found, "pass")
    assert found["weights.decoded"].evidence["modules compared"] == 14


def put(name, change):
    def edit(tensors):
        tensors[name] = change(tensors[name].clone())

    return lambda checkpoint: checkpoint.edit(edit)


def with_value(value):
    def change(tensor):
        tensor.view(-1)[3] = value
        return tensor

    return change


def flip_padding(packed):
    packed[0, -1] |= 1 << 31
    return packed


def nan_byte(weight):
    weight.view(torch.uint8)[0, 0] = 0x7F
    return weight


QPARAM_FAULTS = [
    ("W4A16", put(SCALE, with_value(float("nan"))), "1 of 384 values of weight_scale are NaN"),
    ("W4A16", put(SCALE, with_value(float("inf"))), "1 of 384 values of weight_scale are infinite"),
    ("W4A16", put(SCALE, with_value(0.0)), "1 of 384 values of weight_scale are zero"),
    ("W4A16", put(SCALE, with_value(-0.01)), "1 of 384 values of weight_scale are negative"),
    ("W4A16", put(SCALE, lambda scale: scale.T), "weight_scale has the shape [4, 96], not [96, 4]"),
    ("W4A16", put(SCALE, lambda scale: scale[:, :2]), "weight_scale has the shape [96, 2], not [96, 4]"),
    ("W4A16", put(f"{MODULE}.weight_shape", lambda shape: shape.flip(0)), "has the shape"),
    ("W4A16", put(PACKED, lambda packed: packed.float()), "weight_packed has the dtype torch.float32"),
    ("W8A8", put(f"{MODULE}.weight", lambda weight: weight.short()), "weight has the dtype torch.int16"),
    ("FP8_DYNAMIC", put(f"{MODULE}.weight", nan_byte), "weight holds 1 fp8 NaN bytes"),
    ("FP8", put(f"{MODULE}.input_scale", lambda scale: scale * 0), "1 of 1 values of input_scale are zero"),
    ("FP8", put(f"{MODULE}.input_scale", lambda scale: scale * float("nan")), "values of input_scale are NaN"),
]


@pytest.mark.parametrize(("preset", "spoil", "message"), QPARAM_FAULTS, ids=[message for _, _, message in QPARAM_FAULTS])
def test_a_planted_parameter_fault_is_caught_and_named(workspace, compressed, preset, spoil, message):
    checkpoint = compressed(preset)
    spoil(checkpoint)
    record = records(workspace.base, checkpoint.folder)["weights.qparams"]
    assert record.outcome == "fail"
    assert f"{MODULE}: " in text(record)
    assert message in text(record)


def test_codes_beyond_the_declared_bits_and_dirty_padding_are_caught(workspace, compressed):
    checkpoint = compressed("W8A8")
    checkpoint.edit_config(lambda d: d["quantization_config"]["config_groups"]["group_0"]["weights"].update(num_bits=4))
    assert "the format -8..7" in text(records(workspace.base, checkpoint.folder)["weights.qparams"])
    # 96 and 64 columns fill their words at 3 bits, so the padding must be made: 5 rows fewer of columns that are not there
    scheme = decoder.WeightScheme("pack-quantized", 3, "int", True, "channel", None, False)
    parts = {
        "weight_packed": torch.tensor([[1 << 30]], dtype=torch.int32),
        "weight_shape": torch.tensor([1, 5]),
        "weight_scale": torch.ones(1, 1),
    }
    assert not decoder.decode_module(parts, scheme).has_clean_padding


def flip_code(packed):
    packed[0, 0] ^= 1 << 3
    return packed


def test_a_flipped_code_between_file_and_memory_is_caught(workspace, pristine, compressed):
    loaded = load_compressed(pristine()).model
    checkpoint = compressed()
    put(PACKED, flip_code)(checkpoint)
    record = records(workspace.base, checkpoint.folder, loaded)["weights.decoded"]
    assert record.outcome == "fail"
    assert record.findings == (f"{MODULE}: 1 of 6144 weights differ",)


def test_a_loaded_checkpoint_goes_where_it_is_sent(pristine):
    loaded = load_compressed(pristine()).model.to("meta")
    assert {tensor.device.type for tensor in (*loaded.parameters(), *loaded.buffers())} == {"meta"}


@pytest.mark.parametrize("name", ["weight of another dtype", "one bit of one weight", "no weight"])
def test_a_loaded_weight_that_is_not_in_the_file_is_caught(workspace, pristine, name):
    loaded = load_compressed(pristine()).model
    module = loaded.get_submodule(MODULE)
    if name == "no weight":
        del module.weight
        module.weight = None
    elif name == "weight of another dtype":
        module.weight.data = module.weight.data.float()
    else:
        module.weight.data.view(torch.int16)[5, 7] ^= 1
    record = records(workspace.base, pristine(), loaded)["weights.decoded"]
    assert record.outcome == ("inconclusive" if name == "no weight" else "fail")
    assert MODULE in text(record)


@pytest.mark.parametrize("bug", ["zero point ignored", "scale of the next group", "offset of one"])
def test_a_decoder_with_a_bug_would_not_agree_with_the_loader(workspace, pristine, monkeypatch, bug):
    folder = pristine("W4A16_ASYM")
    loaded = load_compressed(folder).model or load_compressed(folder, dequantize=True).model
    original = decoder._dequantize
    bugs = {
        "zero point ignored": lambda codes, scale, zero, groups, dtype: original(codes, scale, None, groups, dtype),
        "scale of the next group": lambda codes, scale, zero, groups, dtype: original(codes, scale, zero, (groups + 1) % 4, dtype),
        "offset of one": lambda codes, scale, zero, groups, dtype: original(codes + 1, scale, zero, groups, dtype),
    }
    monkeypatch.setattr(decoder, "_dequantize", bugs[bug])
    record = records(workspace.base, folder, loaded)["weights.decoded"]
    assert record.outcome == "fail"


def test_weights_that_were_not_changed_are_caught(workspace, pristine, tmp_path):
    base = tmp_path / "on_grid"
    shutil.copytree(workspace.base, base)
    subject = read_subject(workspace.base, pristine())
    tensors = load_file(base / "model.safetensors")
    group = subject.modules[MODULE]
    tensors[f"{MODULE}.weight"] = decoder.decode_module(subject.compressed.parts(MODULE), group.scheme).weight
    save_file(tensors, base / "model.safetensors")
    record = records(base, pristine())["weights.changed"]
    assert record.outcome == "fail"
    assert record.findings == (f"{MODULE}: equals the base's weight",)


def swap_layers(tensors):
    for part in ("weight_packed", "weight_scale"):
        first, second = (f"model.layers.{layer}.mlp.up_proj.{part}" for layer in (0, 1))
        tensors[first], tensors[second] = tensors[second], tensors[first]


def shift_codes(tensors):
    tensors[PACKED] = tensors[PACKED].roll(1, dims=1)


@pytest.mark.parametrize("spoil", [swap_layers, shift_codes, lambda tensors: tensors.update({PACKED: torch.zeros_like(tensors[PACKED])})])
def test_weights_of_another_place_are_caught_by_sqnr(workspace, compressed, spoil):
    checkpoint = compressed()
    checkpoint.edit(spoil)
    record = records(workspace.base, checkpoint.folder)["weights.sqnr"]
    assert record.outcome == "fail"
    assert any(MODULE in finding for finding in record.findings)


@pytest.mark.parametrize("change", [lambda s: s.roll(1, 0), lambda s: s.flip(1), lambda s: s / 2, lambda s: s * 1.2])
def test_scales_of_other_groups_are_caught_though_sqnr_may_forgive(workspace, compressed, change):
    checkpoint = compressed()
    put(SCALE, lambda scale: change(scale).to(scale.dtype))(checkpoint)
    record = records(workspace.base, checkpoint.folder)["weights.scales"]
    assert record.outcome == "fail"
    assert record.findings[0].startswith(f"{MODULE}: mismatch")


def test_one_wrong_scale_among_hundreds_is_caught_and_located(workspace, compressed):
    checkpoint = compressed()

    def double(scale):
        scale[10, 2] *= 2
        return scale

    put(SCALE, double)(checkpoint)
    found = records(workspace.base, checkpoint.folder)
    assert found["weights.sqnr"].outcome == "pass"
    assert found["weights.scales"].findings[0].startswith(f"{MODULE}: row 10, group 2 is stretched by 1.89")


ROUNDINGS = {"down": torch.floor, "up": torch.ceil, "nearest": torch.round}


@pytest.mark.parametrize("way", ROUNDINGS)
def test_codes_that_were_rounded_to_one_side_are_caught(workspace, compressed, way):
    checkpoint = compressed("W8A8")
    base = load_file(workspace.base / "model.safetensors")[f"{MODULE}.weight"].float()

    def anew(tensors):
        steps = base / tensors[SCALE].float()
        tensors[f"{MODULE}.weight"] = ROUNDINGS[way](steps).clamp(-128, 127).to(torch.int8)

    checkpoint.edit(anew)
    found = records(workspace.base, checkpoint.folder)
    assert found["weights.sqnr"].outcome == found["weights.scales"].outcome == "pass"
    lines = found["weights.rows"].findings
    said = {
        "down": "off by -0.49 steps on average: they were rounded down",
        "up": "off by +0.48 steps on average: they were rounded up",
    }.get(way)
    assert bool(lines) is bool(said) and all(line.startswith(f"{MODULE}: its codes are {said}") for line in lines)


@pytest.mark.parametrize("layer_norms", [False, True])
def test_a_group_a_step_off_may_be_the_solvers_behind_a_layer_norm(workspace, compressed, tmp_path, layer_norms):
    checkpoint = compressed("W8A8")
    base = Path(shutil.copytree(workspace.base, tmp_path / "base"))
    if layer_norms:
        tensors = load_file(base / "model.safetensors")
        tensors["model.norm.bias"] = torch.zeros_like(tensors["model.norm.weight"])
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    checkpoint.edit(lambda tensors: tensors[f"{MODULE}.weight"][3].clamp_(-127, 126).add_(1))
    found = records(base, checkpoint.folder)["weights.rows"]
    assert found.outcome == ("inconclusive" if layer_norms else "fail")
    assert re.match(rf"{MODULE}: row 3, group 0: its codes are off by \+1\.\d steps on average", found.findings[0])


@pytest.mark.parametrize("gain", [0.3, 0.5])
def test_a_random_row_is_caught_whatever_its_gain_is_by_chance(workspace, compressed, gain):
    checkpoint = compressed("W8A8")
    base = load_file(workspace.base / "model.safetensors")[f"{MODULE}.weight"].double()[5]
    noise = torch.randn(len(base), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row = gain * base + (noise - base * (noise @ base) / (base @ base)) * base.std()

    def spoil(tensors):
        tensors[f"{MODULE}.weight"][5] = (row / tensors[SCALE].double()[5]).round().clamp(-128, 127).to(torch.int8)

    checkpoint.edit(spoil)
    found = records(workspace.base, checkpoint.folder)["weights.rows"]
    assert found.outcome == "fail" and re.match(rf"{MODULE}: row 5: gain 0.\d\d: random, or another row's", found.findings[0]), found


ROWS = {  # of 4 bits, with one scale for the whole weight: what became of row 5, whose weights are of this size in steps
    "rounded, with one weight above half a step": (lambda w, noise: np.round(w), 0.21, False),
    "random, with a gain of 0.5": (lambda w, noise: np.round(0.5 * w + 3 * noise), 2.0, True),
    "far off where no token looked, with a gain near 1": (lambda w, noise: np.round(w + 2.2 * noise), 2.0, False),
    "no farther off than others": (lambda w, noise: np.round(0.5 * w + 2.2 * noise), 2.0, False),
    "dead": (lambda w, noise: np.zeros_like(w), 2.0, True),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_judged_by_its_gain_and_its_error(name):
    change, size, is_told = ROWS[name]
    rng = np.random.default_rng(0)
    w = rng.normal(size=(32, 256)) * np.where(np.arange(32) == 5, size, 2.0)[:, None]
    codes = np.round(w + (2.2 * rng.normal(size=w.shape) if "others" in name else 0))
    noise = rng.normal(size=256)
    codes[5] = change(w[5], noise - w[5] * (noise @ w[5]) / (w[5] @ w[5]))
    given = codes.clip(-8, 7).astype(np.int16)
    module = decoder.DecodedModule(torch.tensor(given * 1.0), given, np.ones(1), None, True, np.ones(1), None, False)
    scheme = decoder.WeightScheme("int-quantized", 4, "int", True, "tensor", None, False)
    found = row_noise(torch.tensor(w), module, scheme).dead_or_foreign(0.8, 7.0)
    assert [line.split(":")[0] for line in found] == ["row 5"] * is_told, found


@pytest.mark.parametrize(("likeness", "is_told"), [(0.0, True), (0.66, True), (0.95, False)])
def test_a_row_that_is_another_rows_is_told_by_what_it_is_most_like(likeness, is_told):
    """Whatever its gain is; those that are nearly equal are left."""
    rng = np.random.default_rng(1)
    w = 2 * rng.normal(size=(32, 256))
    w[7] = likeness * w[5] + (1 - likeness**2) ** 0.5 * w[7]
    given = np.round(w).clip(-8, 7).astype(np.int16)
    given[5] = given[7]
    module = decoder.DecodedModule(torch.tensor(given * 1.0), given, np.ones(1), None, True, np.ones(1), None, False)
    scheme = decoder.WeightScheme("int-quantized", 4, "int", True, "tensor", None, False)
    found = row_noise(torch.tensor(w), module, scheme).dead_or_foreign(0.8, 1e9)  # by the gain alone it is one of a row that is far off
    assert ["row 5" in line and "another row's, it is most like row 7" in line for line in found] == [True] * is_told, found


@pytest.mark.parametrize(("likeness", "is_told"), [(0.0, True), (0.6, True), (0.95, False)])
def test_columns_that_have_changed_places_are_told_though_they_are_alike(likeness, is_told):
    rng = np.random.default_rng(2)
    w = 2 * rng.normal(size=(96, 64))
    w[:, 7] = likeness * w[:, 5] + (1 - likeness**2) ** 0.5 * w[:, 7]
    given = np.round(w).clip(-8, 7).astype(np.int16)
    given[:, [5, 7]] = given[:, [7, 5]]
    module = decoder.DecodedModule(torch.tensor(given * 1.0), given, np.ones(1), None, True, np.ones(1), None, False)
    scheme = decoder.WeightScheme("int-quantized", 4, "int", True, "tensor", None, False)
    found = row_noise(torch.tensor(w), module, scheme).columns.foreign(0.8)
    assert [line.split(":")[0] for line in found] == ["column 5", "column 7"] * is_told, found
    assert all("another column's, it is most like column" in line for line in found)


def test_a_column_to_which_a_solver_added_another_one_is_its_own():
    """As GPTQ does where few tokens were seen, whose inputs of both hang together."""
    rng = np.random.default_rng(3)
    w = rng.normal(size=(96, 64))
    given = np.round(w).clip(-8, 7).astype(np.int16)
    given[:, 5] = np.round(w[:, 5] + 2 * w[:, 7]).clip(-8, 7)
    module = decoder.DecodedModule(torch.tensor(given * 1.0), given, np.ones(1), None, True, np.ones(1), None, False)
    noise = row_noise(torch.tensor(w), module, decoder.WeightScheme("int-quantized", 4, "int", True, "tensor", None, False))
    assert noise.columns.foreign(0.8) == []


def test_equal_values_that_round_to_one_side_are_sound():
    """Four tenths of a step lie nearest to zero, all of them; a mean alone would call that rounding down."""
    for w, said in ((np.full((32, 64), 0.4), ""), (np.tile(np.linspace(0.01, 0.99, 64), (32, 1)), "rounded down")):
        noise = ColumnNoise(np.zeros(64, int), is_integer=True)
        noise.add(w, np.zeros_like(w), np.ones_like(w), np.zeros(w.shape, bool))
        assert bool(noise.biased()) is bool(said) and all(said in line for line in noise.biased())


def test_a_limit_that_lets_decoys_through_makes_the_check_inconclusive(workspace, pristine):
    policy = Policy(min_sqnr_db=SqnrLimits(int4=-1.0), max_scale_mismatch=1e20)
    record = records(workspace.base, pristine(), policy=policy)["weights.sqnr"]
    assert record.outcome == "inconclusive"
    assert "zeros would pass" in text(record)
    halved_alone = records(workspace.base, pristine(), policy=Policy(min_sqnr_db=SqnrLimits(int4=3.0)))["weights.sqnr"]
    assert halved_alone.outcome == "pass"  # halved weights reach 6 dB, but not the gain of 1


def test_formats_that_the_decoder_does_not_read_are_inconclusive_not_passed(workspace, compressed):
    checkpoint = compressed("FP8_DYNAMIC")
    checkpoint.edit_config(lambda d: d["quantization_config"]["config_groups"]["group_0"].update(format="naive-quantized"))
    found = records(workspace.base, checkpoint.folder)
    assert found["weights.qparams"].outcome == "inconclusive"
    assert "this decoder does not read format naive-quantized" in text(found["weights.qparams"])


def test_without_quantized_weights_everything_is_skipped(workspace, compressed):
    checkpoint = compressed()
    checkpoint.edit_config(lambda d: d.pop("quantization_config"))
    assert {record.outcome.value for record in records(workspace.base, checkpoint.folder).values()} == {"skip"}
