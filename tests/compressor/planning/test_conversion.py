"""A plan says what `convert` would take where the recipe needs no forward."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor.cli.main import main
from compressor.conversion.files import Files
from compressor.conversion.rounding import run_unit
from compressor.conversion.units import Target, Unit, View
from compressor.model.headers import NAMES, read_header
from compressor.numerics import preset_scheme
from compressor.planning import Plan, conversion, plan, planner
from compressor.planning.estimate import Speed
from tests import tiny
from tests.bench.live_peak import live_peak_bytes

COLUMNS = 1024


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 1 GB/s, and a machine that is not timed for the rest of a plan."""
    monkeypatch.setattr(planner, "measure_speed", lambda device, dtype: Speed(1e9, 1e9, 1e-6, 1e-9))
    monkeypatch.setattr(conversion, "disk_speed", lambda: (1e9, 1e9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.config(
        "llama", vocab_size=512, hidden_size=256, intermediate_size=4096, dtype="bfloat16", architectures=["LlamaForCausalLM"]
    ).save_pretrained(path)
    return path


def test_the_disk_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(conversion, "DISK_BYTES", 1 << 16)
    assert all(1e3 < speed < 1e13 for speed in conversion.disk_speed.__wrapped__())


def recipe(scheme: str) -> dict[str, Any]:
    return {"quant_modifiers": {"QuantizationModifier": {"scheme": scheme, "ignore": ["lm_head"]}}}


def planned(folder: Path, scheme: str, **settings: Any) -> Plan:
    return plan(folder, recipe=recipe(scheme), **settings)


def test_what_goes_over_the_disk_is_counted_and_work_is_shared_by_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    made = planned(folder, "FP8_DYNAMIC", ranks=2)
    found, cost = made.conversion, made.estimate
    assert found is not None and (found.workers, found.written_bytes, found.read_bytes) == (2, cost.checkpoint_bytes, cost.model_bytes)
    assert found.disk_seconds == pytest.approx((found.read_bytes + found.written_bytes) / 1e9)
    assert found.seconds == max(found.disk_seconds, found.work_seconds / 2) > 0
    ranges = planned(folder, "NVFP4A16").conversion  # one scale of the tensor: its weights are read before
    assert ranges is not None and ranges.read_bytes == cost.model_bytes + sum(int(one.details["bytes_before"]) for one in made.modules)


def test_what_needs_a_forward_or_lies_in_memory_is_not_converted(folder: Path) -> None:
    settings = {"num_calibration_samples": 2, "max_seq_length": 8}
    assert planned(folder, "FP8", **settings).conversion is None
    gptq = plan(folder, recipe={"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "ignore": ["lm_head"]}}}, **settings)
    held = plan(torch.nn.Sequential(torch.nn.Linear(128, 128)), recipe={"quant_modifiers": {"QuantizationModifier": {"scheme": "W4A16"}}})
    assert gptq.conversion is held.conversion is None


def test_the_command_says_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(folder), "--recipe", json.dumps(recipe("FP8_DYNAMIC")), "--ranks", "4"]
    assert main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "by compressor convert, without a forward (estimate): " in said and "in each of 4 processes (--workers 4)" in said
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["conversion"]["seconds"] > 0


def test_the_memory_of_a_block_is_what_the_allocator_sees(folder: Path, tmp_path: Path) -> None:
    found = planned(folder, "FP8_DYNAMIC").conversion
    rows = 4096
    save_file({"weight": torch.ones(rows, COLUMNS, dtype=torch.bfloat16)}, tmp_path / "base.safetensors")
    empty = {"weight": torch.zeros(rows, COLUMNS).to(torch.float8_e4m3fn), "weight_scale": torch.zeros(rows, 1, dtype=torch.bfloat16)}
    save_file(empty, tmp_path / "made.safetensors")
    targets = {
        key: Target(name=key, file="made.safetensors", dtype=NAMES[one.dtype], start=one.start, shape=one.shape)
        for key, one in read_header(tmp_path / "made.safetensors").items()
    }
    view = View.of(read_header(tmp_path / "base.safetensors")["weight"])
    scheme = preset_scheme("FP8_DYNAMIC", ["Linear"])
    unit = Unit(kind="round", name="layer", views=(view,), dtype="BF16", targets=targets, scheme=scheme)
    with Files(tmp_path) as base, Files(tmp_path, writable=True) as made:
        peak = live_peak_bytes(lambda: run_unit(unit, base, made, torch.device("cpu")), torch.device("cpu"))
    assert found is not None and peak == pytest.approx(found.block_bytes, rel=0.25)
