"""Activations of a GPU go to pinned memory and to disk and come back bit for bit, also when they are fetched ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.pipelines.memory import free_bytes
from compressor.pipelines.offload.activation_store import ActivationStore, open_store

pytestmark = pytest.mark.gpu
SIZE = 4 * 256 * 256


def filled(device: torch.device, seed: int) -> Tensor:
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("prefetch", [True, False])
def test_three_places_by_budget_and_back_bit_for_bit(prefetch: bool, device: torch.device, tmp_path: Path) -> None:
    table = filled(device, 99)
    with ActivationStore(device, 2 * SIZE, 3 * SIZE + 1000, tmp_path) as store:
        for turn in range(3):
            for sample in range(6):
                x = filled(device, sample) + turn
                store.put(sample, {"x": x, "row": x.t()[3], "table": table.clone(), "on the cpu": torch.arange(3)})
                del x
            assert store.used_bytes["device"] == 2 * SIZE and store.used_bytes["disk"] == 2 * SIZE
            for sample in range(6):
                if prefetch:
                    store.prefetch(sample + 1)
                kept = store.get(sample)
                assert torch.equal(kept["x"], filled(device, sample) + turn) and kept["x"].device.type == device.type
                assert torch.equal(kept["table"], table) and kept["on the cpu"].device.type == "cpu"
                kept["x"].zero_()
                assert not kept["row"].any()
                x = filled(device, sample)
                store.put(sample, {**kept, "x": x, "row": x.t()[3]})
    assert list(tmp_path.iterdir()) == []


def test_gpu_memory_is_granted_by_what_is_free(device: torch.device) -> None:
    assert 0 < free_bytes(device) <= torch.cuda.get_device_properties(device).total_memory
    with open_store(torch.nn.Linear(2, 2), device, activation_device_memory="1MB", activation_memory="1MB") as store:
        for sample in range(5):
            store.put(sample, {"x": filled(device, sample)})
        assert store.used_bytes == {"device": 3 * SIZE, "host": 2 * SIZE}
