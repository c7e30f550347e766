"""With code of its own a model brings what that may read; without, only what loaders ask for."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from compressor import load_compressed, model_free, oneshot
from compressor.json_text import from_json
from compressor.model.side_files import side_files, side_notes
from harness.cli import main
from harness.reporting.verdict import Outcome
from harness.validation.format.files import check_others

CODE = """
import json, pathlib
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        folder = pathlib.Path(config.name_or_path)
        self.factor = json.loads((folder / "table.json").read_text()) * json.loads((folder / "assets/deep/table.bits").read_text())

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.factor
        return output
"""
TABLES = {"table.json", "assets/deep/table.bits"}
RECIPE = "quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: W8A16, ignore: [lm_head]}}}"


@pytest.fixture
def own_dir(llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model whose code reads two tables beside it, and a pickle that stays behind."""
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "own"
    shutil.copytree(llama_dir, folder)
    (folder / "modeling_own.py").write_text(CODE, encoding="utf-8")
    (folder / "assets" / "deep").mkdir(parents=True)
    (folder / "table.json").write_text("2", encoding="utf-8")
    (folder / "assets" / "deep" / "table.bits").write_text("3", encoding="utf-8")
    (folder / "assets" / "notes.pt").write_bytes(b"a pickle")
    config = from_json((folder / "config.json").read_text(encoding="utf-8"))
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "architectures": ["OwnModel"], "auto_map": auto}), encoding="utf-8"
    )
    yield folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_the_code_of_a_model_reads_goes_with_every_checkpoint(own_dir: Path, tmp_path: Path) -> None:
    result = oneshot(own_dir, recipe=RECIPE, output_dir=tmp_path / "oneshot", trust_remote_code_model=True)
    converted = model_free(own_dir, scheme="W8A16", ignore="lm_head", output_dir=tmp_path / "convert", trust_remote_code_model=True)
    result.save(tmp_path / "save")
    result.model.save_pretrained(tmp_path / "save_pretrained")
    given = oneshot(own_dir, recipe=RECIPE, output_dir=tmp_path / "words", tokenizer=str(own_dir), trust_remote_code_model=True)
    memory = AutoModelForCausalLM.from_pretrained(own_dir, trust_remote_code=True)
    held = oneshot(memory, recipe=RECIPE, output_dir=tmp_path / "memory")
    ids = torch.arange(6).view(1, -1)
    due = result.model(ids).logits
    for way in ("oneshot", "convert", "save", "save_pretrained", "words", "memory"):
        assert _files(tmp_path / way) >= TABLES | {"modeling_own.py"}
        assert "assets/notes.pt" not in _files(tmp_path / way)
        assert torch.equal(load_compressed(tmp_path / way, trust_remote_code=True)(ids).logits, due)
        assert check_others(own_dir, tmp_path / way).outcome is Outcome.PASS
    for name in ("modeling_own.py", "assets/deep/table.bits"):
        (tmp_path / "save" / name).write_text("4", encoding="utf-8")
        assert f"{name}: " in str(check_others(own_dir, tmp_path / "save").findings)
    for run in (result, converted, given, held):
        assert [note for note in run.report.notes if note.startswith("1 file beside the model's code") and "(assets/notes.pt)" in note]


def test_a_model_with_code_of_its_own_is_validated_where_that_may_run(
    own_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oneshot(own_dir, recipe=RECIPE, output_dir=tmp_path / "out", trust_remote_code_model=True)
    save_file({"input_ids": torch.randint(2, 100, (32, 24), generator=torch.Generator().manual_seed(0))}, tmp_path / "heldout.safetensors")
    command = ["validate", str(own_dir), str(tmp_path / "out"), "--dataset", str(tmp_path / "heldout.safetensors"), "--output-dir"]
    assert main([*command, str(tmp_path / "refused")]) == 3
    assert "--trust-remote-code" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "held"), "--trust-remote-code"]) == 2  # an untrained model predicts too little to tell
    (tmp_path / "out" / "table.json").write_text("7", encoding="utf-8")
    assert main([*command, str(tmp_path / "failed"), "--trust-remote-code"]) == 1


def test_files_that_are_there_already_stay_beside_a_model(own_dir: Path, tmp_path: Path) -> None:
    result = oneshot(own_dir, recipe=RECIPE, trust_remote_code_model=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table.json").write_text("5", encoding="utf-8")
    result.model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "table.json").read_text(encoding="utf-8") == "5"


def test_another_table_is_another_run(own_dir: Path, tmp_path: Path) -> None:
    prints = []
    for table in ("3", "3", "4"):
        (own_dir / "assets/deep/table.bits").write_text(table, encoding="utf-8")
        prints.append(oneshot(own_dir, recipe=RECIPE, trust_remote_code_model=True).record["fingerprint"])
    assert prints[0] == prints[1] != prints[2]


def test_without_code_of_its_own_a_model_brings_what_loaders_ask_for(llama_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_dir, tmp_path / "base")
    (tmp_path / "base" / "table.json").write_text("2", encoding="utf-8")
    result = oneshot(tmp_path / "base", recipe=RECIPE, output_dir=tmp_path / "out", trust_remote_code_model=True)
    assert "table.json" not in _files(tmp_path / "out")
    assert not [note for note in result.report.notes if "beside the model's code" in note]


def test_which_files_go_and_which_stay(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "snapshots" / "0a1b"
    texts = ["config.json", "README.md", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", ".gitattributes"]
    go = ["a.json", "b.npy", "code.py", "c/d/e.txt", "c/f.py"]
    stay = [".env", "c/g.pkl", "extra.safetensors", "onnx/model.ONNX", "x.part"]
    for name in (*texts, *go, *stay, ".git/objects/1", ".cache/2", "c/__pycache__/f.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    with (folder / "large.bits").open("wb") as file:
        file.truncate(100_000_001)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("", encoding="utf-8")
    (tmp_path / "hub" / "blobs").mkdir()
    (tmp_path / "hub" / "blobs" / "5e").write_text("", encoding="utf-8")
    links = {"in": folder / "a.json", "blob": tmp_path / "hub/blobs/5e", "out": tmp_path / "secret/key", "dir": tmp_path / "secret"}
    for name, target in {**links, "gone": tmp_path / "nowhere"}.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "c" / "pipe")
    assert side_files(folder) == (sorted([*go, "in", "blob"]), sorted([*stay, "large.bits", "out", "dir", "gone", "c/pipe"]))
    assert side_notes(folder)[0].startswith("10 files beside the model's code will not go with a checkpoint")
