"""A folder that cannot be compressed is refused in one line; what is loaded is what the files hold."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compressor.errors import ModelError, OutOfMemoryError
from compressor.model.checkpoints.load import load_compressed
from compressor.model.checkpoints.save import save_checkpoint
from compressor.model.loading.empty import load_empty
from compressor.model.loading.load import load_model, resolve_device
from compressor.model.loading.stand_in import load_skeleton
from compressor.numerics import preset_scheme

WEIGHTS = "model.safetensors"


def _edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_weights(folder, *, drop=(), add=None):
    state = load_file(folder / WEIGHTS)
    save_file({name: value for name, value in state.items() if name not in drop} | (add or {}), folder / WEIGHTS, metadata={"format": "pt"})


def _truncate(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def _only_pickle(folder):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")


def _missing_shard(folder):
    (folder / WEIGHTS).unlink()
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    save_file({"a": torch.zeros(1)}, folder / files["a"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_a_folder_gives_model_tokenizer_and_nothing_on_the_terminal(source_dir, capfd, token_ids, make_model):
    loaded = load_model(source_dir)
    assert capfd.readouterr() == ("", "")
    assert not loaded.from_memory and loaded.source_dir == source_dir and loaded.unexpected_keys == ()
    assert loaded.tokenizer("a b a")["input_ids"] == [1, 2, 1]
    assert not loaded.model.training and loaded.model.dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(loaded.model(token_ids).logits, make_model()(token_ids).logits)


def test_tensors_that_loading_rounds_are_named(source_dir):
    assert load_model(source_dir).notes == ()
    norm = load_file(source_dir / WEIGHTS)["model.norm.weight"].float()
    _edit_weights(source_dir, add={"model.norm.weight": norm})
    assert load_model(source_dir).notes == ()  # wider, and nothing is lost
    _edit_weights(source_dir, add={"model.norm.weight": norm * 1.0001})
    (note,) = load_model(source_dir).notes
    assert note.startswith(
        "1 tensors (model.norm.weight) were rounded when they were loaded: float32 in the files and bfloat16 in the model"
    )
    wide = load_model(source_dir, dtype="float32")
    assert wide.notes == () and torch.equal(wide.model.model.norm.weight, norm * 1.0001)


def test_loading_is_quiet_but_leaves_the_users_settings(source_dir):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(str(source_dir))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("dtype", ["float32", "torch.float16", torch.float64])
def test_dtype_can_be_chosen(source_dir, dtype):
    assert str(load_model(source_dir, dtype=dtype).model.dtype).endswith(str(dtype).removeprefix("torch."))


def test_a_folder_without_tokenizer_has_none(source_dir):
    for path in source_dir.glob("token*.json"):
        path.unlink()
    assert load_model(source_dir).tokenizer is None


@pytest.mark.parametrize("model_class", ["AutoModel", "LlamaModel"])
def test_a_named_class_may_leave_weights_and_says_which(source_dir, model_class):
    loaded = load_model(source_dir, model_class=model_class)
    assert type(loaded.model).__name__ == "LlamaModel"
    assert loaded.unexpected_keys == ("lm_head.weight",)


def test_a_class_can_be_given_itself(source_dir):
    from transformers import LlamaForCausalLM

    assert type(load_model(source_dir, model_class=LlamaForCausalLM).model) is LlamaForCausalLM


def _into_shards(folder, second):
    """Two files of weights, of which the index names the second in a way of its own."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-00001.safetensors": names[:3], second: names[3:]}
    for file, part in parts.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _dangle(path):
    """As a cache leaves its links that was cleared."""
    path.unlink(missing_ok=True)
    path.symlink_to("../blobs/0123")


