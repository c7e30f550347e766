"""A checkpoint whose hidden states were turned before it was compressed: compared with the base turned anew, and with nothing on trust."""

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
from torch import nn

from compressor import QuantizationModifier, SpinQuantModifier, oneshot
from harness.bisect import bisect
from harness.reporting.verdict import Outcome
from harness.validation.behaviour.scoring import TokenBatch
from harness.validation.behaviour.transformed import check_transforms
from harness.validation.compare import validate
from harness.validation.report.page import render_page
from harness.validation.subject import read_subject
from tests import tiny
from tests.harness.validation.conftest import Workspace

WEIGHTS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}


@pytest.fixture(scope="session")
def turned(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("turned") / "out"
    recipe = [SpinQuantModifier(randomize=True), QuantizationModifier(config_groups=WEIGHTS, ignore=["lm_head"])]
    oneshot(workspace.base, recipe=recipe, output_dir=out, device="cpu")
    return out


def judged(workspace: Workspace, folder: Path) -> dict[str, Any]:
    report = validate(workspace.base, folder, load_file(workspace.dataset)["input_ids"][8:])
    return {"report": report, **{record.name: record for record in report.records}}


def test_every_tensor_is_that_of_the_turned_base(workspace: Workspace, turned: Path) -> None:
    records = judged(workspace, turned)
    assert [name for name, record in records.items() if name != "report" and record.outcome is Outcome.FAIL] == []
    assert "1 transforms (SpinQuantModifier)" in records["behaviour.transforms"].summary
    encoded = json.loads((turned / "compression.json").read_text())["transforms"][0]["turns"][0]["matrix"]["signs"]
    assert encoded not in render_page(records["report"]) and "SpinQuantModifier" in render_page(records["report"])


def edited(turned: Path, out: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The same checkpoint with another account of what was turned."""
    out.mkdir()
    for path in turned.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    record = json.loads((out / "compression.json").read_text())
    change(record["transforms"][0])
    (out / "compression.json").write_text(json.dumps(record))
    return out


def other_matrix(entry: dict[str, Any], change: Callable[[np.ndarray], Any]) -> None:
    matrix = entry["turns"][0]["matrix"]
    bits = np.unpackbits(np.frombuffer(base64.b64decode(matrix["signs"]), dtype=np.uint8)).reshape(matrix["size"], -1)
    change(bits)
    matrix["signs"] = base64.b64encode(np.packbits(bits.reshape(-1)).tobytes()).decode()


def swap_rows(bits: np.ndarray) -> None:
    bits[[3, 4]] = bits[[4, 3]]


ACCOUNTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "a writer is left out": (lambda one: one["turns"][0]["writers"].pop(0), "behaviour.transforms", "differ by"),
    "a reader is left out": (lambda one: one["turns"][0]["readers"].pop(0), "behaviour.transforms", "differ by"),
    "values are left out": (lambda one: one["turns"].pop(), "weights.sqnr", "v_proj"),
    "another orthogonal matrix": (lambda one: other_matrix(one, swap_rows), "files.tensors", "embed_tokens"),
    "a matrix that is not orthogonal": (
        lambda one: other_matrix(one, lambda bits: bits.__setitem__(0, bits[1])),
        "behaviour.transforms",
        "not orthogonal",
    ),
    "another size": (lambda one: one["turns"][0]["matrix"].update(size=48), "behaviour.transforms", "does not fit"),
    "no such module": (
        lambda one: one["turns"][0]["readers"].append("model.nothing"),
        "behaviour.transforms",
        "holds no model.nothing.weight",
    ),
    "no reader": (lambda one: one["turns"][0].update(readers=[]), "behaviour.transforms", "has no readers"),
    "another offset": (lambda one: one["folds"][0].update(offset=1.0), "behaviour.transforms", "differ by"),
    "no base64": (lambda one: one["turns"][0]["matrix"].update(signs="?"), "behaviour.transforms", "cannot be read"),
    "no list": (lambda one: one["turns"][0].update(writers="lm_head"), "behaviour.transforms", "cannot be read"),
}


@pytest.mark.parametrize("what", ACCOUNTS)
def test_a_wrong_account_of_a_rotation_is_found(what: str, workspace: Workspace, turned: Path, tmp_path: Path) -> None:
    change, name, said = ACCOUNTS[what]
    records = judged(workspace, edited(turned, tmp_path / "edited", change))
    assert records[name].outcome is Outcome.FAIL and said in records[name].summary + " ".join(records[name].findings)
    assert records["report"].exit_code != 0


def test_a_damaged_float_weight_is_found_though_sums_may_round_otherwise(workspace: Workspace, turned: Path, tmp_path: Path) -> None:
    folder = edited(turned, tmp_path / "edited", lambda one: None)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3, 5] += 4 * tensors["lm_head.weight"][3, 5].abs() * 2**-8  # two units in the last place
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert judged(workspace, folder)["files.tensors"].outcome is Outcome.FAIL


def opt() -> nn.Module:
    return tiny.opt(vocab_size=96)


def gpt2() -> nn.Module:
    return tiny.gpt2(vocab_size=96)


def moe() -> nn.Module:
    return tiny.qwen3_moe(vocab_size=96, intermediate_size=32)


@pytest.mark.parametrize("make", [opt, gpt2, moe])
@pytest.mark.parametrize("kind", ["hadamard", "random-matrix"])
def test_ties_biases_and_weights_that_lie_otherwise(make: Any, kind: str, workspace: Workspace, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(tmp_path / "base")
    oneshot(tmp_path / "base", recipe=[SpinQuantModifier(rotations=["R1"], transform_type=kind)], output_dir=tmp_path / "out", device="cpu")
    ids = load_file(workspace.dataset)["input_ids"]
    records = {record.name: record for record in validate(tmp_path / "base", tmp_path / "out", ids[8:]).records}
    assert [(name, record.summary) for name, record in records.items() if record.outcome is Outcome.FAIL] == []
    assert "tensors unchanged" in records["files.tensors"].summary
    subject = read_subject(tmp_path / "base", tmp_path / "out")
    found = check_transforms(subject, model.float(), TokenBatch(ids[:4], torch.ones_like(ids[:4])))
    assert found.outcome is Outcome.PASS and found.evidence["relative difference"] < 1e-4
    folder = edited(tmp_path / "out", tmp_path / "edited", lambda one: one["folds"].pop(0))  # these norms are no ones
    records = {record.name: record for record in validate(tmp_path / "base", folder, ids[8:]).records}
    assert records["files.tensors"].outcome is Outcome.FAIL and records["behaviour.transforms"].outcome is Outcome.FAIL


def test_bisect_turns_the_base_too(workspace: Workspace, turned: Path, tmp_path: Path) -> None:
    folder = edited(turned, tmp_path / "edited", lambda one: None)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"].mul_(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = bisect(workspace.base, folder, workspace.dataset, device="cpu")
    assert report.layers[0].modules[0].module == "model.layers.1.mlp.up_proj", report.to_text()


@pytest.mark.parametrize("settings", [{}, {"transform_type": "random-hadamard"}, {"transform_block_size": 16}], ids=str)
def test_rotations_are_done_again_to_the_bit(settings: dict[str, Any], workspace: Workspace, tmp_path: Path) -> None:
    """Sums of numbers of 8 bits are exact, and so are ties between two of them: no order of sums may decide them."""
    oneshot(workspace.base, recipe=SpinQuantModifier(**settings), output_dir=tmp_path / "out", device="cpu")
    subject = read_subject(workspace.base, tmp_path / "out")
    for name in subject.compressed.entries:
        assert torch.equal(subject.base.tensor(name), subject.compressed.tensor(name)), name
    assert validate(workspace.base, tmp_path / "out", load_file(workspace.dataset)["input_ids"][8:]).exit_code == 0
