"""Another kernel at an op of a step on a GPU: on a tape, op by op, with timing that waits for the device; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from compressor.errors import UserInputError
from compressor.training import Trainer
from harness.replay.equivalence.training_state import state_of
from harness.replay.kernels.compare import compare_kernel
from harness.replay.kernels.sources import plan_on_tape
from tests.bench.replay_cases import mlp, small_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand")]


def test_a_kernel_on_a_gpu_is_held_against_the_original_and_its_control():
    device = torch.device("cuda")
    case = small_llama(16, 2, 2, 6)
    batches = case.batches(4, device)
    plan = plan_on_tape(case.step(device), lambda number: batches[number % 4])
    before = state_of(plan.step).digests()
    report = compare_kernel(plan, batches[0], "aten.silu", torch.ops.aten.silu, steps=2, rounds=3)
    assert report.bitwise_equal and report.control_equal and report.timing is not None
    report = compare_kernel(plan, batches[0], "aten.silu", lambda x: torch.nn.functional.silu(x.half()).to(x.dtype), rounds=0)
    assert report.to_dict()["truth"] == {"farther": 2} and report.exceeded(max_ulps=2)
    assert state_of(plan.step).digests() == before


def test_a_cuda_graph_is_refused_with_what_to_do_instead():
    device = torch.device("cuda")
    case = mlp()
    batches = case.batches(4, device)
    trainer = Trainer(case.step(device), "replay")
    for number in range(5):
        trainer.train_step(batches[number % 4])
    with pytest.raises(UserInputError, match=r"CudaGraph, whose kernels cannot be exchanged one by one; .*TapeEngine"):
        compare_kernel(trainer.plans[0], batches[0], "aten.relu", torch.relu)
