"""Bad input by the dozen: damaged folders, odd configs, broken rows, impossible options.

Each is one line and exit code 1 (2 for wrong arguments of the command line); nothing is left behind, nothing of the input is changed.
"""

from __future__ import annotations

import importlib
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import QuantizationModifier, oneshot, plan, train
from compressor.cli.main import main
from compressor.errors import CheckpointError, CompressorError, DatasetError, ModelError, RecipeError, UserInputError

WEIGHTS = "model.safetensors"
IDS = torch.arange(64, dtype=torch.int64).reshape(4, 16)


def quantize(modifier: str = "GPTQModifier", **settings: Any) -> str:
    return json.dumps({"quant_stage": {"quant_modifiers": {modifier: {"ignore": ["lm_head"], "scheme": "W8A8", **settings}}}})


def write(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(size: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(raw[: int(size * len(raw))])

    return damage


def config(**fields: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **fields}))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def scaled(name: str, by: float) -> Callable[[Path], None]:
    return tensors(lambda state: {**state, name: state[name] * by})


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def indexed(index: str) -> Callable[[Path], None]:
    return replaced(WEIGHTS, lambda path: path.with_name(f"{WEIGHTS}.index.json").write_text(index))


UP = "model.layers.1.mlp.up_proj.weight"
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut in the header": (cut(0.0001), "not a whole safetensors file"),
    "cut in the middle": (cut(0.5), "not a whole safetensors file"),
    "cut at the end": (cut(0.999), "not a whole safetensors file"),
    "empty weights": (write(WEIGHTS, b""), "not a whole safetensors file"),
    "a header without end": (write(WEIGHTS, struct.pack("<Q", 2**63) + b"x"), "not a whole safetensors file"),
    "text for weights": (write(WEIGHTS, "hello world"), "not a whole safetensors file"),
    "weights are a folder": (replaced(WEIGHTS, Path.mkdir), WEIGHTS),
    "weights are a link to themselves": (replaced(WEIGHTS, lambda path: path.symlink_to(path)), "link to what is not there"),
    "no weights": (replaced(WEIGHTS, lambda path: None), "no weights were found"),
    "an index of nothing": (indexed("{}"), "weight_map"),
    "an index of numbers": (indexed('{"weight_map": {"a": 1}}'), "weight_map"),
    "an index that is a list": (indexed("[]"), "holds a list"),
    "an index of another file": (indexed('{"weight_map": {"a": "b.safetensors"}}'), "1 of 1 weight files are missing"),
    "a weight is missing": (
        tensors(lambda state: {k: v for k, v in state.items() if k != UP}),
        "1 weights of the model are not in its files",
    ),
    "a weight too many": (tensors(lambda state: {**state, "model.x": torch.ones(2)}), "have no place in the model"),
    "a weight of another shape": (tensors(lambda state: {**state, UP: state[UP][1:].contiguous()}), "another shape"),
    "no tensor at all": (tensors(lambda state: {}), "not in its files"),
    "NaN in a weight": (scaled(UP, float("nan")), f"{UP}: holds NaN or infinity"),
    "infinity in a weight": (scaled(UP, float("inf")), f"{UP}: holds NaN or infinity"),
    "infinite activations": (scaled("model.layers.0.input_layernorm.weight", float("inf")), "NaN or infinity"),
    "NaN in the embedding": (scaled("model.embed_tokens.weight", float("nan")), "NaN"),
    "no config": (replaced("config.json", lambda path: None), "no config.json was found"),
    "an empty config": (write("config.json", ""), "not valid JSON"),
    "a config that is a list": (write("config.json", "[]"), "holds a list"),
    "a config of bytes": (write("config.json", b"\xff\xfe\x00"), "not valid JSON"),
    "a config without end": (write("config.json", "[" * 100_000), "not valid JSON"),
    "a config that is a folder": (replaced("config.json", Path.mkdir), "no config.json was found"),
    "a config that is a link to itself": (replaced("config.json", lambda path: path.symlink_to(path)), "link to what is not there"),
    "no generation config": (write("generation_config.json", "xx"), "generation_config.json: not valid JSON"),
    "no tokenizer": (write("tokenizer.json", '{"x":'), "tokenizer cannot be loaded"),
    "a thousand million layers": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000 is not between"),
    "a vocabulary of 10^13": (config(vocab_size=10**13), "vocab_size=10000000000000 is not between"),
    "10^13 positions": (config(max_position_embeddings=10**13), "max_position_embeddings=10000000000000 is not between"),
    "no positions": (config(max_position_embeddings=0), "max_position_embeddings=0 is not between"),
    "fewer than no positions": (config(max_position_embeddings=-5), "max_position_embeddings=-5 is not between"),
    "no columns": (config(hidden_size=0), "hidden_size=0 is not between"),
    "columns in words": (config(hidden_size="64"), "cannot load it"),
    "other columns": (config(hidden_size=64), "another shape"),
    "half a column": (config(hidden_size=64.5), "cannot load it"),
    "no heads": (config(num_attention_heads=0), "cannot load it"),
    "one layer too many": (config(num_hidden_layers=3), "not in its files"),
    "one layer too few": (config(num_hidden_layers=1), "have no place in the model"),
    "an activation that does not exist": (config(hidden_act="nope"), "cannot load it"),
    "a kind that does not exist": (config(model_type="nope"), "cannot load it"),
    "padding outside of the vocabulary": (config(pad_token_id=10**6), "cannot load it"),
    "quantized already": (config(quantization_config={"quant_method": "gptq"}), "quantized already (gptq)"),
}


