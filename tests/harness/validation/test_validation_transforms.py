"""A checkpoint whose scales were moved before it was compressed: compared with the base that has them moved, and with nothing on trust."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compressor import oneshot
from compressor.modifiers.quantization import QuantizationModifier
from compressor.modifiers.transforms.smoothing import SmoothQuantModifier
from harness.reporting.verdict import Outcome
from harness.validation.behaviour.scoring import TokenBatch
from harness.validation.behaviour.transformed import check_transforms
from harness.validation.compare import ValidationReport, validate
from harness.validation.format.container import read_checkpoint
from harness.validation.report.page import render_page
from harness.validation.subject import read_subject
from tests import tiny
from tests.harness.validation.conftest import Workspace

V_TO_O = [[["re:.*o_proj"], "re:.*v_proj"], [["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"]]


def smoothed(base: Path, out: Path, data: Path, mappings: list[Any] | None = None) -> Path:
    recipe = [
        SmoothQuantModifier(smoothing_strength=0.8, mappings=mappings),
        QuantizationModifier(scheme="W8A8", ignore=["lm_head"]),
    ]
    oneshot(base, recipe=recipe, dataset=load_file(data)["input_ids"][:8], output_dir=out)
    return out


@pytest.fixture(scope="session")
def moved(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smoothed(workspace.base, tmp_path_factory.mktemp("moved") / "out", workspace.dataset, V_TO_O)


def judged(workspace: Workspace, folder: Path) -> tuple[ValidationReport, dict[str, Any]]:
    report = validate(workspace.base, folder, load_file(workspace.dataset)["input_ids"][8:])
    return report, {record.name: record for record in report.records}


def test_every_tensor_is_that_of_the_moved_base_bit_for_bit(workspace: Workspace, moved: Path) -> None:
    subject, plain = read_subject(workspace.base, moved), read_checkpoint(workspace.base)
    norm = "model.layers.0.post_attention_layernorm.weight"
    assert torch.equal(subject.base.tensor(norm), subject.compressed.tensor(norm))
    assert not torch.equal(plain.tensor(norm), subject.compressed.tensor(norm))
    assert bytes(subject.base.raw(norm)) == bytes(subject.compressed.raw(norm))
    report, records = judged(workspace, moved)
    assert records["behaviour.transforms"].outcome is Outcome.PASS
    assert {record.name for record in report.records if record.outcome is Outcome.FAIL} == set()
    assert "4 transforms (SmoothQuantModifier)" in records["behaviour.transforms"].summary
    numbers = json.loads((moved / "compression.json").read_text())["transforms"][0]["factors"]
    assert numbers not in render_page(report) and "SmoothQuantModifier" in render_page(report)


def edited(moved: Path, out: Path, change: Callable[[list[dict[str, Any]]], Any]) -> Path:
    """The same checkpoint with another account of what was moved."""
    out.mkdir()
    for path in moved.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    record = json.loads((out / "compression.json").read_text())
    change(record["transforms"])
    (out / "compression.json").write_text(json.dumps(record))
    return out


def other_factors(entry: dict[str, Any], change: Callable[[np.ndarray], Any]) -> None:
    numbers = np.frombuffer(base64.b64decode(entry["factors"]), dtype="<f4").copy()
    change(numbers)
    entry["factors"] = base64.b64encode(numbers.tobytes()).decode()


ACCOUNTS: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str, str]] = {
    "one is left out": (lambda all_: all_.pop(), "files.tensors", "post_attention_layernorm"),
    "a reader is left out": (lambda all_: all_[-1]["readers"].pop(), "behaviour.transforms", "differ by"),
    "another source": (lambda all_: all_[-1].update(source="model.layers.0.input_layernorm"), "behaviour.transforms", "differ by"),
    "another factor": (lambda all_: other_factors(all_[-1], lambda numbers: numbers.__imul__(1.5)), "files.tensors", "layernorm"),
    "other heads": (lambda all_: all_[0].update(repeats=3), "behaviour.transforms", "does not fit"),
    "no number": (lambda all_: other_factors(all_[0], lambda numbers: numbers.fill(np.nan)), "behaviour.transforms", "no positive number"),
    "no such module": (lambda all_: all_[0].update(source="model.nothing"), "behaviour.transforms", "holds no model.nothing.weight"),
    "no reader": (lambda all_: all_[0].update(readers=[]), "behaviour.transforms", "nothing takes back"),
    "another kind": (lambda all_: all_[0].update(kind="rotation"), "behaviour.transforms", "'rotation' is not known"),
    "no base64": (lambda all_: all_[0].update(factors="?"), "behaviour.transforms", "cannot be read"),
    "not even a table": (lambda all_: all_.append("scales"), "behaviour.transforms", "cannot be read"),
}


@pytest.mark.parametrize("what", ACCOUNTS)
def test_a_wrong_account_is_found(what: str, workspace: Workspace, moved: Path, tmp_path: Path) -> None:
    change, name, said = ACCOUNTS[what]
    report, records = judged(workspace, edited(moved, tmp_path / "edited", change))
    assert records[name].outcome is Outcome.FAIL and said in records[name].summary + " ".join(records[name].findings)
    assert report.exit_code != 0


def test_what_changes_the_function_is_found_though_every_tensor_fits(workspace: Workspace, moved: Path, tmp_path: Path) -> None:
    """A modifier that forgets a reader writes an honest account of a wrong transform."""
    folder = edited(moved, tmp_path / "edited", lambda all_: all_[-1]["readers"].remove("model.layers.1.mlp.up_proj"))
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj"
    weight = load_file(workspace.base / "model.safetensors")[f"{name}.weight"].float()
    scale = (weight.abs().amax(1, keepdim=True) / 127.5).to(torch.bfloat16)
    tensors[f"{name}.weight_scale"] = scale
    tensors[f"{name}.weight"] = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, records = judged(workspace, folder)
    assert records["weights.sqnr"].outcome is Outcome.PASS
    assert records["behaviour.transforms"].outcome is Outcome.FAIL


def gpt2(folder: Path) -> None:
    model = tiny.gpt2(vocab_size=96, tie_word_embeddings=False)
    model.eval().save_pretrained(folder)


def moe(folder: Path) -> None:
    tiny.qwen3_moe(vocab_size=96, intermediate_size=32).save_pretrained(folder)


@pytest.mark.parametrize("make", [gpt2, moe], ids=["Conv1D", "experts"])
def test_weights_that_lie_otherwise_are_moved_alike(make: Callable[[Path], None], workspace: Workspace, tmp_path: Path) -> None:
    make(tmp_path / "base")
    ids = load_file(workspace.dataset)["input_ids"][:8]
    oneshot(tmp_path / "base", recipe=[SmoothQuantModifier(smoothing_strength=0.8)], dataset=ids, output_dir=tmp_path / "out")
    subject, plain = read_subject(tmp_path / "base", tmp_path / "out"), read_checkpoint(tmp_path / "base")
    changed = [name for name in plain.entries if not torch.equal(plain.tensor(name), subject.compressed.tensor(name))]
    assert len(changed) > 8
    for name in plain.entries:
        assert torch.equal(subject.base.tensor(name), subject.compressed.tensor(name)), name
    record = check_transforms(subject, AutoModelForCausalLM.from_pretrained(tmp_path / "base"), TokenBatch(ids))
    assert record.outcome is Outcome.PASS and record.evidence["relative difference"] < 1e-5
