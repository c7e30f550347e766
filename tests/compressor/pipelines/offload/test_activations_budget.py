"""Budgets for activations: sizes are read as people write them, defaults are shares of what is free, and what cannot work is refused."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compressor.errors import OutputError, TargetError, UserInputError
from compressor.pages import address_space_left
from compressor.pipelines import SequentialSettings, memory
from compressor.pipelines.memory import free_bytes
from compressor.pipelines.offload import activation_store
from compressor.pipelines.offload.activation_store import open_store
from compressor.settings.kinds import parse_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("5", 5), ("4GB", 4 * 10**9), ("1.5 gib", 3 * 2**29), ("2k", 2000), ("7 MiB", 7 * 2**20), ("1.5e9", 15 * 10**8), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_bytes(text, "activation_memory") == size


@pytest.mark.parametrize("text", ["", "much", "-4GB", "4 PB", "4 G B", "1,5GB", True, None, "nan"])
def test_what_is_no_size_is_refused_by_name(text: Any) -> None:
    with pytest.raises(UserInputError, match=r"activation_memory: .* is no size in bytes"):
        parse_bytes(text, "activation_memory")


def test_settings_refuse_what_could_not_work_later(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="activation_device_memory: 'big' is no size"):
        SequentialSettings(activation_device_memory="big")
    with pytest.raises(OutputError, match="missing is no folder that can be written"):
        SequentialSettings(offload_dir=tmp_path / "missing")
    with pytest.raises(TargetError, match="activation_memory: '4GB' was given, but the basic pipeline"):
        SequentialSettings(activation_memory="4GB").refuse_without_use("basic")


def test_gpu_memory_is_not_granted_where_there_is_none() -> None:
    with pytest.raises(UserInputError, match="activation_device_memory: '4GB' was given, but the run is on cpu"):
        open_store(nn.Linear(2, 2), CPU, activation_device_memory="4GB")


def test_free_memory_obeys_the_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_bytes(CPU) < 1 << 50
    membership, slice_ = tmp_path / "cgroup", tmp_path / "user.slice"
    membership.write_text("4:memory:/box\n3:cpu:/\n0::/user.slice/run.scope\n")
    _limit(slice_, "max", "memory.current", "2000", file=0)
    assert memory._control_group_bytes(tmp_path, membership) > 1 << 60
    _limit(slice_, "5000", "memory.current", "2000", file=500)  # pages of mapped weights make room when somebody needs it
    assert memory._control_group_bytes(tmp_path, membership) == 4000
    _limit(slice_ / "run.scope", "2500", "memory.current", "2000", file=0)
    assert memory._control_group_bytes(tmp_path, membership) == 500
    _limit(tmp_path / "memory", "3000", "memory.usage_in_bytes", "2700", file=50)  # version 1, seen from inside of a container
    assert memory._control_group_bytes(tmp_path, membership) == 400
    monkeypatch.setattr(memory, "_control_group_bytes", lambda: 3000)
    assert free_bytes(CPU) == 3000


def _limit(folder: Path, limit: str, used_file: str, used: str, file: int) -> None:
    """A control group of either version, told by the name of the file for what is used."""
    folder.mkdir(exist_ok=True)
    is_second = used_file == "memory.current"
    (folder / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    total = "" if is_second else "total_"
    (folder / "memory.stat").write_text(f"file 9\n{total}inactive_file {file}\n{total}active_file {file}\n")


@pytest.mark.parametrize(("limited", "left"), [(resource.RLIMIT_AS, 20), (resource.RLIMIT_DATA, 26)])
def test_free_memory_obeys_the_limits_of_what_is_mapped(limited: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "statm").write_text("10 5 1 1 0 4 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    limits = {limited: 30 * page}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, resource.RLIM_INFINITY), resource.RLIM_INFINITY))
    assert address_space_left(tmp_path / "statm") == left * page
    limits.clear()
    assert address_space_left(tmp_path / "statm") > 1 << 60


def test_by_default_three_quarters_of_free_memory_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_store, "free_bytes", lambda device: 100_000)
    with open_store(nn.Linear(2, 2), CPU) as store:
        store.put(0, {"x": torch.zeros(75_000, dtype=torch.uint8)})
        with pytest.raises(RuntimeError, match="75,000 bytes of main memory"):
            store.put(1, {"x": torch.ones(5_000, dtype=torch.uint8)})


def test_a_budget_and_a_folder_move_samples_to_disk(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.config = config = {"a": [1]}  # type: ignore[assignment]
    with open_store(model, CPU, activation_memory="40kB", offload_dir=tmp_path) as store:
        for sample in range(3):
            store.put(sample, {"x": torch.full((30_000,), sample, dtype=torch.uint8), "config": [config]})
        assert store.used_bytes == {"device": 30_000, "disk": 60_000}
        assert store.get(2)["config"][0] is not config  # plain containers are values like any other
