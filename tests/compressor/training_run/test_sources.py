"""A training reads what oneshot reads, but no DataLoader."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
import torch

from compressor import train
from tests import tiny


def test_a_file_that_datasets_reads_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "d.json").write_text(json.dumps([{"input_ids": row} for row in rows]))
    losses = []
    for source in (str(tmp_path / "d.json"), rows):
        model = tiny.llama(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        losses.append(train(model, dataset=source, steps=1, batch_size=2, max_seq_length=8, mode="eager", progress=False).losses)
    assert losses[0] == losses[1]


def test_blocks_without_a_target_are_noted() -> None:
    rows = [{"input_ids": list(range(8)), "loss_mask": [number != 1] * 8} for number in range(3)]
    model = tiny.llama(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    settings = {"steps": 1, "batch_size": 2, "max_seq_length": 8, "mode": "eager", "progress": False}
    notes = train(model, dataset=rows, eval_dataset=rows[:2], **settings).report.notes
    left_out = "1 blocks in which a loss_mask leaves no target are left out"
    assert {f"dataset: {left_out}", f"eval_dataset: {left_out}"} <= set(notes)
