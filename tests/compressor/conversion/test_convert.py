"""A conversion without forwards gives the bytes of `oneshot`, in little memory, whatever the number of processes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, FP8BlockDequantizer, ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationScheme as CTScheme
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from compressor import load_compressed, model_free, model_free_ptq, oneshot
from compressor.cli.main import main
from compressor.conversion import rounding
from compressor.errors import ModelError, RecipeError, SchemeError, UserInputError
from compressor.numerics import preset_scheme
from compressor.numerics.scheme import PRESETS

Folders = Callable[[str], Path]
Expected = Callable[..., Path]
Check = Callable[[Path, Path], None]
Differences = Callable[[Path, Path], list[str]]

_WITHOUT_DATA = [name for name, scheme in PRESETS.items() if scheme.input_activations is None or scheme.input_activations.dynamic is True]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even the weights of a tiny model into several blocks."""
    monkeypatch.setattr(rounding, "BLOCK_VALUES", 1 << 14)


@pytest.mark.parametrize("scheme", sorted(_WITHOUT_DATA))
def test_every_scheme_gives_what_oneshot_gives(
    scheme: str, base: Folders, expected: Expected, tmp_path: Path, small_blocks: None, check_same: Check
) -> None:
    """Cut into blocks of rows, too."""
    model_free(base("dense"), output_dir=tmp_path / "made", scheme=scheme, ignore="lm_head")
    check_same(tmp_path / "made", expected(base("dense"), scheme=scheme, ignore=["lm_head"]))


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "W4A16_ASYM", "NVFP4A16"])
@pytest.mark.parametrize("name", ["tied", "biases", "experts", "fused"])
@pytest.mark.filterwarnings("ignore:transformers")
def test_every_architecture_gives_what_oneshot_gives(
    name: str, scheme: str, base: Folders, expected: Expected, tmp_path: Path, check_same: Check
) -> None:
    """Tied heads, biases, experts that the files hold one by one or fused."""
    asked: dict[str, Any] = {"scheme": scheme, "ignore": ["lm_head"]}
    model_free(base(name), output_dir=tmp_path / "made", **asked)
    check_same(tmp_path / "made", expected(base(name), **asked))


@pytest.mark.parametrize(
    ("changed", "factor", "lost"),
    [("mlp.gate_proj", 1e12, "layers.0.mlp.up_proj"), ("self_attn.q_proj", 1e-12, "layers.0.self_attn.q_proj"), ("mlp", 0.0, "")],
)
def test_a_layer_that_a_shared_scale_has_no_room_for_is_noted(
    changed: str, factor: float, lost: str, base: Folders, expected: Expected, tmp_path: Path, check_same: Check
) -> None:
    """A layer of zeros loses nothing."""
    folder = shutil.copytree(base("dense"), tmp_path / "base")
    for shard in folder.glob("*.safetensors"):
        scaled = {name: value * factor if f"layers.0.{changed}" in name else value for name, value in load_file(shard).items()}
        save_file(scaled, shard, metadata={"format": "pt"})
    model_free(folder, output_dir=tmp_path / "made", scheme="NVFP4A16", ignore="lm_head")
    notes = [one for one in json.loads((tmp_path / "made" / "compression.json").read_text()).get("notes", []) if "lost" in one]
    assert len(notes) == bool(lost) and all(re.search(rf"[1-9] modules are lost \(.*{lost}.*: relative error 1\)", one) for one in notes)
    check_same(tmp_path / "made", expected(folder, scheme="NVFP4A16", ignore=["lm_head"]))


@pytest.mark.filterwarnings("ignore:transformers", "ignore:.* stay floats and are stored fused")
def test_experts_that_stay_floats_are_written_as_oneshot_writes_them(
    base: Folders, expected: Expected, tmp_path: Path, check_same: Check
) -> None:
    """Fused beside integers."""
    for ignore in (["lm_head", "re:.*experts.*"], ["lm_head", "re:.*w2$"]):
        made = tmp_path / f"made{len(ignore[1])}"
        model_free(base("experts"), output_dir=made, scheme="W4A16", ignore=ignore)
        check_same(made, expected(base("experts"), scheme="W4A16", ignore=ignore))


