"""Damage to a checkpoint after it was written: with its record every tensor is named that differs, without it what is visible is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor import oneshot
from compressor.errors import ResumeError
from harness.reporting.record import CheckRecord
from harness.validation.format.record import check_digests, check_quantization_config
from harness.validation.inspection import inspect_modules
from harness.validation.policy import Policy
from harness.validation.subject import read_subject
from harness.validation.weights import check_weights

Tensors = dict[str, Tensor]
Damage = Callable[[Tensors], None]
MODULE = "model.layers.1.mlp.up_proj"  # 256 rows, 128 columns
TWIN = "model.layers.0.mlp.up_proj"
FORMATS: dict[str, dict[str, Any]] = {
    **{scheme: {"scheme": scheme} for scheme in ("W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16")},
    "int2": {"config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 2, "group_size": 32}}}},
    "W4A16-mse": {"scheme": "W4A16", "weight_observer": "mse"},
    "FP8_BLOCK": {"scheme": "FP8_BLOCK"},
}


@pytest.fixture(scope="module")
def llama_dir(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama of the other tests, but with a layer of more rows than columns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("taller") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(llama_dir, intermediate_size=256)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sound(llama_dir: Path, tokens_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of checkpoints by format, made once."""
    made: dict[tuple[str, str], Path] = {}

    def make(name: str, modifier: str = "QuantizationModifier") -> Path:
        if (name, modifier) not in made:
            recipe = {"quant_stage": {"quant_modifiers": {modifier: {"ignore": ["lm_head"], **FORMATS[name]}}}}
            made[name, modifier] = tmp_path_factory.mktemp("sound") / name
            oneshot(llama_dir, recipe=recipe, dataset=tokens_file, output_dir=made[name, modifier])
        return made[name, modifier]

    return make