def rows(*lines: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (folder / "rows.jsonl").write_text(text + "\n")
        return folder / "rows.jsonl"

    return make


def arrays(**named: torch.Tensor) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save_file(named, folder / "arrays.safetensors")
        return folder / "arrays.safetensors"

    return make


def raw(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def ones(value: float = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((4, 16), value, dtype=dtype)


DATA: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a link to itself": (lambda folder: (folder / "x.jsonl").symlink_to(folder / "x.jsonl") or folder / "x.jsonl", "a link to none"),
    "a folder": (lambda folder: (folder / "x.jsonl").mkdir() or folder / "x.jsonl", "this is no file"),
    "a name that no disk takes": (lambda folder: folder / ("x" * 400 + ".jsonl"), "no such file"),
    "a name of the hub": (lambda folder: "wikitext", "wikitext"),
    "no bytes": (raw("x.safetensors", b""), "no readable safetensors"),
    "no parquet": (raw("x.parquet", b"x"), "parquet"),
    "no text": (raw("x.txt", b"\n \n"), "no sample"),
    "bytes for text": (raw("x.txt", b"\xff\xfe\x00\x01"), "UTF-8"),
    "no tokens of that name": (arrays(tokens=IDS), "input_ids"),
    "floats": (arrays(input_ids=IDS.float()), "no token ids"),
    "flags": (arrays(input_ids=IDS > 3), "no token ids"),
    "negative ids": (arrays(input_ids=IDS - 5), "negative"),
    "ids beyond the vocabulary": (arrays(input_ids=IDS + 4000), "token id 4000"),
    "huge ids": (arrays(input_ids=IDS * 2**50), "token id"),
    "one dimension": (arrays(input_ids=IDS[0].clone()), "not [N, T]"),
    "three dimensions": (arrays(input_ids=IDS[None]), "not [N, T]"),
    "no rows": (arrays(input_ids=IDS[:0]), "no sample"),
    "no columns": (arrays(input_ids=IDS[:, :0].contiguous()), "empty"),
    "padding alone": (arrays(input_ids=IDS, attention_mask=ones(0)), "masked out"),
    "nothing that counts": (arrays(input_ids=IDS, loss_mask=ones(0)), "masked out"),
    "a mask of another shape": (arrays(input_ids=IDS, attention_mask=torch.ones(4, 15)), "differ"),
    "a mask of NaN": (arrays(input_ids=IDS, attention_mask=ones(float("nan"))), "attention_mask holds nan"),
    "a mask of twos": (arrays(input_ids=IDS, attention_mask=ones(2, torch.int64)), "attention_mask holds 2"),
    "a loss mask of NaN": (arrays(input_ids=IDS, loss_mask=ones(float("nan"))), "loss_mask holds nan"),
    "half a loss": (arrays(input_ids=IDS, loss_mask=ones(0.5)), "loss_mask holds 0.5"),
    "blank lines": (rows("", "", ""), "no sample"),
    "no JSON": (rows({"text": "a b"}, "{"), "line 2: this is no JSON"),
    "JSON without end": (rows("[" * 100_000), "nested too deeply"),
    "a list for a row": (rows("[1, 2]"), "no row"),
    "empty texts": (rows({"text": ""}, {"text": "  "}), "empty"),
    "a text that is a number": (rows({"text": 5}), "where text should"),
    "half a character": (rows('{"text": "\\ud800"}'), "cannot read this text"),
    "ids in words": (rows({"input_ids": ["a"]}), "token ids"),
    "ids with a point": (rows({"input_ids": [1.5]}), "no token ids"),
    "ids in ids": (rows({"input_ids": [[1, 2], [3, 4]]}), "are not one sample; give each sample a row of its own"),
    "an id beyond all integers": (rows({"input_ids": [10**30]}), "token ids"),
    "a mask below zero": (rows({"input_ids": [1, 2], "attention_mask": [-1, 1]}), "attention_mask holds -1"),
    "a mask too short": (rows({"input_ids": [1, 2], "attention_mask": [1]}), "differ"),
    "conversations without a template": (rows({"messages": [{"role": "user", "content": "a"}]}), "no chat template"),
}


class Given(NamedTuple):
    """What the command line is given beside the usual."""

    words: str
    options: Mapping[str, str] = {}
    recipe: str | None = None
    code: int = 1


COMMANDS: dict[str, Given] = {
    "output in the model": Given("lies in the folder of the model", {"output-dir": "{base}/out"}),
    "output is the model": Given("lies in the folder of the model", {"output-dir": "{base}"}),
    "output in a circle of links": Given("cannot be followed", {"output-dir": "{tmp}/loop/out"}),
    "output below a file": Given("cannot be created", {"output-dir": "{tmp}/file/out"}),
    "output is a file": Given("is a file", {"output-dir": "{tmp}/file"}),
    "output without a name": Given("a path belongs", {"output-dir": ""}),
    "run folder without a name": Given("a path belongs", {"run-dir": ""}),
    "run folder is a file": Given("file", {"run-dir": "{tmp}/file"}),
    "a class without a name": Given("model_class", {"model-class": ""}),
    "a class of something else": Given("LlamaConfig", {"model-class": "LlamaConfig"}),
    "a device that is not there": Given("cuda:99", {"device": "cuda:99"}),
    "no memory": Given("activation_memory", {"activation-memory": "1XB"}),
    "a leaf that is not there": Given("nowhere", {"leaf": "nowhere:f"}),
    "stages of nothing": Given("sequential_targets 'Nope' matches no module", {"sequential-targets": "Nope"}),
    "a seed beyond all": Given("seed", {"seed": str(2**64)}),
    "an argument that nobody uses": Given("'a' is not used", {"recipe-arg": "a=1"}),
    "an argument without a value": Given("NAME=VALUE", {"recipe-arg": "a"}, code=2),
    "half a sample": Given("whole number", {"num-calibration-samples": "1.5"}, code=2),
    "no sample": Given("whole number", {"num-calibration-samples": "0"}, code=2),
    "an engine that does not exist": Given("does not exist; ", {"engine": "x"}, code=2),
    "everything is ignored": Given("leaves none", recipe=quantize(ignore=["re:.*"])),
    "targets that are no layers": Given("no linear layers", recipe=quantize(targets=["re:.*layernorm$"])),
    "two modifiers for one layer": Given(
        "belong to",
        recipe=json.dumps({"q_stage": {"q_modifiers": [{"GPTQModifier": {"scheme": "W8A8"}}, {"GPTQModifier": {"scheme": "W4A16"}}]}}),
    ),
    "zeros that are not there": Given(
        "would leave every tensor of the model as it is",
        recipe=json.dumps({"q_stage": {"q_modifiers": {"ConstantPruningModifier": {"targets": ["Linear"]}}}}),
    ),
    "fewer zeros than one": Given(
        "left every tensor of the model as it was",
        recipe=json.dumps({"q_stage": {"q_modifiers": {"MagnitudePruningModifier": {"targets": ["Linear"], "final_sparsity": 1e-9}}}}),
    ),
    "pruning in steps": Given(
        "count the steps of a training",
        recipe=json.dumps({"q_stage": {"q_modifiers": {"MagnitudePruningModifier": {"final_sparsity": 0.5, "start": 0, "end": 4}}}}),
    ),
    "a start of what does not train": Given("start=3.0 is for training", recipe=quantize(start=3)),
    "a recipe for training": Given(
        "run_type=train", recipe=json.dumps({"q_stage": {"run_type": "train", "q_modifiers": {"GPTQModifier": {"scheme": "W8A8"}}}})
    ),
}


def swept(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """Run the command; return its one line, and see that nothing was written or changed."""
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    try:
        found: Any = main(arguments)
    except SystemExit as stop:
        found = stop.code
    assert found == code
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line.strip() and (code == 1 or "error:" in line)]
    assert len(lines) == 1, said.err
    assert lines[0].startswith(f"compressor {arguments[0]}: error: ")
    assert "; " in lines[0] or code == 2, lines[0]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    return lines[0]


def command(
    model: Path | str, data: Path | str, out: Path, recipe: str = quantize(), options: Mapping[str, str] | None = None
) -> list[str]:
    merged = {"recipe": recipe, "dataset": str(data), "output-dir": str(out), **(options or {})}
    return ["oneshot", str(model), "--quiet", *(word for name, value in merged.items() for word in (f"--{name}", value))]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_damaged_folder(name: str, llama_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, words = FOLDERS[name]
    shutil.copytree(llama_dir, tmp_path / "base")
    damage(tmp_path / "base")
    assert words in swept(tmp_path, command(tmp_path / "base", tokens_file, tmp_path / "out"), capsys)


# What cannot be read, or gives no model, is refused by whoever looks into the weights. A config alone is enough for these verbs, and a
# weight too many is lost by those alone who write.
UNREADABLE = [name for name in list(FOLDERS)[: list(FOLDERS).index("NaN in a weight")] if name not in ("no weights", "a weight too many")]


@pytest.mark.parametrize("verb", ["trace", "mappings"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_damaged_folder_is_not_stood_in_for(
    verb: str, name: str, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = FOLDERS[name]
    shutil.copytree(llama_dir, tmp_path / "base")
    damage(tmp_path / "base")
    assert words in swept(tmp_path, [verb, str(tmp_path / "base")], capsys)


@pytest.mark.parametrize("name", DATA)
def test_data_that_cannot_be_used(name: str, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = DATA[name]
    assert words in swept(tmp_path, command(llama_dir, make(tmp_path), tmp_path / "out"), capsys)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_done(name: str, llama_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = COMMANDS[name]
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    shutil.copytree(llama_dir, tmp_path / "base")
    options = {key: value.format(tmp=tmp_path, base=tmp_path / "base") for key, value in given.options.items()}
    arguments = command(tmp_path / "base", tokens_file, tmp_path / "out", given.recipe or quantize(), options)
    assert given.words in swept(tmp_path, arguments, capsys, given.code)


@pytest.mark.parametrize("model", ["", "x" * 5000, "a\0b", "meta/llama", "https://x.y/z", "/dev/null", "\n"])
def test_what_is_no_model(model: str, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept(tmp_path, command(model, tokens_file, tmp_path / "out"), capsys)


@pytest.mark.parametrize("name", ["mödel 模型", "🎉", "it's", "new\nline", "100%", "[brackets]", "*", "$x ${y} {z}"])
def test_a_name_may_be_any_that_the_disk_takes(
    name: str, llama_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama_dir, tmp_path / name)
    assert main(command(tmp_path / name, tokens_file, tmp_path / "out" / name)) == 0
    assert (tmp_path / "out" / name / WEIGHTS).is_file()


KINDS: dict[str, tuple[Any, ...]] = {
    "model": (5, None, [], {}, b"x", object()),
    "num_calibration_samples": (1.5, "x", True, float("nan")),
    "max_seq_length": (1.5, "x", True),
    "batch_size": (1.5, "x", True),
    "text_column": (5, None, ""),
    "shuffle_calibration_samples": ("x", None, 1),
    "pipeline": (5, []),
    "sequential_targets": (5, "Linear", [], [5], [""], torch.ones(2)),
    "propagate_error": ("x", None),
    "max_variants": (1.5, None),
    "leaves": (5, "x", None, [5]),
    "offload_dir": (5, True),
    "device": (None, 5),
    "model_class": (5, ""),
    "seed": (1.5, "x", None, True),
    "progress": ("x", None),
    "report_to": (5, None, ["wandb", 5]),
    "tokenizer": (5, [], object()),
    "recipe_args": ("a", 5, [5], {5: 1}, ["=1"]),
    "output_dir": (5, "", True),
    "run_dir": (5, ""),
    "resume": ("x", None),
    "split": (5, ""),
    "stage": (5, ""),
    "dataset_config_name": (5, ""),
    "streaming": ("x", None),
    "raw_kwargs": (5, ["a"], {5: 1}),
    "preprocessing_func": (5, ""),
    "remove_columns": (5, [5]),
    "use_loss_mask": ("x", None),
    "processor": (5, object()),
    "config_name": (5, ""),
    "tie_word_embeddings": ("x", None),
    "concatenate_data": ("x", None),
    "min_tokens_per_module": ("x", True),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_argument_of_another_kind(name: str, llama_dir: Path) -> None:
    for value in KINDS[name]:
        usual: dict[str, Any] = {"model": llama_dir, "recipe": quantize(), "dataset": IDS}
        with pytest.raises(UserInputError, match=f"^{name}: .* was given, where .* belongs; correct it$"):
            oneshot(**{**usual, name: value})


def test_training_and_plans_look_at_their_arguments_too(llama_dir: Path) -> None:
    for name, value in (("epochs", "1"), ("ema", 0.5), ("steps", 1.5), ("model", None), ("recipe_args", 5)):
        with pytest.raises(UserInputError, match=f"^{name}: "):
            train(**{"model": llama_dir, "dataset": IDS, name: value})  # type: ignore[arg-type]
    for value in ((row for row in IDS), {"input_ids": IDS}):
        with pytest.raises(DatasetError, match=r"^eval_dataset: a (generator|dict) is no source .* token tensors or mappings$"):
            train(llama_dir, dataset=IDS, steps=1, eval_dataset=value)
    with pytest.raises(ModelError, match="dtype: 'x'"):
        plan(llama_dir, recipe=quantize(), dtype="x")
    recipe = {
        "quant_stage": {"run_type": "oneshot", "quant_modifiers": {"QuantizationModifier": {"scheme": "W8A16", "start": 0, "end": 1}}}
    }
    with pytest.raises(RecipeError, match="run_type=oneshot, and this is train"):
        train(llama_dir, dataset=IDS, recipe=recipe, steps=1)


def test_a_tokenizer_may_be_a_path_and_arguments_a_list(llama_dir: Path, tmp_path: Path) -> None:
    recipe = quantize(scheme="${name}")
    named = oneshot(llama_dir, recipe=recipe, recipe_args={"name": "W8A8"}, dataset=["a b c"], tokenizer=str(llama_dir))
    for given in (["name=W8A8"], "name=W8A8"):
        listed = oneshot(llama_dir, recipe=recipe, recipe_args=given, dataset=["a b c"], tokenizer=llama_dir)
        assert listed.record == named.record
    for folder, words in ((tmp_path, "holds none"), (tmp_path / "nowhere", "is not a folder")):
        with pytest.raises(ModelError, match=words):
            oneshot(llama_dir, recipe=quantize(), dataset=["a b c"], tokenizer=folder)
    with pytest.raises(RecipeError, match="given twice"):
        oneshot(llama_dir, recipe=recipe, recipe_args=["name=W8A8", "name=FP8"], dataset=["a b c"])


def test_tensors_without_values_are_no_data(llama_dir: Path) -> None:
    for data in (IDS.to("meta"), IDS.to_sparse(), torch.utils.data.DataLoader([{"input_ids": IDS.to("meta")}], batch_size=None)):
        with pytest.raises(DatasetError, match="ordinary tensor"):
            oneshot(llama_dir, recipe=quantize(), dataset=data)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("modifier", ["GPTQModifier", "QuantizationModifier"])
def test_infinite_inputs_are_an_error_of_ours(value: float, modifier: str, llama_dir: Path) -> None:
    batches = torch.utils.data.DataLoader([{"inputs_embeds": torch.full((1, 4, 128), value, dtype=torch.bfloat16)}], batch_size=None)
    for pipeline in ("basic", "sequential"):
        with pytest.raises(CompressorError, match=r"NaN or infin|not finite|infinite"):
            oneshot(llama_dir, recipe=quantize(modifier, scheme="FP8"), dataset=batches, pipeline=pipeline)


def test_nan_in_what_nobody_compresses_is_noted(llama_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_dir, tmp_path / "base")
    scaled("model.norm.weight", float("nan"))(tmp_path / "base")
    result = oneshot(tmp_path / "base", recipe=quantize("QuantizationModifier"))
    assert result.report.notes == ["1 parameters that stay as they are hold NaN or infinity (model.norm.weight)"]


def test_a_dtype_without_room_for_a_weight_is_refused(llama_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_dir, tmp_path / "base")
    scaled("model.norm.weight", 1e6)(tmp_path / "base")
    with pytest.raises(ModelError, match=r"dtype: float16 ends at 65,504, and model\.norm\.weight hold more"):
        oneshot(tmp_path / "base", recipe=quantize("QuantizationModifier"), dtype="float16")


def test_huge_weights_have_an_error_that_is_a_number(llama_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_dir, tmp_path / "base")
    scaled(UP, 1e30)(tmp_path / "base")
    errors = [oneshot(base, recipe=quantize("QuantizationModifier")).report.modules[UP.removesuffix(".weight")].error
              for base in (tmp_path / "base", llama_dir)]  # fmt: skip
    assert errors[0] == pytest.approx(errors[1], rel=0.05)


def test_a_modifier_that_was_used_is_refused(llama_dir: Path) -> None:
    modifier = QuantizationModifier(scheme="W4A16", ignore=["lm_head"])
    oneshot(llama_dir, recipe=modifier)
    with pytest.raises(RecipeError, match="it was used in an earlier run"):
        oneshot(llama_dir, recipe=modifier)


def test_a_disk_without_room_is_known_before_calibration(llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        importlib.import_module("compressor.entrypoints.oneshot"),
        "run_pipeline",
        lambda *args, **keywords: pytest.fail("calibration has begun"),
    )
    base = sum(path.stat().st_size for path in llama_dir.glob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=base // 2))
    with pytest.raises(CheckpointError, match=r"this run will write about [\d,]+ bytes there, and [\d,]+ are free"):
        oneshot(llama_dir, recipe=quantize(), dataset=IDS, output_dir=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_said_to_be_written_is_what_is_written(llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(CheckpointError) as caught:
        oneshot(llama_dir, recipe=quantize("QuantizationModifier", scheme="W4A16"), output_dir=tmp_path / "out")
    monkeypatch.undo()
    promised = int(str(caught.value).split("about ")[1].split(" bytes")[0].replace(",", ""))
    oneshot(llama_dir, recipe=quantize("QuantizationModifier", scheme="W4A16"), output_dir=tmp_path / "out")
    written = (tmp_path / "out" / WEIGHTS).stat().st_size
    assert written <= promised <= 2 * written
