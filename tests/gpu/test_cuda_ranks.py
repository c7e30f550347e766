"""Ranks with a GPU each, which talk over NCCL, write what one process writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compressor import oneshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")]

RECIPE = "quant_modifiers: {GPTQModifier: {ignore: [lm_head], scheme: W4A16}}"


def test_two_ranks_over_nccl_write_the_bytes_of_one_process(reference_model: Path, tmp_path: Path) -> None:
    """Hessians and solved weights go from GPU to GPU."""
    data = reference_model / "calibration.safetensors"
    oneshot(reference_model, recipe=RECIPE, dataset=data, num_calibration_samples=32, output_dir=tmp_path / "alone")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "compressor", "oneshot"]
    command += [str(reference_model), "--recipe", RECIPE, "--dataset", str(data), "--num-calibration-samples", "32"]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path / "shared")], capture_output=True, text=True, env=os.environ | threads, check=False
    )
    assert done.returncode == 0, done.stderr
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "shared" / file.name).read_bytes(), file.name
