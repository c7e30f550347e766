"""`compressor train` on a GPU: the same bytes in every mode, and from a run that was stopped; needs a GPU."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand")]

PRUNE = {"MagnitudePruningModifier": {"targets": ["re:.*mlp.*_proj"], "start": 2, "end": 6, "final_sparsity": 0.5, "leave_enabled": True}}
SETTINGS: dict[str, Any] = {
    "steps": 10,
    "batch_size": 2,
    "accumulate": 2,
    "max_seq_length": 16,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "autocast": "bf16",
    "ema": [0.9],
    "save_ema": 0.9,
    "save_every": 3,
    "recipe": PRUNE,
    "device": "cuda",
}


def _digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _inputs(folder: Path) -> tuple[Path, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=32)).bfloat16().save_pretrained(folder / "model")
    return folder / "model", torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(3))


def test_all_modes_give_the_same_checkpoint(tmp_path: Path) -> None:
    model, data = _inputs(tmp_path)
    found = {}
    for mode in ("eager", "capture", "replay"):
        train(model, dataset=data, output_dir=tmp_path / mode, mode=mode, **SETTINGS)
        found[mode] = _digest(tmp_path / mode)
    assert found["eager"] == found["capture"] == found["replay"]


class _Fall:
    """A bar that breaks the run off after its eighth step."""

    seen = 0

    def task(self, description: str, total: int) -> Any:
        from contextlib import nullcontext

        return nullcontext(self)

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        self.seen += amount
        if self.seen == 8:
            raise ZeroDivisionError


def test_a_run_that_broke_off_goes_on_to_the_same_checkpoint(tmp_path: Path) -> None:
    model, data = _inputs(tmp_path)
    train(model, dataset=data, output_dir=tmp_path / "whole", **SETTINGS)
    with pytest.raises(ZeroDivisionError):
        train(model, dataset=data, output_dir=tmp_path / "o", progress=_Fall(), **SETTINGS)
    assert train(model, dataset=data, output_dir=tmp_path / "o", resume=True, **SETTINGS).resumed == "resumed after step 6 of 10"
    assert _digest(tmp_path / "o") == _digest(tmp_path / "whole")
