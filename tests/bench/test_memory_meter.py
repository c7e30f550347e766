"""The meter of memory counts every byte that is in use, also inside an operation and in mapped files, and nothing else."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.bench.memory_meter import MemoryMeter

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the meter reads the books of glibc")
MB = 1_000_000


def test_tensors_and_arrays_count_while_they_are_there() -> None:
    with MemoryMeter() as meter:
        first = torch.zeros(20 * MB, dtype=torch.uint8)
        second = np.zeros(10 * MB, dtype=np.uint8)
        meter.mark("both")
        del first, second
        meter.mark("going")
        torch.zeros(5 * MB, dtype=torch.uint8)
        meter.mark("gone")
    peaks = dict(meter.peaks)
    assert peaks["both"] == pytest.approx(30 * MB, rel=0.02)
    assert peaks["gone"] < 6 * MB
    assert meter.peak_bytes == peaks["both"]


def test_what_an_operation_takes_for_itself_counts() -> None:
    def work() -> None:
        matrix = torch.ones(1500, 1500)
        torch.linalg.inv(matrix + torch.eye(1500))  # works on copies that no one outside sees
        time.sleep(0.01)

    work()
    with MemoryMeter() as meter:
        work()
    assert meter.peak_bytes > 3 * 1500 * 1500 * 4


def test_pages_that_are_asked_of_the_system_count_while_they_are_there() -> None:
    with MemoryMeter() as meter:
        pages = mmap.mmap(-1, 20 * MB, access=mmap.ACCESS_COPY)
        held = torch.frombuffer(pages, dtype=torch.uint8)
        meter.mark("mapped")
        del pages, held
        meter.mark("going")
        meter.mark("gone")
    peaks = dict(meter.peaks)
    assert peaks["mapped"] == pytest.approx(20 * MB, rel=0.02) and peaks["gone"] < MB


def test_files_of_weights_that_are_mapped_count_once(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(8 * MB, dtype=torch.uint8), "b": torch.zeros(8 * MB, dtype=torch.uint8)}, tmp_path / "weights.safetensors")
    with MemoryMeter() as meter:
        with safe_open(tmp_path / "weights.safetensors", framework="pt") as file:
            meter.mark("open")
            del file
        meter.mark("closing")
    assert dict(meter.peaks)["open"] == pytest.approx(16 * MB, rel=0.02)