def _rename_tokenizer(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["type"] = "Later"
    path.write_text(json.dumps(content), encoding="utf-8")


_DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json was found"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json: not valid JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "holds a list where an object is needed"),
    "config is binary": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json: not valid JSON"),
    "unknown architecture": (lambda d: _edit_config(d, model_type="nonsense"), "cannot load it .*nonsense"),
    "no architecture": (lambda d: (d / "config.json").write_text("{}"), "cannot load it .*model_type"),
    "field of a wrong type": (lambda d: _edit_config(d, hidden_size="wide"), "cannot load it .*hidden_size.*str"),
    "impossible field": (lambda d: _edit_config(d, num_attention_heads=0), "cannot load it .*ZeroDivisionError"),
    "unknown activation": (lambda d: _edit_config(d, hidden_act="smooth"), "cannot load it .*KeyError: 'smooth'"),
    "unknown dtype": (lambda d: _edit_config(d, dtype="float7"), "cannot load it .*float7"),
    "other width": (lambda d: _edit_config(d, intermediate_size=64), "6 weights have another shape than config.json says"),
    "more layers than weights": (lambda d: _edit_config(d, num_hidden_layers=3), "9 weights of the model are not in its files .*layers.2"),
    "fewer layers than weights": (
        lambda d: _edit_config(d, num_hidden_layers=1),
        "9 weights in its files have no place in the model .*lost",
    ),
    "a weight is missing": (
        lambda d: _edit_weights(d, drop=["model.norm.weight"]),
        r"1 weights .* \(model.norm.weight\) and would be random",
    ),
    "a weight too many": (lambda d: _edit_weights(d, add={"extra": torch.zeros(2)}), r"1 weights in its files have no place .*\(extra\)"),
    "cut off": (_truncate, "not a whole safetensors file"),
    "empty weights": (lambda d: (d / WEIGHTS).write_bytes(b""), "not a whole safetensors file"),
    "garbage weights": (lambda d: (d / WEIGHTS).write_bytes(os.urandom(2000)), "not a whole safetensors file"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "no weights were found; save the weights as safetensors"),
    "only a pickle": (_only_pickle, "only pytorch_model.bin was found, which is a pickle"),
    "a shard is missing": (_missing_shard, "1 of 2 weight files are missing .model-00002-of-00002.safetensors."),
    "index without map": (
        lambda d: ((d / WEIGHTS).unlink(), (d / "model.safetensors.index.json").write_text("{}")),
        "has no weight_map",
    ),
    "index without metadata": (lambda d: _into_shards(d, "model-00002.safetensors"), 'has no metadata, .*; add "metadata": {}'),
    "an adapter beside the weights": (lambda d: (d / "adapter_config.json").write_text("{}"), "adapter_config.json says .*; merge it"),
    "two tensors for one place": (
        lambda d: _edit_weights(d, add={"norm.weight": torch.zeros(128)}),
        "model.norm.weight and norm.weight differ, and both are model.norm.weight in the model; keep the one that is meant",
    ),
    "index names a file elsewhere": (lambda d: _into_shards(d, "../source/model-00002.safetensors"), "is no name of a file in its folder"),
    "index names a file below": (lambda d: _into_shards(d, "part/model-00002.safetensors"), "is no name of a file in its folder"),
    "weights that link to nothing": (lambda d: _dangle(d / WEIGHTS), r"model.safetensors link to what is not there .*; fetch"),
    "an index that links to nothing": (
        lambda d: ((d / WEIGHTS).unlink(), _dangle(d / "model.safetensors.index.json")),
        "model.safetensors.index.json link to what is not there",
    ),
    "a config that links to nothing": (lambda d: _dangle(d / "config.json"), "config.json link to what is not there"),
    "a tokenizer that links to nothing": (lambda d: _dangle(d / "tokenizer.json"), "tokenizer.json link to what is not there"),
    "damaged tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "its tokenizer cannot be loaded"),
    "a tokenizer of a kind that nobody knows": (_rename_tokenizer, r"its tokenizer cannot be loaded \(.*\); restore its files, or install"),
    "already quantized": (lambda d: _edit_config(d, quantization_config={"quant_method": "gptq"}), r"is quantized already \(gptq\)"),
    "a part is quantized": (
        lambda d: _edit_config(d, text_config={"quantization_config": {"quant_method": "awq"}}),
        r"is quantized already \(awq\)",
    ),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(damage, source_dir, capfd):
    harm, expected = _DAMAGE[damage]
    harm(source_dir)
    with pytest.raises(ModelError, match=expected) as caught:
        load_model(source_dir)
    message = str(caught.value)
    assert "\n" not in message and "; " in message and message.startswith(str(source_dir))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("load", [load_empty, load_skeleton])
def test_what_a_conversion_or_a_plan_would_leave_out_is_refused(load, source_dir):
    (source_dir / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config.json says"):
        load(source_dir)
    (source_dir / "adapter_config.json").unlink()
    _edit_weights(source_dir, add={"norm.weight": torch.ones(128) * 3})
    if load is load_empty:  # a plan reads no weights
        with pytest.raises(ModelError, match=r"model.norm.weight and norm.weight differ"):
            load(source_dir)
    _edit_weights(source_dir, add={"norm.weight": load_file(source_dir / WEIGHTS)["model.norm.weight"].clone()})
    load(source_dir)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not valid JSON"),
        (b'{"eos_token_id": 1', "not valid JSON"),
        (b'{"eos_token_id"\xba 1}', "not valid JSON"),
        (b"null", "holds a NoneType where an object is needed"),
        (b"[]", "holds a list where an object is needed"),
        (b'{"cache_implementation": "nope"}', "transformers cannot read it .ValueError: Invalid `cache_implementation`"),
        (None, "cannot be read .Is a directory"),
    ],
)
def test_a_damaged_generation_config_is_named_by_all_who_read_a_folder(content, told, source_dir):
    path = source_dir / "generation_config.json"
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    for load in (load_model, load_empty, load_skeleton, load_compressed):
        with pytest.raises(ModelError, match=told) as caught:
            load(source_dir)
        assert str(caught.value).startswith(f"{path}: ") and str(caught.value).endswith("; restore the file")


