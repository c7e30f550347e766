"""`model.save_pretrained` and `result.save` of a compressed model write what `output_dir=` writes; what cannot be saved so is an error."""

from __future__ import annotations

import copy
import errno
import gc
import io
import json
import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compressor import load_compressed, oneshot, train
from compressor.errors import CheckpointError, ModelError, OutputError, SchemeError, UserInputError
from tests import tiny

IDS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def quantize(**settings: Any) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"ignore": ["lm_head"], **settings}}}}


W8 = quantize(scheme="W8A16")
PRUNE = {
    "quant_stage": {"quant_modifiers": {"MagnitudePruningModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "final_sparsity": 0.5}}}
}


def llama(**changes: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(
        tiny.config("llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1, **changes), dtype=torch.bfloat16
    ).eval()


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def mixtral() -> Any:
    from transformers import MixtralForCausalLM

    torch.manual_seed(0)
    config = tiny.config("mixtral", hidden_size=128, intermediate_size=128, num_hidden_layers=1)  # type: ignore[arg-type]
    return MixtralForCausalLM._from_config(config, dtype=torch.float32).eval()


def gpt2() -> Any:
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    config = tiny.config("gpt2", n_embd=128, n_layer=1)
    return GPT2LMHeadModel._from_config(config, dtype=torch.float32).eval()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")), unk_token="<unk>")


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gptq": (llama, json.loads(json.dumps(quantize(scheme="W4A16")).replace("QuantizationModifier", "GPTQModifier"))),
    "int8 inputs": (llama, quantize(scheme="W8A8")),
    "fp8 static inputs": (llama, quantize(scheme="FP8")),
    "keys and values": (llama, quantize(scheme="W8A16", kv_cache_scheme=KV)),
    "keys and values alone": (llama, {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"kv_cache_scheme": KV}}}}),
    "tied embeddings": (tied, W8),
    "embedding": (llama, quantize(scheme="W8A16", targets=["Embedding", "Linear"])),
    "experts": (mixtral, W8),
    "experts that transformers cannot read": (mixtral, quantize(scheme="W8A8")),
    "pruned": (llama, PRUNE),
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def different(first: Path, second: Path) -> list[str]:
    one, two = files(first), files(second)
    return [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def reloaded(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval())


def compressed(make: Callable[[], Any] = llama, recipe: dict[str, Any] = W8) -> Any:
    model = make()
    oneshot(model, recipe=recipe, dataset=IDS)
    return model


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_later_is_what_output_dir_writes(name: str, tmp_path: Path) -> None:
    make, recipe = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # transformers and quantized experts: said in tests of its own
        oneshot(make(), recipe=recipe, dataset=IDS, tokenizer=tokenizer(), output_dir=tmp_path / "wanted")
        model = make()
        result = oneshot(model, recipe=recipe, dataset=IDS, tokenizer=tokenizer())
        result.save(tmp_path / "result")
        assert different(tmp_path / "wanted", tmp_path / "result") == []
        del result
        gc.collect()
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        unpickled = torch.load(stream, weights_only=False)
        for number, one in enumerate((model, copy.deepcopy(model), unpickled)):
            one.save_pretrained(tmp_path / f"{number}", save_compressed=True)
            tokenizer().save_pretrained(tmp_path / f"{number}")
            assert different(tmp_path / "wanted", tmp_path / f"{number}") == []
        assert isinstance(model.save_pretrained(tmp_path / "bare"), type(None))
    assert {"compression.json", "config.json", "model.safetensors"} <= files(tmp_path / "bare").keys()
    assert ("quantization_config" in json.loads((tmp_path / "bare" / "config.json").read_text())) is (name != "pruned")
    if name != "experts that transformers cannot read":
        assert torch.equal(reloaded(tmp_path / "bare"), logits(model))


def test_a_model_from_a_folder_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    oneshot(tmp_path / "base", recipe=W8, output_dir=tmp_path / "wanted")
    result = oneshot(tmp_path / "base", recipe=W8)
    result.save(str(tmp_path / "result"))
    assert different(tmp_path / "wanted", tmp_path / "result") == []
    result.model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    assert set(different(tmp_path / "wanted", tmp_path / "model")) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_a_trained_model_is_saved_alike(tmp_path: Path) -> None:
    def trained(model: Any, **settings: Any) -> Any:
        recipe = quantize(scheme="W8A16", start=0, end=2)
        return train(model, recipe=recipe, dataset=IDS, steps=2, batch_size=2, max_seq_length=24, mode="eager", **settings)

    trained(llama(), output_dir=tmp_path / "wanted")
    model = llama()
    result = trained(model)
    result.save(tmp_path / "result")
    model.save_pretrained(tmp_path / "model")
    assert different(tmp_path / "wanted", tmp_path / "result") == different(tmp_path / "wanted", tmp_path / "model") == []
    assert torch.equal(reloaded(tmp_path / "model"), logits(model))


def test_a_loaded_checkpoint_is_saved_again(tmp_path: Path) -> None:
    compressed().save_pretrained(tmp_path / "first")
    load_compressed(tmp_path / "first").save_pretrained(tmp_path / "second")  # type: ignore[operator]
    assert different(tmp_path / "first", tmp_path / "second") == []
    (tmp_path / "first" / "compression.json").unlink()
    load_compressed(tmp_path / "first").save_pretrained(tmp_path / "third")  # type: ignore[operator]
    assert different(tmp_path / "first", tmp_path / "third") == []


def test_a_module_of_ones_own_is_saved_by_its_result(tmp_path: Path) -> None:
    recipe = quantize(scheme="W8A16", targets=["0"], ignore=[])
    layers = nn.Sequential(nn.Linear(128, 8), nn.Linear(8, 8))
    oneshot(copy.deepcopy(layers), recipe=recipe, output_dir=tmp_path / "wanted")
    result = oneshot(layers, recipe=recipe)
    result.save(tmp_path / "result")
    assert different(tmp_path / "wanted", tmp_path / "result") == []
    assert not hasattr(layers, "save_pretrained")


class OwnSaver(nn.Sequential):
    """As a module of huggingface_hub has it: it would write codes that its from_pretrained takes for nothing."""

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).mkdir()


@pytest.mark.parametrize("case", ["gptq", "int8 inputs", "keys and values alone", "tied embeddings", "experts"])
def test_a_model_inside_the_compressed_one_saves_what_it_is(case: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    make, recipe = CASES[case]
    model = oneshot(make(), recipe=recipe, dataset=IDS).model
    model.model.save_pretrained(tmp_path / "in")
    wanted = model.model(input_ids=IDS).last_hidden_state
    for found in (AutoModel.from_pretrained(tmp_path / "in"), load_compressed(tmp_path / "in", model_class="AutoModel", device="cpu")):
        assert torch.equal(found(input_ids=IDS).last_hidden_state, wanted)
    assert not (tmp_path / "in" / "compression.json").exists()


def test_models_inside_one_that_cannot_be_saved_can(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = llama(), llama()

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.second(input_ids=self.first(input_ids=input_ids).logits.argmax(-1))

    pair = oneshot(Pair(), recipe=quantize(scheme="W8A16", targets=["re:first.*proj"], ignore=[]), dataset=IDS).model
    assert "save_pretrained" in vars(pair.first) and "save_pretrained" not in vars(pair) | vars(pair.second)
    pair.first.save_pretrained(tmp_path / "first")
    assert torch.equal(reloaded(tmp_path / "first"), logits(pair.first))


def test_a_save_pretrained_that_knows_no_codes_is_refused(tmp_path: Path) -> None:
    model = OwnSaver(nn.Linear(128, 8))
    result = oneshot(model, recipe=quantize(scheme="W8A16", targets=["0"], ignore=[]))
    with pytest.raises(ModelError, match=r"result\.save"):
        model.save_pretrained(tmp_path / "out")
    assert result.save(tmp_path / "out") == tmp_path / "out"
    pruned = OwnSaver(nn.Linear(128, 8))
    oneshot(pruned, recipe={"quant_stage": {"quant_modifiers": {"MagnitudePruningModifier": {"targets": ["0"], "final_sparsity": 0.5}}}})
    pruned.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "plain").is_dir()


@pytest.mark.parametrize("name", ["gptq", "tied embeddings", "embedding", "experts", "pruned", "transposed"])
def test_dequantized_weights_are_an_ordinary_model(name: str, tmp_path: Path) -> None:
    make, recipe = CASES.get(name, (gpt2, quantize(scheme="W8A16", targets=["Conv1D"])))
    model = compressed(make, recipe)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "out", save_compressed=False)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not (tmp_path / "out" / "compression.json").exists()
    assert torch.equal(reloaded(tmp_path / "out"), logits(model))
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", ["int8 inputs", "keys and values alone"])
def test_what_floats_cannot_say_is_not_dequantized(name: str, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=r"save_compressed=False.*quantized"):
        compressed(*CASES[name]).save_pretrained(tmp_path / "out", save_compressed=False)
    assert list(tmp_path.iterdir()) == []


def test_what_transformers_cannot_read_is_not_saved(tmp_path: Path) -> None:
    model = compressed(gpt2, quantize(scheme="W8A16", targets=["Conv1D"]))
    with pytest.raises(SchemeError, match="Conv1D"):
        model.save_pretrained(tmp_path / "out")
    moved = compressed(llama, quantize(scheme="NVFP4")).half()
    with pytest.raises(SchemeError, match="bfloat16"):
        moved.save_pretrained(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_saved_in_the_dtype_that_it_has(tmp_path: Path) -> None:
    model = compressed().float()
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert torch.equal(reloaded(tmp_path / "out"), logits(model))


KEYWORDS: dict[str, tuple[dict[str, Any], str]] = {
    "pickles": ({"safe_serialization": False}, "safetensors only"),
    "variant": ({"variant": "fp16"}, "variant"),
    "push": ({"push_to_hub": True}, r"model\.push_to_hub"),
    "distributed": ({"distributed_checkpoint": True}, "one process"),
    "format": ({"quantization_format": "dense"}, "schemes of the recipe"),
    "typo": ({"save_compresed": True}, "'save_compresed' is no argument"),
    "no state": ({"state_dict": {}}, "differ from the model's own"),
    "no tensors": ({"state_dict": {"a": 1}}, "something else than tensors"),
    "size of nothing": ({"max_shard_size": 0}, "max_shard_size: 0"),
    "size of less than a byte": ({"max_shard_size": "0.0001KB"}, "max_shard_size: '0.0001KB' has room for nothing"),
    "size in a unit that is none": ({"max_shard_size": "5XB"}, "5XB"),
    "size below zero": ({"max_shard_size": "-5GB"}, "max_shard_size: '-5GB' is no size in bytes"),
    "size without end": ({"max_shard_size": "infGB"}, "'infGB' is no size"),
    "yes": ({"max_shard_size": True}, "max_shard_size: True"),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_that_ask_for_something_else_are_refused(name: str, tmp_path: Path) -> None:
    keywords, match = KEYWORDS[name]
    with pytest.raises(UserInputError, match=match):
        compressed().save_pretrained(tmp_path / "out", **keywords)
    assert list(tmp_path.iterdir()) == []


def test_keywords_that_change_nothing_are_taken(tmp_path: Path) -> None:
    model = compressed()
    model.save_pretrained(tmp_path / "wanted")
    ignored = {"save_function": torch.save, "token": "x", "disable_sparse_compression": True, "safe_serialization": True}
    model.save_pretrained(tmp_path / "out", state_dict=model.state_dict(), **ignored)
    assert different(tmp_path / "wanted", tmp_path / "out") == []
    model.save_pretrained(tmp_path / "other process", is_main_process=False)
    assert not (tmp_path / "other process").exists()
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(reloaded(tmp_path / "shards"), logits(model))


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    model, out = compressed(), tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    tokenizer().save_pretrained(out)
    before = files(out)

    def full(*args: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def stuck(self: Path, target: Path) -> Path:
        return full() if target.name == "config.json" else rename(self, target)  # type: ignore[return-value]

    rename = Path.rename
    for place, name, fault in ((LlamaForCausalLM, "save_pretrained", full), (Path, "rename", stuck)):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fault)
            with pytest.raises(CheckpointError, match="No space left"):
                model.save_pretrained(out)
        assert files(out) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    model.save_pretrained(out)
    assert files(out).items() >= before.items() and (out / "config.json").exists()
    with pytest.raises(OutputError, match="holds a model already"):
        model.save_pretrained(out)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        model.save_pretrained(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OutputError, match="cannot be followed"):
        model.save_pretrained(tmp_path / "loop")
    with pytest.raises(OutputError, match="is no path"):
        model.save_pretrained("")


def test_what_a_killed_save_left_is_taken_away(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".out.partial-save").mkdir(parents=True)
    (out / ".out.partial-save" / "model.safetensors").write_text("half")
    compressed().save_pretrained(out)
    assert ".out.partial-save" not in {path.name for path in out.iterdir()}
    assert reloaded(out).isfinite().all()


def test_the_model_goes_as_soon_as_nobody_needs_it() -> None:
    model = compressed()
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_method_that_outlives_the_model_saves_it(tmp_path: Path) -> None:
    model = compressed()
    model.save_pretrained(tmp_path / "wanted")
    compressed().save_pretrained(tmp_path / "temporary")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    save = copy.deepcopy(model).save_pretrained
    del model
    gc.collect()
    copy.deepcopy(save)(tmp_path / "copy of the method")
    for name in ("temporary", "copy", "copy of the method"):
        assert different(tmp_path / "wanted", tmp_path / name) == []


def test_adapters_are_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    model, called = compressed(), []
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", lambda self, folder, *rest: called.append(folder))
    model._hf_peft_config_loaded = True
    model.save_pretrained(tmp_path / "adapters", save_compressed=True)
    assert called == [tmp_path / "adapters"]
    model._hf_peft_config_loaded, model.peft_config = False, {"default": 1}
    with pytest.raises(ModelError, match="adapters of peft"):
        model.save_pretrained(tmp_path / "out")


def test_a_compiled_model_is_saved_by_the_one_that_it_wraps(tmp_path: Path) -> None:
    model = compressed()
    model.save_pretrained(tmp_path / "wanted")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own making
        torch.compile(model).save_pretrained(tmp_path / "out")
    assert different(tmp_path / "wanted", tmp_path / "out") == []


def test_a_run_that_fails_leaves_save_pretrained_as_it_was(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(UserInputError):
        oneshot(model, recipe=W8, dataset=torch.full((2, 8), 4000), pipeline="basic")
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("how", ["output_dir", "save", "save_pretrained"])
@pytest.mark.parametrize("pair", [("lm_head", "model.embed_tokens"), ("model.norm", "model.layers.0.input_layernorm")])
def test_what_the_config_does_not_call_tied_is_stored_under_each_name(pair: tuple[str, str], how: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny.llama(hidden_size=128, intermediate_size=128, num_hidden_layers=1, tie_word_embeddings=False)
    model.get_submodule(pair[0]).weight = model.get_submodule(pair[1]).weight
    folder = tmp_path / "o"
    result = oneshot(model, recipe=W8, output_dir=folder if how == "output_dir" else None)
    if how == "save":
        result.save(folder)
    if how == "save_pretrained":
        result.model.save_pretrained(folder, save_compressed=True)
    with torch.no_grad():
        expected = result.model(IDS).logits
        for loaded in (AutoModelForCausalLM.from_pretrained(folder), load_compressed(folder)):
            assert torch.allclose(loaded(IDS).logits.float(), expected.float(), atol=1e-4)
