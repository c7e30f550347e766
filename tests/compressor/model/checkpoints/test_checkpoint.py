"""A checkpoint is whole or absent, the same for the same input, and saving changes nothing in memory."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from compressor.errors import CheckpointError, OutputError
from compressor.model.checkpoints import save as save_module
from compressor.model.checkpoints.save import check_output_dir, save_checkpoint
from compressor.nn import QuantizedLinear
from compressor.numerics import QuantizationArgs, QuantizationScheme, preset_scheme


@pytest.fixture
def compressed(make_model, quantize_linears):
    model = make_model("qwen2", num_hidden_layers=1)
    return model, quantize_linears(model, preset_scheme("W4A16"))


def _files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_folder_holds_what_a_loader_needs_and_no_more(compressed, source_dir, tmp_path):
    model, schemes = compressed
    folder = save_checkpoint(
        model, tmp_path / "new" / "out", source_dir=source_dir, schemes=schemes, record={"b": 1, "a": {"d": 2, "c": "é"}}
    )
    assert folder == tmp_path / "new" / "out"
    tokenizer_files = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(_files(folder)) == {"config.json", "generation_config.json", "model.safetensors", "compression.json"} | tokenizer_files
    assert all((folder / name).read_bytes() == (source_dir / name).read_bytes() for name in tokenizer_files)
    record = json.loads((folder / "compression.json").read_text())
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert list(record) == ["a", "b", "quantization_config", "sha256", "tensors"]
    digests = {"sha256": record["sha256"], "tensors": record["tensors"]}
    assert record == {"a": {"c": "é", "d": 2}, "b": 1, "quantization_config": written, **digests}
    assert record["tensors"].keys() == load_file(folder / "model.safetensors").keys()
    assert folder.stat().st_mode == source_dir.stat().st_mode
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, (
        "weights that only their owner reads cannot be served by another user"
    )


def test_files_of_every_tokenizer_of_templates_and_of_sentence_transformers_are_copied(compressed, source_dir, tmp_path):
    model, schemes = compressed
    declared = re.compile(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", re.DOTALL)
    texts = (path.read_text() for path in Path(transformers.models.__file__).parent.glob("*/tokenization_*.py"))
    names = {name for text in texts for block in declared.findall(text) for name in re.findall(r':\s*"([^"]+)"', block)}
    assert {"source.spm", "vocab.json", "bpe.codes"} < names
    names |= {"additional_chat_templates/tool_use.jinja", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json", "LICENSE"}
    names |= {"audio_tokenizer_config.json", "speaker_embeddings_path.json"}
    for name in sorted(names):
        (source_dir / name).parent.mkdir(exist_ok=True)
        (source_dir / name).write_text(name)
    folder = save_checkpoint(model, tmp_path / "out", source_dir=source_dir, schemes=schemes, record={})
    assert {name for name in names if not (folder / name).is_file() or (folder / name).read_text() != name} == set()


def test_equal_input_gives_equal_bytes(make_model, quantize_linears, source_dir, make_tokenizer, tmp_path):
    for index in range(2):
        model = make_model("qwen2")
        schemes = quantize_linears(model, preset_scheme("W4A16", ["re:.*mlp"]), ignore=("Qwen2MLP", "SiLUActivation"))
        schemes |= quantize_linears(model, preset_scheme("FP8_DYNAMIC"))
        out = tmp_path / f"somewhere{index}" / "out"
        save_checkpoint(model, out, tokenizer=make_tokenizer(), schemes=schemes, record={"x": 0.1}, max_shard_bytes=200_000)
    first, second = (_files(tmp_path / f"somewhere{index}" / "out") for index in range(2))
    assert first.keys() == second.keys() and len(first) > 6
    assert [name for name in first if first[name] != second[name]] == []
    assert str(tmp_path).encode() not in b"".join(first.values())


def test_saving_changes_nothing_in_memory(compressed, make_tokenizer, tmp_path):
    model, schemes = compressed
    model.config.dtype = "float16"  # transformers writes its own idea of these three while it saves
    model.config.architectures = ["Else"]
    config, generation_config = model.config, model.generation_config
    before = config.to_dict(), generation_config.to_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    save_checkpoint(model, tmp_path / "out", tokenizer=make_tokenizer(), schemes=schemes, record={})
    assert model.config is config and model.generation_config is generation_config
    assert config.to_dict() == before[0] and generation_config.to_dict() == before[1]
    assert not hasattr(config, "quantization_config")
    assert model.state_dict().keys() == before[2].keys()
    assert all(torch.equal(value, before[2][name]) for name, value in model.state_dict().items())


def test_saving_is_quiet(compressed, make_tokenizer, tmp_path, capfd):
    model, schemes = compressed
    save_checkpoint(model, tmp_path / "out", tokenizer=make_tokenizer(), schemes=schemes, record={}, max_shard_bytes=50_000)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_from_memory_is_saved(compressed, make_tokenizer, tmp_path):
    from transformers import AutoTokenizer

    model, schemes = compressed
    folder = save_checkpoint(model, tmp_path / "out", tokenizer=make_tokenizer(), schemes=schemes, record={})
    assert AutoTokenizer.from_pretrained(folder)("a b a")["input_ids"] == [1, 2, 1]


def test_generation_settings_are_kept_however_odd(compressed, tmp_path):
    model, schemes = compressed
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.3
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.3


# Whatever ends the work


def _fail_at_fsync(error, monkeypatch):
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise error

    monkeypatch.setattr(os, "fsync", fsync)


def _fail_while_writing_weights(error, monkeypatch):
    def save(state, path, metadata):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(save_module, "write_tensors", save)


def _fail_at_rename(error, monkeypatch):
    def rename(self, target):
        raise error

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("fail", [_fail_at_fsync, _fail_while_writing_weights, _fail_at_rename])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "No space left on device.; nothing of it was kept"),
        (OSError(errno.EIO, "Input/output error"), CheckpointError, "Input/output error"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (MemoryError("bug"), MemoryError, "bug"),
    ],
    ids=["disk full", "disk broken", "ctrl-C", "bug"],
)
@pytest.mark.parametrize("existing", [False, True], ids=["new", "empty"])
def test_whatever_ends_the_work_leaves_nothing(existing, error, raised, message, fail, compressed, tmp_path, monkeypatch):
    model, schemes = compressed
    config, generation_config = model.config, model.generation_config
    out = tmp_path / "results" / "out"
    if existing:
        out.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    fail(error, monkeypatch)
    with pytest.raises(raised, match=message):
        save_checkpoint(model, out, schemes=schemes, record={})
    assert sorted(tmp_path.rglob("*")) == before
    assert model.config is config and model.generation_config is generation_config


def test_a_real_limit_of_the_system_leaves_nothing(compressed, tmp_path):
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    model, schemes = compressed
    old_handler, old_limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old_limit[1]))
        with pytest.raises(CheckpointError, match="File too large"):
            save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_known_before_writing(compressed, tmp_path, monkeypatch):
    model, schemes = compressed
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="bytes are to be written but 1,000 are free"):
        save_checkpoint(model, tmp_path / "a" / "out", schemes=schemes, record={})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_filled_meanwhile_is_kept(compressed, tmp_path, monkeypatch):
    model, schemes = compressed
    out = tmp_path / "out"
    real_fsync = os.fsync

    def fsync(descriptor):
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("precious")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="nothing of it was kept"):
        save_checkpoint(model, out, schemes=schemes, record={})
    assert _files(tmp_path) == {"out/theirs": b"precious"}


def test_what_does_not_read_back_is_not_kept(compressed, tmp_path, monkeypatch):
    real_write = save_module.write_tensors

    def lose_one(state, path, metadata):
        state.pop("model.layers.0.mlp.up_proj.weight_scale")
        real_write(state, path, metadata)

    monkeypatch.setattr(save_module, "write_tensors", lose_one)
    model, schemes = compressed
    with pytest.raises(CheckpointError, match=r"1 tensors do not read back .*up_proj.weight_scale"):
        save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    assert list(tmp_path.iterdir()) == []


# Where it may go


def test_an_empty_folder_is_filled(compressed, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    model, schemes = compressed
    assert save_checkpoint(model, tmp_path / "link", schemes=schemes, record={}) == tmp_path / "out"
    assert (tmp_path / "out" / "config.json").exists() and (tmp_path / "link").is_symlink()


def _fill(path):
    path.mkdir()
    (path / "notes.txt").write_text("precious")


@pytest.mark.parametrize(
    ("prepare", "output", "message"),
    [
        (lambda tmp: _fill(tmp / "out"), "out", "exists and is not empty, and nothing is overwritten"),
        (lambda tmp: (tmp / "out").write_text("precious"), "out", "is a file where a folder is to be written"),
        (lambda tmp: (tmp / "out").write_text("precious"), "out/sub", "cannot be created .Not a directory."),
        (lambda tmp: None, "source", "lies in the folder of the model"),
        (lambda tmp: None, "source/out", "lies in the folder of the model"),
        (lambda tmp: None, "other/../source/deep/out", "lies in the folder of the model"),
        (lambda tmp: None, "n" * 300, "cannot be created .File name too long"),
    ],
    ids=["not empty", "a file", "below a file", "source itself", "in source", "in source, by a detour", "name too long"],
)
def test_an_output_folder_that_cannot_be_used_is_refused_untouched(prepare, output, message, compressed, source_dir, tmp_path):
    prepare(tmp_path)
    before = _files(tmp_path)
    model, schemes = compressed
    for attempt in (
        lambda: check_output_dir(tmp_path / output, source=source_dir),
        lambda: save_checkpoint(model, tmp_path / output, source_dir=source_dir, schemes=schemes, record={}),
    ):
        with pytest.raises(OutputError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert _files(tmp_path) == before


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_parent_that_cannot_be_written_is_known_before_the_work(code, tmp_path, monkeypatch):
    def mkdir(path, mode=0o777):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OutputError, match=f"cannot be created .{os.strerror(code)}.; name a folder that can be written"):
        check_output_dir(tmp_path / "a" / "out")


def test_the_current_folder_and_mount_points_cannot_be_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is the current folder and cannot be replaced in one step"):
        check_output_dir(".")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    with pytest.raises(OutputError, match="is a mount point"):
        check_output_dir("out")


def test_checking_leaves_no_trace(tmp_path):
    assert check_output_dir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


# What is looked at before writing


def _set(name, value):
    def damage(layer):
        dict(layer.named_buffers())[name].flatten()[0] = value

    return damage


def _drop(name):
    return lambda layer: layer.__delattr__(name)


def _nan_byte(layer):
    layer.codes().view(torch.uint8)[0, 0] = 0x7F


def _nan_bias(layer):
    layer.bias.data[0] = float("nan")


_W4A8 = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, strategy="channel", symmetric=False),
    input_activations=QuantizationArgs(strategy="tensor", symmetric=False),
)
_DAMAGE = {
    "scale NaN": ("W4A16", _set("weight_scale", float("nan")), "q_proj.weight: 1 of 128 scales are not finite and positive"),
    "scale infinite": ("FP8_DYNAMIC", _set("weight_scale", float("inf")), "not finite and positive"),
    "scale zero": ("W8A8", _set("weight_scale", 0.0), "not finite and positive"),
    "scale negative": ("FP8", _set("weight_scale", -0.1), "not finite and positive"),
    "scale of another shape": ("W4A16", lambda m: setattr(m, "weight_scale", m.weight_scale[:5]), "weight_scale: shape .5, 1. is not"),
    "other columns": ("W4A16", lambda m: setattr(m, "weight_packed", m.weight_packed[:, :5]), "weight_packed: shape .128, 5. is not"),
    "other stored shape": ("W4A16", _set("weight_shape", 7), r"weight_shape: \[7, 128\] is not \[128, 128\]"),
    "zero point missing": (_W4A8, _drop("weight_zero_point"), "weight_zero_point: was never computed"),
    "zero point out of range": (_W4A8, _set("weight_zero_point", 9), "a zero point lies outside of the codes -8 to 7"),
    "code out of range": (_W4A8, _set("weight", -9), "weight: a code is NaN or not in -8 to 7"),
    "code NaN": ("FP8", _nan_byte, "weight: a code is NaN or not in -448 to 448"),
    "input never calibrated": ("FP8", _drop("input_scale"), "input_scale: was never computed"),
    "input scale NaN": ("FP8", _set("input_scale", float("nan")), "q_proj.input: 1 of 1 scales"),
    "input zero point missing": (_W4A8, _drop("input_zero_point"), "q_proj.input_zero_point: was never computed"),
    "bias NaN": ("W4A16", _nan_bias, "bias: is not finite"),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_qparams_that_cannot_be_right_are_never_written(damage, make_model, quantize_linears, tmp_path):
    scheme, harm, message = _DAMAGE[damage]
    model = make_model("qwen2", num_hidden_layers=1)
    schemes = quantize_linears(model, preset_scheme(scheme) if isinstance(scheme, str) else scheme)
    with torch.no_grad():
        harm(model.get_submodule("model.layers.0.self_attn.q_proj"))
    with pytest.raises(CheckpointError, match=f"1 of 7 quantized modules cannot be written: .*{message}"):
        save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    assert list(tmp_path.iterdir()) == []


def test_a_column_in_no_group_is_never_written(tmp_path):
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, group_size=4, actorder="group"))
    g_idx = torch.arange(8, dtype=torch.int32) // 4
    qparams = torch.full((4, 2), 0.5), None
    for wrong in (2, -1):
        g_idx[0] = wrong
        layer = QuantizedLinear.from_linear(nn.Linear(8, 4), scheme, torch.zeros(4, 8, dtype=torch.int8), _qparams(*qparams), g_idx_C=g_idx)
        with pytest.raises(CheckpointError, match=r"0\.weight_g_idx: a column belongs to a group that does not exist"):
            save_checkpoint(nn.Sequential(layer), tmp_path / "out", schemes={"0": scheme}, record={})


def _qparams(scale, zero_point):
    from compressor.numerics import QParams

    return QParams(scale, zero_point)


def test_schemes_must_be_those_of_the_layers(compressed, tmp_path):
    model, schemes = compressed
    name, other = next(iter(schemes)), preset_scheme("W8A16")
    for wrong in ({}, {**schemes, "lm_head": other}, {**schemes, name: other}, {k: v for k, v in schemes.items() if k != name}):
        with pytest.raises(CheckpointError, match="modules are not what their scheme says"):
            save_checkpoint(model, tmp_path / "out", schemes=wrong, record={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("record", [{"error": float("nan")}, {"path": Path("x")}, {1: "a", "b": 2}])
def test_a_record_that_is_no_json_is_refused(record, tmp_path):
    with pytest.raises(CheckpointError, match=r"compression\.json: the record is no JSON"):
        save_checkpoint(nn.Linear(2, 2), tmp_path / "out", schemes={}, record=record)
    assert list(tmp_path.iterdir()) == []


class _WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}


def test_a_compressed_model_that_went_to_meta_is_refused_before_its_scales_are_looked_at(make_model, quantize_linears, tmp_path):
    model = make_model()
    schemes = quantize_linears(model, preset_scheme("W4A16"))
    model.model.layers[1].to("meta")
    with pytest.raises(CheckpointError, match=r"entries of the state are no tensors with values .*layers\.1"):
        save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})


def test_state_that_is_no_tensor_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"1 entries of the state are no tensors with values .*_extra_state"):
        save_checkpoint(_WithExtraState(2, 2), tmp_path / "out", schemes={}, record={})


def test_a_file_is_written_tensor_by_tensor_as_safetensors_writes_it(tmp_path):
    tensors = {"b": torch.arange(6, dtype=torch.int32).view(2, 3).t(), "a": torch.ones(3, dtype=torch.bfloat16), "é": torch.zeros(0)}
    metadata = {"format": "pt"}
    save_module.write_tensors(tensors, tmp_path / "ours", metadata)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