def test_an_observer_and_groups_of_schemes_and_a_scale_of_the_whole_weight(
    base: Folders, expected: Expected, tmp_path: Path, small_blocks: None, check_same: Check
) -> None:
    """By a recipe, and by a scheme of one's own."""
    eight, four = PRESETS["W8A8"].model_dump(mode="json"), PRESETS["W4A16"].model_dump(mode="json")
    four["weights"]["observer"] = "mse"
    whole = {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    groups = {
        "a": {**eight, "targets": ["re:.*mlp.*"]},
        "b": {**four, "targets": ["re:.*q_proj"]},
        "c": {**whole, "targets": ["re:.*k_proj"]},
    }
    model_free(base("dense"), output_dir=tmp_path / "made", recipe={"QuantizationModifier": {"config_groups": groups}})
    wanted = tmp_path / "wanted"
    oneshot(base("dense"), recipe={"QuantizationModifier": {"config_groups": groups}}, output_dir=wanted)
    check_same(tmp_path / "made", wanted)

    model_free(base("dense"), output_dir=tmp_path / "own", scheme=preset_scheme("W8A16", ["re:.*mlp.*"]))
    assert set(json.loads((tmp_path / "own" / "compression.json").read_text())["modules"]) == {
        f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")
    }


def test_files_are_split_as_oneshot_splits_them(base: Folders, tmp_path: Path, check_same: Check) -> None:
    """Whatever the files of the base are."""
    result = oneshot(base("dense"), recipe={"QuantizationModifier": {"scheme": "FP8_DYNAMIC", "ignore": ["lm_head"]}})
    result.save(tmp_path / "wanted", max_shard_size="100KB")
    arguments = ["convert", str(base("dense")), "--scheme", "FP8_DYNAMIC", "--ignore", "lm_head", "--quiet"]
    assert main([*arguments, "--output-dir", str(tmp_path / "made"), "--max-shard-size", "100KB"]) == 0
    check_same(tmp_path / "made", tmp_path / "wanted")
    assert len(list((tmp_path / "made").glob("model-*.safetensors"))) > 2


def test_another_dtype_is_cast_as_oneshot_casts_it(base: Folders, tmp_path: Path, check_same: Check) -> None:
    """Up without loss; down with its note, which names quantized weights, too."""
    asked: dict[str, Any] = {"scheme": "FP8_DYNAMIC", "ignore": ["lm_head"]}
    for dtype, is_rounded in (("float32", False), ("float16", True)):
        oneshot(base("dense"), recipe={"QuantizationModifier": asked}, output_dir=tmp_path / f"wanted-{dtype}", dtype=dtype)
        made = model_free(base("dense"), output_dir=tmp_path / f"made-{dtype}", dtype=dtype, **asked)
        check_same(made.output_dir, tmp_path / f"wanted-{dtype}")
        assert bool(made.report.notes) == is_rounded
    (note,) = made.report.notes
    assert re.fullmatch(
        r"\d+ tensors \(lm_head.weight, .*\) were rounded when they were loaded: bfloat16 in the files and float16 in the model, as "
        "dtype= asks; a wider dtype= keeps them",
        note,
    )


def test_dtypes_and_classes_are_named_or_given(base: Folders, tmp_path: Path, check_same: Check, differences: Differences) -> None:
    """As objects, too; the record is that of their names."""
    asked: dict[str, Any] = {"scheme": "W8A16", "ignore": ["lm_head"]}
    named: dict[str, Any] = {"dtype": "float32", "model_class": "LlamaForCausalLM"}
    given: dict[str, Any] = {"dtype": torch.float32, "model_class": LlamaForCausalLM}
    for place, how in (("named", named), ("given", given)):
        model_free(base("dense"), output_dir=tmp_path / f"convert-{place}", **asked, **how)
        oneshot(base("dense"), recipe={"QuantizationModifier": asked}, output_dir=tmp_path / f"oneshot-{place}", **how)
    for verb in ("convert", "oneshot"):
        assert differences(tmp_path / f"{verb}-given", tmp_path / f"{verb}-named") == []
    check_same(tmp_path / "convert-given", tmp_path / "oneshot-given")


def _changed(source: Path, folder: Path, **values: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Copy a base, with some of its tensors made anew."""
    tensors = {name: value for path in sorted(source.glob("*.safetensors")) for name, value in load_file(path).items()}
    for end, make in values.items():
        names = [name for name in tensors if name.endswith(f"{end}.weight")]
        assert names
        tensors |= {name: make(tensors[name]).contiguous() for name in names}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("name", ["dense", "experts"])
@pytest.mark.filterwarnings("ignore:transformers")
def test_notes_of_values_are_those_of_oneshot(name: str, base: Folders, expected: Expected, tmp_path: Path, check_same: Check) -> None:
    """Rounded weights, quantized or not and also of merged experts, beside a NaN in what stays as it is."""
    wide = "w1" if name == "experts" else "up_proj"
    spoil = {wide: lambda value: value.float() * 1.0001, "norm": lambda value: value.double() / 0}
    folder = _changed(base(name), tmp_path / "base", **spoil)
    made = model_free(folder, output_dir=tmp_path / "made", scheme="W8A16", ignore="lm_head")
    check_same(made.output_dir, expected(folder, scheme="W8A16", ignore=["lm_head"]))
    first, *_, last = made.report.notes
    assert wide in first and "whose dtype config.json names" in first and "hold NaN or infinity" in last


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tie_that_the_files_do_not_hold_is_none(
    is_equal: bool, base: Folders, expected: Expected, tmp_path: Path, check_same: Check
) -> None:
    """Of a config that ties head and embedding; equal tensors are stored once."""
    folder = _changed(base("dense"), tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    if is_equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    made = model_free(folder, output_dir=tmp_path / "made", scheme="W8A16", ignore="lm_head")
    check_same(made.output_dir, expected(folder, scheme="W8A16", ignore=["lm_head"]))
    assert json.loads((made.output_dir / "config.json").read_text())["tie_word_embeddings"] is is_equal
    assert ("lm_head.weight" in load_file(made.output_dir / "model.safetensors")) is not is_equal
    assert any("lm_head.weight: config.json ties what differs in the files" in note for note in made.report.notes) is not is_equal
    head = load_compressed(made.output_dir).get_output_embeddings()  # type: ignore[operator]
    assert torch.equal(head.weight, tensors["lm_head.weight"])


_REFUSED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "too large": ("norm", lambda value: value.float() * 0 + 1e6, r"float16 ends at 65,504, and .*norm.weight hold more; take bfloat16"),
    "too large and quantized": ("up_proj", lambda value: value.float() + 1e6, "float16 ends at 65,504, and .*up_proj.weight hold more"),
    "integers": (
        "up_proj",
        lambda value: (value * 100).to(torch.int8),
        "1 weights .*up_proj.weight. are int8 in the files, and no scales",
    ),
    "booleans": ("norm", lambda value: value > 0, "3 weights .*norm.weight. are bool in the files"),
    "fp8": ("up_proj", lambda value: value.to(torch.float8_e4m3fn), "1 weights .*up_proj.weight. are float8_e4m3fn in the files"),
}


@pytest.mark.parametrize(("end", "make", "words"), _REFUSED.values(), ids=list(_REFUSED))
def test_what_the_dtype_of_the_model_cannot_hold_is_refused_by_both_verbs(
    end: str, make: Callable[[torch.Tensor], torch.Tensor], words: str, base: Folders, tmp_path: Path
) -> None:
    """By name, before anything is written: whether the dtype is asked for or that of config.json."""
    folder = _changed(base("dense"), tmp_path / "base", **{end: make})
    asked: dict[str, Any] = {"scheme": "W8A16", "ignore": ["lm_head"]}
    with pytest.raises(ModelError, match=words):
        model_free(folder, output_dir=tmp_path / "made", dtype="float16", **asked)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    with pytest.raises(ModelError, match=words):
        oneshot(folder, recipe={"QuantizationModifier": asked}, output_dir=tmp_path / "made")
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


def _in_fp8(folder: Path, source: Path, block: tuple[int, int], said: object = None) -> dict[str, torch.Tensor]:
    """Write the model of a folder as an fp8 base of the DeepSeek kind; return the floats that it stands for."""
    tensors = {name: value for path in sorted(source.glob("*.safetensors")) for name, value in load_file(path).items()}
    floats = dict(tensors)
    for name, value in floats.items():
        if "proj" in name:
            rows, columns = value.shape
            spread = value.float() * (1 + torch.arange(rows) / 10)[:, None]  # so that no two blocks have one scale
            padded = torch.nn.functional.pad(spread, (0, -columns % block[1], 0, -rows % block[0]))
            scale = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).abs().amax((1, 3)) / 448
            each = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
            codes = (spread / each).to(torch.float8_e4m3fn)
            tensors |= {name: codes, f"{name}_scale_inv": scale}
            floats[name] = (codes.float() * each).to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": said or list(block)}
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    return floats


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (48, 80)], ids=str)
def test_fp8_blocks_are_read_as_floats(
    block: tuple[int, int], base: Folders, expected: Expected, tmp_path: Path, differences: Differences, small_blocks: None
) -> None:
    """A base of the DeepSeek kind gives what the floats give that it stands for, also where the last block is not full."""
    floats = tmp_path / "floats"
    floats.mkdir()
    save_file(_in_fp8(tmp_path / "coded", base("dense"), block), floats / "model.safetensors", metadata={"format": "pt"})
    (floats / "config.json").write_bytes((base("dense") / "config.json").read_bytes())
    ignore = ["lm_head", "re:.*q_proj", "re:.*up_proj"]
    made = model_free(tmp_path / "coded", output_dir=tmp_path / "made", scheme="W4A16", ignore=ignore)
    wanted = expected(floats, scheme="W4A16", ignore=ignore)
    assert set(differences(tmp_path / "made", wanted)) <= {"compression.json", "generation_config.json"}
    assert made.report.notes[0] == "7 weights of the base are fp8 in blocks, and were read as floats"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([64, 64], r"down_proj.weight: its scales are float32 \[1, 3\], and blocks of \[64, 64\].*need floats of \[2, 6\]"),
        ([0, 0], r"weight_block_size=\[0, 0\] is not \[rows, columns\]"),
        (128, "weight_block_size=128 is not"),
        ([128], "is not"),
        ([128.0, True], "is not"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_fp8_blocks_are_those_that_the_config_says(said: object, words: str, base: Folders, tmp_path: Path) -> None:
    """Scales of other blocks are refused, and so is what is no size."""
    _in_fp8(tmp_path / "coded", base("dense"), (128, 128), said)
    with pytest.raises(ModelError, match=words):
        model_free(tmp_path / "coded", output_dir=tmp_path / "made", scheme="W4A16", ignore="lm_head")


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")], ids=str)
def test_fp8_blocks_have_scales_above_zero(value: float, base: Folders, tmp_path: Path) -> None:
    """But for blocks of zeros, which need none."""
    _in_fp8(tmp_path / "coded", base("dense"), (128, 128))
    file, name = tmp_path / "coded" / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[f"{name}_scale_inv"][0, 1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name}: 1 of its 3 scales are not finite and above zero \({value}\)"):
        model_free(tmp_path / "coded", output_dir=tmp_path / "made", scheme="W4A16", ignore="lm_head")
    tensors[name][:, 128:256] = 0
    tensors[f"{name}_scale_inv"][0, 1] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    model_free(tmp_path / "coded", output_dir=tmp_path / "made", scheme="W4A16", ignore="lm_head")


def test_memory_is_less_than_two_tensors(base: Folders, tmp_path: Path, peak_bytes: Callable[[Callable[[], object]], int]) -> None:
    """Of a model whose largest tensor has 16 MB."""
    tensors = {name: value for path in base("dense").glob("*.safetensors") for name, value in load_file(path).items()}
    wide = {"gate_proj": (65536, 128), "up_proj": (65536, 128), "down_proj": (128, 65536)}
    for part, shape in wide.items():
        tensors[f"model.layers.0.mlp.{part}.weight"] = torch.full(shape, 0.5, dtype=torch.bfloat16)
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base("dense") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 65536}))
    del tensors
    peak = peak_bytes(lambda: model_free(folder, output_dir=tmp_path / "made", scheme="FP8_DYNAMIC", ignore="lm_head"))
    assert peak < 2 * 65536 * 128 * 2


def test_the_command_says_what_it_did(
    base: Folders, expected: Expected, tmp_path: Path, capsys: pytest.CaptureFixture[str], check_same: Check
) -> None:
    """With a bar, and as data; two workers give the same bytes in test_interruptions.py, and each imports torch."""
    arguments = ["convert", str(base("dense")), "--scheme", "FP8_DYNAMIC", "--ignore", "lm_head", "--json"]
    assert main([*arguments, "--output-dir", str(tmp_path / "made"), "--workers", "1"]) == 0
    output = capsys.readouterr()
    assert "convert " in output.err and json.loads(output.out)["pipeline"] == "data_free"
    check_same(tmp_path / "made", expected(base("dense"), scheme="FP8_DYNAMIC", ignore=["lm_head"]))
    assert load_compressed(tmp_path / "made")(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    assert main([*arguments, "--output-dir", str(tmp_path / "made"), "--resume", "--quiet"]) == 0
    output = capsys.readouterr()
    assert "holds the result of this very run already" in output.err and json.loads(output.out)["modules"]


def test_the_words_of_llm_compressor_are_taken(base: Folders, expected: Expected, tmp_path: Path, check_same: Check) -> None:
    """Or it is said what is meant."""
    asked: dict[str, Any] = {"scheme": "FP8_DYNAMIC", "ignore": ["lm_head"], "max_workers": 1, "device": "cpu"}
    model_free_ptq(model_stub=base("dense"), save_directory=tmp_path / "made", **asked)
    check_same(tmp_path / "made", expected(base("dense"), scheme="FP8_DYNAMIC", ignore=["lm_head"]))
    published: dict[str, Any] = {"ignore": ["re:.*vision.*", "lm_head", "re:.*embed_tokens.*"], "max_workers": 1, "device": ["cpu"]}
    scheme = CTScheme(**preset_name_to_scheme("FP8_BLOCK", []).model_dump() | {"targets": ["re:.*self_attn.(q|k|v|o)_proj$"]})
    made = model_free_ptq(base("dense"), tmp_path / "blocks", scheme=scheme, converter=FP8BlockDequantizer(targets=["re:x"]), **published)
    assert made.report.modules and all(".self_attn." in name for name in made.report.modules)
    for wrong, words in (
        ({"converter": object()}, "converter: object"),
        ({"device": ["cpu", "cpu"]}, "2 devices"),
        ({"config": {}}, "config:"),
    ):
        with pytest.raises(UserInputError, match=words):
            model_free_ptq(base("dense"), tmp_path / "other", **asked | wrong)


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_a_quantized_base_is_read_by_a_converter_that_gives_floats(scheme: str, base: Folders, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    model_free(base("dense"), output_dir=quantized, scheme=scheme, ignore="lm_head")
    asked: dict[str, Any] = {"save_directory": tmp_path / "made", "scheme": "W8A16", "ignore": ["lm_head"]}
    converter = CompressedTensorsDequantizer(quantized, ignore=["re:.*embed_tokens", "re:.*norm"])
    assert len(model_free_ptq(quantized, converter=converter, **asked).report.modules) == 7
    before, after = (load_compressed(folder).model.layers[0].mlp.up_proj.dequantized_weight() for folder in (quantized, tmp_path / "made"))
    assert float((after - before).norm() / before.norm()) < 0.01  # nearer than to the base of the base
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "quantized"]


def test_a_converter_that_gives_no_floats_is_refused_by_name(base: Folders, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    model_free(base("dense"), output_dir=quantized, scheme="FP8_DYNAMIC", ignore="lm_head")
    for converter, words in (
        (
            CompressedTensorsDequantizer(quantized),
            r"CompressedTensorsDequantizer cannot read .*; give the base that it was made for, and name",
        ),
        (
            ModelOptNvfp4Converter(targets=["re:.*mlp.*"]),
            "ModelOptNvfp4Converter gives weights that are quantized already, and floats alone",
        ),
    ):
        with pytest.raises(UserInputError, match=words):
            model_free_ptq(quantized, tmp_path / "made", scheme="W8A16", converter=converter)
    assert [path.name for path in tmp_path.iterdir()] == ["quantized"]


@pytest.mark.filterwarnings("ignore:.* stay floats and are stored fused")
def test_patterns_may_have_the_names_of_files(base: Folders, tmp_path: Path) -> None:
    """As `model_free_ptq` of llm-compressor means them."""
    asked = [r"re:model.layers.\d+.self_attn.(q|k|v|o)_proj$", r"re:model.layers.\d+.block_sparse_moe.experts.\d+.w[1-3]$"]
    scheme = CTScheme(**preset_name_to_scheme("W4A16", []).model_dump() | {"targets": asked})
    model_free_ptq(base("experts"), tmp_path / "theirs", scheme=scheme)
    model_free(base("experts"), output_dir=tmp_path / "ours", scheme="W4A16", targets=["re:.*self_attn.*_proj$", "re:.*experts"])
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    ignored = model_free(base("experts"), output_dir=tmp_path / "c", scheme="W8A16", ignore=["lm_head", "re:.*block_sparse_moe"])
    assert len(ignored.report.modules) == 4


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({"scheme": "FP8"}, SchemeError, "FP8 has static scales of inputs, which only calibration data can give; take FP8_DYNAMIC"),
        ({"scheme": "NVFP4"}, SchemeError, "take NVFP4A16"),
        ({"scheme": "W4A17"}, RecipeError, "did you mean 'W4A16'"),
        ({"scheme": "W4A16", "recipe": "x"}, UserInputError, "both scheme and recipe"),
        ({}, UserInputError, "neither scheme nor recipe"),
        (
            {"scheme": {"W8A16": ["Linear"]}, "targets": "re:.*up_proj"},
            RecipeError,
            "beside schemes that name their own; leave targets out",
        ),
        ({"scheme": preset_scheme("W8A16", ["Linear"]), "targets": ["re:.*up_proj"]}, RecipeError, "beside schemes that name their own"),
        ({"scheme": "W4A16", "workers": 0}, UserInputError, "at least 1"),
        ({"scheme": "W4A16", "workers": 10**30}, UserInputError, "more than help on this machine; give at most"),
        ({"recipe": {"GPTQModifier": {"scheme": "W4A16"}}}, RecipeError, "needs more than the weights by themselves"),
        ({"recipe": {"QuantizationModifier": {"scheme": "W4A16"}}, "ignore": "lm_head"}, UserInputError, "beside a recipe"),
    ],
)
def test_what_needs_more_than_weights_is_refused(
    asked: dict[str, Any], kind: type[Exception], words: str, base: Folders, tmp_path: Path
) -> None:
    """By name, before anything is written."""
    with pytest.raises(kind, match=words):
        model_free(base("dense"), output_dir=tmp_path / "made", **asked)
    assert not list(tmp_path.iterdir())