def test_weights_that_the_limits_leave_no_room_to_map_are_refused_first(source_dir, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(OutOfMemoryError, match=r"are mapped, which takes [\d.]+ MB .*\(ulimit -v, ulimit -d\) leave 0.0 MB"):
        load_model(source_dir)


@pytest.mark.parametrize("source", ["Llama-2-7b", "{tmp}/nowhere", "{tmp}/source/config.json"])
def test_what_is_no_folder_and_no_name_is_refused(source, source_dir, tmp_path):
    with pytest.raises(ModelError, match=r"is not a folder; give one with .*, or a name on the hub \(owner/name\)"):
        load_model(source.format(tmp=tmp_path))


def test_our_own_checkpoint_is_quantized_already(source_dir, quantize_linears, tmp_path):
    model = load_model(source_dir).model
    schemes = quantize_linears(model, preset_scheme("W4A16"))
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    with pytest.raises(ModelError, match=r"out: the model is quantized already \(compressed-tensors\)"):
        load_model(folder)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: the model is quantized already \(model.layers.0.self_attn.q_proj is\)"):
        load_model(model)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dtype": "int8"}, "dtype: 'int8' is not a dtype to compress from"),
        ({"device": "gpu"}, "device: 'gpu' cannot be used here"),
        ({"device": "cuda:99"}, "device: 'cuda:99' cannot be used here"),
        ({"model_class": "AutoModelForCasualLM"}, "nearest: AutoModelForCausalLM"),
        ({"model_class": "logging"}, "'logging' is no model class"),
        ({"model_class": "LlamaConfig"}, r"'LlamaConfig' is no model class of transformers \(nearest: LlamaModel, "),
        ({"model_class": "LlamaTokenizer"}, "'LlamaTokenizer' is no model class"),
        ({"model_class": "AutoModelForMaskedLM"}, "AutoModelForMaskedLM cannot load it"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(arguments, expected, source_dir):
    with pytest.raises(ModelError, match=expected) as caught:
        load_model(source_dir, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("is_built", "reason"),
    [
        (False, r"built without CUDA\); use auto or cpu, or install a torch with CUDA$"),
        (True, r"CUDA finds no GPU\); use auto or cpu, or make a GPU visible"),
    ],
)
def test_cuda_without_cuda_says_so_and_is_not_advised(is_built, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)

    def refused(*args, **given):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", refused)
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(ModelError, match=reason):
            resolve_device(device)
    with pytest.raises(ModelError, match=r"use auto or cpu$"):
        resolve_device("gpu")


def test_the_automatic_device_exists():
    assert resolve_device("auto").type in ("cpu", "cuda")
    assert {resolve_device(name) for name in ("cpu", "cpu:0", "cpu:7")} == {torch.device("cpu")}


def test_a_model_in_memory_is_taken_as_it_is(make_model):
    for model in (nn.Sequential(nn.Linear(2, 2)), make_model().train()):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        loaded = load_model(model, device="cpu")
        assert loaded.model is model and loaded.from_memory and loaded.tokenizer is None and loaded.source_dir is None
        assert model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"Sequential: 0\.weight is on the meta device"):
        load_model(model)


def test_adapters_and_foreign_quantizers_are_refused(make_model):
    model = make_model()
    model.peft_config = {"default": object()}
    with pytest.raises(ModelError, match="merge them into the model first"):
        load_model(model)
    del model.peft_config
    model.hf_quantizer = object()
    with pytest.raises(ModelError, match="is quantized already; "):
        load_model(model)


@pytest.fixture
def custom_code_dir(source_dir, tmp_path, monkeypatch):
    """A folder whose config asks for a Python file in it."""
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "custom"
    shutil.copytree(source_dir, folder)
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from .own_part import SCALE\n"
        "class OwnConfig(LlamaConfig):\n"
        "    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n"
        "    config_class = OwnConfig\n"
        "    def forward(self, *args, **kwargs):\n"
        "        output = super().forward(*args, **kwargs)\n"
        "        output.logits = output.logits * SCALE\n"
        "        return output\n"
    )
    (folder / "own_part.py").write_text("SCALE = 2\n")
    _edit_config(
        folder, model_type="own", auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    )
    yield folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_code_in_the_folder_runs_only_when_asked_for(custom_code_dir):
    with pytest.raises(ModelError, match=r"set trust_remote_code \(--trust-remote-code\) if you trust"):
        load_model(custom_code_dir)
    assert type(load_model(custom_code_dir, trust_remote_code=True).model).__name__ == "OwnModel"


def test_code_that_was_run_goes_with_the_checkpoint(custom_code_dir, quantize_linears, token_ids, tmp_path):
    from transformers import AutoModelForCausalLM

    loaded = load_model(custom_code_dir, trust_remote_code=True)
    schemes = quantize_linears(loaded.model, preset_scheme("W4A16"))
    folder = save_checkpoint(loaded.model, tmp_path / "out", source_dir=custom_code_dir, schemes=schemes, record={})
    assert (folder / "modeling_own.py").read_bytes() == (custom_code_dir / "modeling_own.py").read_bytes()
    reloaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.inference_mode():
        assert torch.equal(loaded.model(token_ids).logits, reloaded(token_ids).logits)