def damaged(folder: Path, target: Path, damage: Damage, *, record: bool = True) -> Path:
    """A copy with other tensors."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    damage(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    if not record:
        (target / "compression.json").unlink()
    return target


def judged(base: Path, folder: Path, *, trained: bool = False) -> dict[str, CheckRecord]:
    subject = read_subject(base, folder, trained=trained)
    records = [check_digests(subject.compressed), *check_weights(subject, inspect_modules(subject, None), Policy())]
    return {record.name: record for record in records}


def codes_of(tensors: Tensors, module: str = MODULE) -> Tensor:
    """The stored codes, as what can be changed in place by rows."""
    codes = tensors[f"{module}.weight_packed" if f"{module}.weight_packed" in tensors else f"{module}.weight"]
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def zeroed_row(tensors: Tensors) -> None:
    codes_of(tensors)[17] = 0


def random_rows(tensors: Tensors) -> None:
    rows = codes_of(tensors)[40:45].view(torch.uint8)
    rows.copy_(torch.randint(0, 255, rows.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8) & 0x7E)


def swapped_rows(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(MODULE) and tensors[name].shape[:1] == (256,)]:
        raw = tensors[name].view(torch.uint8)
        raw[[3, 90]] = raw[[90, 3]]


def zeroed_words(tensors: Tensors) -> None:
    codes_of(tensors)[128].view(torch.uint8)[8:16] = 0


def swapped_tensors(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(MODULE)]:
        other = name.replace(MODULE, TWIN)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def another_layers(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(MODULE)]:
        tensors[name] = tensors[name.replace(MODULE, TWIN)].clone()


def nibbles(change: Callable[[Tensor], Tensor]) -> Damage:
    """Change the 4-bit codes of the module; 8 is the code of zero."""

    def damage(tensors: Tensors) -> None:
        packed, places = codes_of(tensors), torch.arange(0, 32, 4, dtype=torch.int32)
        codes = ((packed[..., None] >> places) & 15).reshape(256, 128)
        packed.copy_((change(codes.clone()).reshape(256, 16, 8).to(torch.int32) << places).sum(-1, dtype=torch.int32))

    return damage


def with_column(codes: Tensor, place: int, column: Tensor | int) -> Tensor:
    codes[:, place] = column
    return codes


ACROSS: dict[str, tuple[Damage, str, str]] = {
    "random column": (nibbles(lambda c: with_column(c, 9, c.flatten().roll(3)[:256])), "fail", "column 9: gain "),
    "negated column": (nibbles(lambda c: with_column(c, 9, (16 - c[:, 9]).clamp(max=15))), "fail", "column 9: gain -"),
    "two columns swapped": (nibbles(lambda c: c[:, [1, 0, *range(2, 128)]]), "fail", "column 0: gain "),
    "two words swapped": (nibbles(lambda c: c.roll(8, 1)), "fail", "row 0: gain "),
    "a step off": (nibbles(lambda c: (c + 1).clamp(max=15)), "fail", "the codes of 256 of 256 groups are off by +1.0 steps"),
    "a row a step off": (
        nibbles(lambda c: (c - (torch.arange(256) == 7)[:, None].int()).clamp(min=0)),
        "fail",
        "row 7, group 0: its codes are",
    ),
    "zeroed column": (nibbles(lambda c: with_column(c, 9, 8)), "inconclusive", "zero columns: 9"),
}


@pytest.mark.parametrize("damage", ACROSS)
def test_what_runs_across_the_rows_is_found_without_a_record(
    damage: str, sound: Callable[..., Path], llama_dir: Path, tmp_path: Path
) -> None:
    change, outcome, said = ACROSS[damage]
    for modifier in ("QuantizationModifier", "GPTQModifier"):
        found = judged(llama_dir, damaged(sound("W4A16", modifier), tmp_path / modifier, change, record=False))["weights.rows"]
        assert found.outcome == outcome, found
        assert any(f"{MODULE}: {said}" in finding for finding in found.findings), found.findings


@pytest.mark.parametrize(("damage", "outcome"), [("a row a step off", "pass"), ("a step off", "fail")])
def test_with_digests_that_hold_a_group_by_itself_is_not_asked(
    damage: str, outcome: str, sound: Callable[..., Path], llama_dir: Path, tmp_path: Path
) -> None:
    subject = read_subject(llama_dir, damaged(sound("W4A16"), tmp_path / "bad", ACROSS[damage][0], record=False))
    records = check_weights(subject, inspect_modules(subject, None), Policy(), is_as_written=True)
    assert next(record for record in records if record.name == "weights.rows").outcome == outcome


VISIBLE: dict[str, tuple[Damage, str, str]] = {
    "zeroed row": (zeroed_row, "weights.rows", "row 17: "),
    "five random rows": (random_rows, "weights.rows", "row 44: gain "),
    "swapped rows": (swapped_rows, "weights.rows", "row 90: gain "),
    "swapped tensors": (swapped_tensors, "weights.sqnr", TWIN),
    "tensor of another layer": (another_layers, "weights.sqnr", MODULE),
}


@pytest.mark.parametrize("name", FORMATS)
def test_sound_ones_pass_with_and_without_their_record(name: str, sound: Callable[..., Path], llama_dir: Path, tmp_path: Path) -> None:
    for modifier in ("QuantizationModifier", "GPTQModifier"):
        found = judged(llama_dir, sound(name, modifier))
        assert found["record.tensors"].outcome == "pass" and found["weights.rows"].outcome == "pass", found["weights.rows"].findings
        bare = judged(llama_dir, damaged(sound(name, modifier), tmp_path / modifier, lambda tensors: None, record=False))
        assert bare["record.tensors"].outcome == "skip" and bare["weights.rows"].outcome == "pass"


@pytest.mark.parametrize("damage", VISIBLE)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_visible_is_found_without_a_record(
    name: str, damage: str, sound: Callable[..., Path], llama_dir: Path, tmp_path: Path
) -> None:
    change, check, said = VISIBLE[damage]
    found = judged(llama_dir, damaged(sound(name), tmp_path / "bad", change, record=False))
    assert found[check].outcome == "fail"
    assert any(said in finding for finding in found[check].findings), found[check].findings


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W3A16", "int2"])
def test_every_zeroed_row_is_found_though_some_keep_a_gain_by_chance(
    name: str, sound: Callable[..., Path], llama_dir: Path, tmp_path: Path
) -> None:
    def zeroed(tensors: Tensors) -> None:
        codes_of(tensors)[::8] = 0

    found = judged(llama_dir, damaged(sound(name), tmp_path / "bad", zeroed, record=False))["weights.rows"]
    assert found.evidence["rows"] and "24 more" in str(found.findings), found.findings


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8", "FP8_DYNAMIC", "W4A16-mse", "FP8_BLOCK"])
def test_zeroed_words_are_found_without_a_record(name: str, sound: Callable[..., Path], llama_dir: Path, tmp_path: Path) -> None:
    found = judged(llama_dir, damaged(sound(name), tmp_path / "bad", zeroed_words, record=False))
    assert any(f"{MODULE}: row 128, columns " in finding for finding in found["weights.rows"].findings)


def flip(name: str, place: int, bit: int) -> Damage:
    def change(tensors: Tensors) -> None:
        tensors[name].reshape(-1).view(torch.uint8)[place] ^= 1 << bit

    return change


def renamed(tensors: Tensors) -> None:
    tensors["model.norm.w"] = tensors.pop("model.norm.weight")


def as_float16(tensors: Tensors) -> None:
    tensors[f"{MODULE}.weight_scale"] = tensors[f"{MODULE}.weight_scale"].view(torch.float16)


def turned(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].reshape(128, 256)


ANY_DAMAGE: dict[str, tuple[Damage, list[str]]] = {
    "lowest bit of a code": (flip(f"{MODULE}.weight_packed", 100, 0), [f"{MODULE}.weight_packed: has other bytes than were written"]),
    "lowest bit of a scale": (flip(f"{MODULE}.weight_scale", 0, 0), [f"{MODULE}.weight_scale: has other bytes than were written"]),
    "a bit of a zero point": (
        flip(f"{MODULE}.weight_zero_point", 5, 1),
        [f"{MODULE}.weight_zero_point: has other bytes than were written"],
    ),
    "a bit of a norm": (flip("model.norm.weight", 9, 3), ["model.norm.weight: has other bytes than were written"]),
    "a bit of the shape": (flip(f"{MODULE}.weight_shape", 0, 0), [f"{MODULE}.weight_shape: has other bytes than were written"]),
    "zeroed words": (zeroed_words, [f"{MODULE}.weight_packed: has other bytes than were written"]),
    "missing": (lambda tensors: (tensors.pop("model.norm.weight"), None)[1], ["model.norm.weight: is missing"]),
    "renamed": (renamed, ["model.norm.weight: is missing", "model.norm.w: was never written"]),
    "another dtype": (as_float16, [f"{MODULE}.weight_scale: is F16[256,1], was written as BF16[256,1]"]),
    "another shape": (turned, ["model.embed_tokens.weight: is BF16[128,256], was written as BF16[256,128]"]),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("damage", ANY_DAMAGE)
def test_with_the_record_any_damage_is_named(
    damage: str, trained: bool, sound: Callable[..., Path], llama_dir: Path, tmp_path: Path
) -> None:
    change, findings = ANY_DAMAGE[damage]
    folder = damaged(sound("W4A16_ASYM"), tmp_path / "bad", change)
    record = check_digests(read_subject(llama_dir, folder, trained=trained).compressed)
    assert record.outcome == "fail"
    assert list(record.findings) == findings


def _without(record: dict[str, Any]) -> None:
    del record["tensors"]


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "no digests": (_without, "inconclusive", "holds no digests"),
    "a list": (lambda record: record.update(tensors=[1, 2]), "fail", "no table of digests"),
    "numbers": (lambda record: record["tensors"].update({"model.norm.weight": 7}), "fail", "no table of digests"),
    "a short digest": (lambda record: record["tensors"].update({"model.norm.weight": "BF16[128] abc"}), "fail", "no table of digests"),
    "null": (lambda record: record.update(tensors=None), "inconclusive", "holds no digests"),
    "an empty table": (lambda record: record.update(tensors={}), "fail", "was never written"),
    "one left out": (lambda record: record["tensors"].pop("model.norm.weight"), "fail", "model.norm.weight: was never written"),
    "another digest": (
        lambda record: record["tensors"].update({"model.norm.weight": "BF16[128] " + 64 * "0"}),
        "fail",
        "model.norm.weight: has other bytes",
    ),
}


@pytest.mark.parametrize("edit", RECORDS)
def test_an_edited_record_does_not_pass(edit: str, sound: Callable[..., Path], llama_dir: Path, tmp_path: Path) -> None:
    change, outcome, said = RECORDS[edit]
    shutil.copytree(sound("W4A16"), tmp_path / "bad")
    path = tmp_path / "bad" / "compression.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    found = check_digests(read_subject(llama_dir, tmp_path / "bad").compressed)
    assert found.outcome.value == outcome
    assert said in found.summary


def test_every_digest_is_of_the_bytes_in_the_file_and_equal_runs_give_equal_ones(
    sound: Callable[..., Path], llama_dir: Path, tokens_file: Path, tmp_path: Path
) -> None:
    first = json.loads((sound("W4A16") / "compression.json").read_text())["tensors"]
    assert first.keys() == load_file(sound("W4A16") / "model.safetensors").keys()
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"ignore": ["lm_head"], "scheme": "W4A16"}}}}
    oneshot(llama_dir, recipe=recipe, dataset=tokens_file, output_dir=tmp_path / "again")
    assert (tmp_path / "again" / "compression.json").read_bytes() == (sound("W4A16") / "compression.json").read_bytes()


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "inputs": (
        lambda c: c["config_groups"]["group_0"].update(input_activations=DYNAMIC),
        "config_groups.group_0.input_activations: is a table with num_bits, was written as null",
    ),
    "transforms": (
        lambda c: c.update(transform_config={"config_groups": {}}),
        "transform_config: is a table with config_groups, was written",
    ),
    "the format": (lambda c: c.update(format="naive-quantized"), 'format: is "naive-quantized", was written as "pack-quantized"'),
    "keys and values": (lambda c: c.update(kv_cache_scheme={**DYNAMIC, "strategy": "tensor"}), "kv_cache_scheme"),
    "a key taken out": (lambda c: c.pop("ignore"), "ignore: is absent, was written as"),
}


@pytest.mark.parametrize("edit", CONFIGS)
def test_an_edited_quantization_config_is_named_and_no_finished_run(
    edit: str, sound: Callable[..., Path], llama_dir: Path, tokens_file: Path, tmp_path: Path
) -> None:
    change, said = CONFIGS[edit]
    shutil.copytree(sound("W4A16"), tmp_path / "bad")
    path = tmp_path / "bad" / "config.json"
    config = json.loads(path.read_text())
    assert check_quantization_config(path.parent, config).outcome == "pass"
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    found = check_quantization_config(path.parent, config)
    assert found.outcome == "fail" and any(finding.startswith(said) for finding in found.findings), found.findings
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"ignore": ["lm_head"], "scheme": "W4A16"}}}}
    with pytest.raises(ResumeError, match=r"the quantization_config of config\.json is not what was written"):
        oneshot(llama_dir, recipe=recipe, dataset=tokens_file, output_dir=path.parent, resume=True)


@pytest.mark.parametrize("change", [lambda record: record.pop("quantization_config"), None])
def test_what_says_nothing_of_the_quantization_config_lets_nothing_pass(
    change: Callable[[dict[str, Any]], Any] | None, sound: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(sound("W4A16"), tmp_path / "bad")
    path = tmp_path / "bad" / "compression.json"
    record = json.loads(path.read_text())
    path.unlink() if change is None else (change(record), path.write_text(json.dumps(record)))
    assert check_quantization_config(path.parent, {}).outcome == ("skip" if change is None else "inconclusive")


def test_a_config_that_cannot_be_read_is_unknown_not_absent(sound: Callable[..., Path]) -> None:
    unread = check_quantization_config(sound("W4A16"), None)
    assert unread.outcome == "inconclusive" and "config.json cannot be read" in unread.summary
