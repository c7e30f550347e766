"""`compressor inspect` says what lies in a folder: formats, bytes, zeros, record; of quantized, pruned, plain and foreign checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from compressor import load_compressed, oneshot
from compressor.cli.main import main
from compressor.console import Console, with_output
from compressor.entrypoints.inspection import inspect_checkpoint
from compressor.errors import ModelError
from tests import tiny


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny.llama(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_experts_that_have_other_names_in_the_files_are_counted_once(tmp_path: Path) -> None:
    tiny.mixtral().save_pretrained(tmp_path / "base")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    group = {"targets": [r"re:.*experts\.\d+\..*"], "weights": weights}
    recipe = {"q_modifiers": {"QuantizationModifier": {"config_groups": {"experts": group}}}}
    oneshot(tmp_path / "base", recipe=recipe, output_dir=tmp_path / "out")
    found = inspect_checkpoint(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert any(".block_sparse_moe.experts." in name for name in stored) and any(".mlp.experts." in one.name for one in found.quantized)
    assert sum(one.num_bytes for one in (*found.quantized, *found.tensors)) == sum(one.nbytes for one in stored.values())


def test_formats_bytes_and_record_of_a_quantized_checkpoint(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    groups = {
        "a": {"targets": ["re:.*self_attn"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}},
        "b": {
            "targets": ["re:.*mlp"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        },
    }
    oneshot(base, recipe={"q_modifiers": {"QuantizationModifier": {"config_groups": groups}}}, output_dir=out)
    found = inspect_checkpoint(out)
    formats = {module.name.rpartition(".")[2]: module.format for module in found.quantized}
    assert formats["q_proj"] == "int4 group 64" and formats["up_proj"] == "int8 channel, inputs int8 token dynamic"
    assert len(found.quantized) == 7 and found.record is not None and found.storage is not None
    one = next(module for module in found.quantized if module.name.endswith("up_proj"))
    assert one.num_weights == 128 * 256 and one.num_bytes == 128 * 256 + 4 * 256
    header = 8 + int.from_bytes((out / "model.safetensors").read_bytes()[:8], "little")
    assert sum(module.num_bytes for module in (*found.quantized, *found.tensors)) == found.num_bytes - header
    assert main(["inspect", str(out), "--modules"]) == 0
    shown = capsys.readouterr().out
    assert "int4 group 64" in shown and "model.layers.0.mlp.up_proj" in shown and "fallbacks: 0" in shown
    assert main(["inspect", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["quantized"]) == 7 and "tensors" not in data["record"] and data["architecture"] == "LlamaForCausalLM"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["inspect", str(out)]) == 0
    narrow = capsys.readouterr().out.partition("recipe:")[0]
    assert all(len(line) <= 80 for line in narrow.splitlines()), narrow


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_BLOCK", "NVFP4A16"])
def test_a_config_that_has_lost_its_schemes_is_refused(scheme: str, base: Path, tmp_path: Path) -> None:
    recipe = {"q_modifiers": {"QuantizationModifier": {"targets": ["re:.*up_proj"], "scheme": scheme}}}
    oneshot(base, recipe=recipe, dataset=[list(range(64))] * 4, output_dir=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    for read in (inspect_checkpoint, load_compressed):
        with pytest.raises(ModelError, match=r"\d tensors are parts of quantized weights .*up_proj.*; restore config\.json"):
            read(tmp_path / "out")


def test_zeros_are_counted_through_quantization_and_without_it(base: Path, tmp_path: Path) -> None:
    prune = {"SparseGPTModifier": {"targets": ["re:.*up_proj"], "sparsity": 0.5, "mask_structure": "2:4"}}
    quantize = {"QuantizationModifier": {"targets": ["re:.*up_proj"], "scheme": "W8A16"}}
    data = [list(range(64))] * 4
    oneshot(base, recipe={"p_modifiers": prune}, dataset=data, output_dir=tmp_path / "pruned")
    oneshot(base, recipe={"p_modifiers": prune, "q_modifiers": quantize}, dataset=data, output_dir=tmp_path / "both")
    pruned, both = inspect_checkpoint(tmp_path / "pruned"), inspect_checkpoint(tmp_path / "both")
    zeros = {module.name: module.zeros for module in pruned.tensors}
    assert zeros["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.5, abs=0.01) and pruned.quantized == () and pruned.storage is None
    assert zeros["model.layers.0.mlp.down_proj.weight"] == 0
    assert both.quantized[0].zeros >= 0.49
    assert all("pruned: 1 modules to 2:4, 50% zeros" in found.lines() for found in (pruned, both))


@pytest.mark.parametrize("named", [True, 5, "LlamaForCausalLM", {"a": 1}, [], None])
def test_a_config_without_a_list_of_architectures_is_of_its_type(named: Any, base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": named}))
    assert inspect_checkpoint(folder).architecture == "llama"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_is_no_causal_one_is_read_as_the_class_that_its_config_names(tmp_path: Path) -> None:
    model = tiny.t5()
    oneshot(model, recipe={"QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}, output_dir=tmp_path / "out")
    found = inspect_checkpoint(tmp_path / "out")
    assert found.architecture == "T5ForConditionalGeneration"
    assert "encoder.block.0.layer.0.SelfAttention.q" in {one.name for one in found.quantized}


def test_a_plain_folder_and_none_at_all(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_checkpoint(base)
    assert found.record is None and found.quantized == () and any("no compression.json" in line for line in found.lines())
    plain = LlamaForCausalLM.from_pretrained(base)
    assert sum(module.num_weights for module in found.tensors) == sum(parameter.numel() for parameter in plain.parameters())
    capsys.readouterr()
    with pytest.raises(ModelError, match="is not a folder"):
        inspect_checkpoint(tmp_path / "nowhere")
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.startswith("compressor inspect: error: ")


def test_a_record_with_a_part_of_another_kind_is_named_and_one_without_says_so(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = base / "compression.json"
    odd = ([], {"pruned": ["2:4"]}, {"peak_input": "x"}, {"loudest_input": [1]}, {"sparsity": {}}, {"loss": [1.0]})
    damaged = {
        "modules": ([], 7, {"a": 1}, {"a": {"error": "x"}}, *({"a": {"details": one}} for one in odd)),
        "fallbacks": (None, [1], {}, "x", [{"module": "a"}]),
        "versions": (None, [], "x", {"torch": 2}),
        "data": (7, [], "x", {"num_samples": "8", "num_tokens": 8}, {"num_samples": 8}),
        "source": ([], {"name": "a"}),
        "notes": (None, "x", [1]),
        "recipe": ([], 7),
    }
    for key, values in damaged.items():
        for value in values:
            record.write_text(json.dumps({key: value}))
            with pytest.raises(ModelError, match=rf"compression.json: {key}.*; restore the file$"):
                inspect_checkpoint(base)
    for text, said in (
        ('{"a": 1}', "compression.json: says nothing that a run here says; it is of something else, or damaged"),
        ('{"notes": []}', "made with what the record does not name\ncalibrated with what the record does not name; seed what"),
    ):
        record.write_text(text)
        assert main(["inspect", str(base)]) == 0
        assert said in capsys.readouterr().out


def test_what_a_terminal_would_obey_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "red\x1b[31m \x9b2J\u202egnp"
    save_file({f"{name}.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["inspect", str(tmp_path), "--modules"]) == 0
    printed = capsys.readouterr().out
    assert r"red\u001b[31m \u009b2J\u202egnp" in printed and not set("\x1b\x9b\u202e") & set(printed)
    assert main(["inspect", str(tmp_path), "--modules", "--json"]) == 0
    assert repr(name)[1:-1] in str(json.loads(capsys.readouterr().out))
    assert main(["inspect", str(tmp_path / name)]) == 1 and "\x1b" not in capsys.readouterr().err
    table = Table("module")
    table.add_row(name)
    Console(force_terminal=True).print(table, name, style="red")
    assert "\x1b[31m" in (shown := capsys.readouterr().out) and shown.count(r"red\u001b") == 2


def test_the_bar_of_another_library_goes_on_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        print("\r 50 %", end="\r")
        print("\r100 %\rof others")
        return 0

    assert with_output("compressor", run, 3) == 0
    assert capsys.readouterr().out == "\r 50 %\r\r100 %\\u000dof others\n"
