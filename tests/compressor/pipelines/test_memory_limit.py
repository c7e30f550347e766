"""A model in files is compressed under a limit of memory that it does not fit in, and a process that holds it whole is ended there."""

from __future__ import annotations

import mmap
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor import oneshot
from compressor.tracing import footprint
from tests import tiny
from tests.compressor.distributed.rank_jobs import CONTEXT

LAYERS = 8
_SHAPE = {"hidden_size": 512, "intermediate_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048}


def work(first: str, model: str, out: str, held: str, link: Connection) -> None:
    """Compress a small model, and at a word the larger one; its weights are mapped, or held in memory."""
    footprint.COPIED_BYTES = 1 << 20  # a model of this size would be copied while it is traced
    _run(first, f"{out}-first")  # what libraries load and keep on first use is no part of a run
    link.send("ready")
    link.recv()
    source: Any = model
    if held == "held":
        source = AutoModelForCausalLM.from_pretrained(model)
        for parameter in source.parameters():
            parameter.data = parameter.data.clone()
    _run(source, out)


def _run(model: Any, out: str) -> None:
    recipe = {"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "ignore": ["lm_head", "re:.*(o|down)_proj"], "mode": "fast"}}}
    oneshot(model, recipe=recipe, dataset=torch.arange(64).view(2, 32), output_dir=out)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model of one layer, and a larger one of many."""
    made = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("model")
    for folder, layers in zip(made, (1, LAYERS), strict=True):
        tiny.llama(num_hidden_layers=layers, **_SHAPE).save_pretrained(folder)
    return made


def ended(folders: tuple[Path, Path], out: Path, held: str, limit: int) -> tuple[int, int]:
    """Run, and end the process where it takes more than `limit` bytes over what it held before; return its exit status and that peak."""
    link, its = CONTEXT.Pipe()
    process: Any = CONTEXT.Process(target=work, args=(*map(str, folders), str(out), held, its))
    process.start()
    assert link.recv() == "ready"
    pages = Path(f"/proc/{process.pid}/statm")
    start, peak = resident_bytes(pages), 0
    link.send("go")
    while process.exitcode is None:
        peak = max(peak, resident_bytes(pages) - start)
        if peak > limit:
            process.kill()
        time.sleep(0.001)
    return process.exitcode, peak


def resident_bytes(pages: Path) -> int:
    """All that a process has in memory, mapped files included; nothing once it has ended."""
    try:
        counts = pages.read_text(encoding="ascii").split()
    except (ProcessLookupError, FileNotFoundError):  # it has just gone
        return 0
    return int(counts[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process as Linux tells it")
def test_a_model_that_does_not_fit_is_compressed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Loading, tracing, calibration, solving and saving take turns with the layers, of which one has an eighth of the model."""
    limit = sum(file.stat().st_size for file in folders[1].glob("*.safetensors")) * 3 // 5  # runs take 41 to 51 % of the model
    status, peak = ended(folders, tmp_path / "held", "held", limit)
    assert status == -signal.SIGKILL and not (tmp_path / "held").exists()
    status, peak = ended(folders, tmp_path / "out", "mapped", limit)
    assert status == 0, f"ended at {peak / 1e6:.0f} MB of {limit / 1e6:.0f}"
    assert (tmp_path / "out" / "compression.json").exists()
