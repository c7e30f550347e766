"""The command under torchrun: one rank speaks, other verbs refuse to be started several times."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor import oneshot
from compressor.cli.main import main
from compressor.distributed import launch
from compressor.distributed.ranks import Ranks
from tests import tiny

RECIPE = (
    "quant_modifiers: {GPTQModifier: {ignore: [lm_head], config_groups: {all: {targets: [Linear], "
    "weights: {num_bits: 4, type: int, strategy: channel, symmetric: true}}}}}"
)


def test_verbs_that_share_nothing_refuse_several_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in (("0", "compressor plan: error: 2 ranks were started, and only oneshot shares its work; start one\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["plan", "MODEL", "--recipe", "R"]) == 2
        assert capsys.readouterr().err == said


def test_the_first_rank_traces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, code, said in (("0", 1, "compressor trace: error: model: 'MODEL' "), ("1", 0, "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["trace", "MODEL"]) == code
        assert capsys.readouterr().err.startswith(said)


def test_one_process_is_a_rank_that_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    assert ranks.is_first and all(ranks.counts(part) for part in range(8)) and ranks.share_out([3.0, 1.0]) == [0, 0]
    kept = object()
    assert ranks.broadcast(kept, 0) is kept and ranks.gather(kept) == [kept]
    monkeypatch.setenv("WORLD_SIZE", "8")  # of a scheduler that sets no RANK
    assert launch.num_ranks() == 1
    with launch.launched():
        assert not torch.distributed.is_initialized()


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for rank, said in (("0", "error: ranks: 2 processes were started on a machine with 1 GPU, and each needs one of its own; "), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["oneshot", str(tmp_path), "--recipe", RECIPE, "--output-dir", str(tmp_path / "out")]) != 0
        found = capsys.readouterr().err
        assert said in found and (said or not found)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_writes_what_one_process_writes(nodes: int, tmp_path: Path) -> None:
    """Two nodes are two agents, which meet on the loopback address."""

    tiny.llama(intermediate_size=48, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "model")  # type: ignore[arg-type]
    save_file({"input_ids": torch.randint(64, (48, 96))}, tmp_path / "data.safetensors")
    data, threads = str(tmp_path / "data.safetensors"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        oneshot(str(tmp_path / "model"), recipe=RECIPE, dataset=data, output_dir=str(tmp_path / "alone"), progress=False)
    finally:
        torch.set_num_threads(threads)
    meeting = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(2 // nodes), *meeting, "-m", "compressor", "oneshot"]
    command += [str(tmp_path / "model"), "--recipe", RECIPE, "--dataset", data, "--output-dir", str(tmp_path / "shared")]
    with ExitStack() as stack:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        agents = [stack.enter_context(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)) for _ in range(nodes)]
        said = [agent.communicate() for agent in agents]
    assert all(agent.returncode == 0 for agent in agents), said
    assert "".join(output for output, _ in said).count("checkpoint: ") == 1  # one rank speaks
    assert {one.name: one.read_bytes() for one in (tmp_path / "shared").iterdir()} == {
        one.name: one.read_bytes() for one in (tmp_path / "alone").iterdir()
    }
