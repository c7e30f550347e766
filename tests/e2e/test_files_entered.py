"""A traced run with GPTQ is followed through so many files and no more, and its column loop stays in the file that it is written in."""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import compressor
from compressor.algorithms import babai
from compressor.algorithms.babai import Factor, Grid, GridColumns, solve_r_form
from compressor.numerics import QuantizationArgs

ROOT = Path(compressor.__file__).parent
MOST = 115  # files; 100 on the reference model on 2026-11-25, before monitor, tracking, rotations, ranks, onloading, media, picked rows


def entered(run: Callable[[], Any]) -> tuple[collections.Counter[str], int]:
    """Count calls of functions by file of ours, and how often a call goes to another file than the one before it."""
    calls: collections.Counter[str] = collections.Counter()
    last, changes = "", 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal last, changes
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{ROOT}/") and frame.f_code.co_name != "<module>":
            calls[file.removeprefix(f"{ROOT}/")] += 1
            changes, last = changes + (file != last), file

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls, changes


def test_a_run_enters_few_files(llama_dir: Path, tmp_path: Path) -> None:
    recipe = {"quant_stage": {"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "ignore": ["lm_head"]}}}}
    data = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))

    def run(name: str) -> None:
        compressor.oneshot(llama_dir, recipe=recipe, dataset=data, output_dir=tmp_path / name)

    run("first")  # what modules do as they are loaded is none of the trip
    calls, _ = entered(lambda: run("second"))
    assert len(calls) <= MOST, f"{len(calls)}: {sorted(calls)}"
    assert len([file for file in calls if file.startswith("tracing/graph/")]) <= 12


def test_the_column_loop_of_integers_stays_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of floats calls the one definition of their rounding, which torch has no single function for."""
    monkeypatch.setattr(babai, "kernel_for", lambda grid, device: None)
    args = QuantizationArgs(type="int", num_bits=4, strategy="channel")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 32, generator=generator)
    weight_CR = torch.randn(32, 8, generator=generator)
    columns = GridColumns(Grid(torch.full((8, 1), 0.1), None, torch.zeros(32, dtype=torch.int64), args), torch.arange(32))
    factor = Factor.of(inputs.T @ inputs, "weight")
    calls, changes = entered(lambda: solve_r_form(weight_CR, factor, columns, 8))
    assert calls["algorithms/babai.py"] > 32
    assert changes < 8, calls
