"""A model in files is compressed under a limit of memory that it does not fit in, and a process that holds it whole is ended there."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny

LAYERS = 8
_SHAPE = {"hidden_size": 512, "intermediate_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048}
_RUN = """
import sys, torch
from transformers import AutoModelForCausalLM
from compressor import oneshot
from compressor.tracing import footprint

footprint.COPIED_BYTES = 1 << 20  # a model of this size would be copied while it is traced

def run(model, out):
    recipe = {"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "ignore": ["lm_head", "re:.*(o|down)_proj"], "mode": "fast"}}}
    oneshot(model, recipe=recipe, dataset=torch.arange(64).view(2, 32), output_dir=out)

first, model, out, held = sys.argv[1:]
run(first, out + "-first")  # what libraries load and keep on first use is no part of a run
print("ready", flush=True)
sys.stdin.readline()
if held == "held":
    model = AutoModelForCausalLM.from_pretrained(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
run(model, out)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model of one layer, and a larger one of many."""
    made = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("model")
    for folder, layers in zip(made, (1, LAYERS), strict=True):
        tiny.llama(num_hidden_layers=layers, **_SHAPE).save_pretrained(folder)
    return made


def ended(folders: tuple[Path, Path], out: Path, held: str, limit: int) -> tuple[int, int]:
    """Run, and end the process where it takes more than `limit` bytes over what it held before; return its exit status and that peak."""
    command = [sys.executable, "-c", _RUN, *map(str, folders), str(out), held]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pages = Path(f"/proc/{process.pid}/statm")
        start, peak = resident_bytes(pages), 0
        process.stdin.write("\n")
        process.stdin.flush()
        while process.poll() is None:
            peak = max(peak, resident_bytes(pages) - start)
            if peak > limit:
                process.kill()
            time.sleep(0.001)
    return process.returncode, peak


def resident_bytes(pages: Path) -> int:
    """All that a process has in memory, mapped files included; nothing once it has ended."""
    counts = pages.read_text(encoding="ascii").split()
    return int(counts[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process as Linux tells it")
def test_a_model_that_does_not_fit_is_compressed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Loading, tracing, calibration, solving and saving take turns with the layers, of which one has an eighth of the model."""
    limit = sum(file.stat().st_size for file in folders[1].glob("*.safetensors")) // 2
    status, peak = ended(folders, tmp_path / "held", "held", limit)
    assert status == -signal.SIGKILL and not (tmp_path / "held").exists()
    status, peak = ended(folders, tmp_path / "out", "mapped", limit)
    assert status == 0, f"ended at {peak / 1e6:.0f} MB of {limit / 1e6:.0f}"
    assert (tmp_path / "out" / "compression.json").exists()
