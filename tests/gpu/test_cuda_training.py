"""The CUDA graph engine: the same steps, bit for bit, in eager, capture and replay; needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from compressor.errors import HostReadError, ProofError
from compressor.training import Snapshot, Trainer, TrainStep, adamw
from compressor.training.cuda_graph import CudaGraph

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand")]


def _batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    batch = {"x": torch.randn(6, 8, generator=generator), "y": torch.randint(0, 4, (6,), generator=generator)}
    return {key: value.cuda() for key, value in batch.items()}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch["x"]).float(), batch["y"])


def _trainer(mode: str, **settings: object) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)).cuda()
    return Trainer(TrainStep(model, _loss, adamw(model.parameters()), **settings), mode)


@pytest.mark.parametrize("settings", [{}, {"autocast": torch.bfloat16}, {"clip_norm": 0.5}], ids=["plain", "autocast", "clip"])
def test_twenty_steps_are_equal_bit_for_bit_on_a_gpu(settings):
    ends, losses = {}, {}
    for mode in ("eager", "capture", "replay"):
        trainer = _trainer(mode, **settings)
        losses[mode] = [trainer.train_step(_batch(number)).item() for number in range(20)]
        ends[mode] = Snapshot.take(trainer.step)
    assert losses["eager"] == losses["capture"] == losses["replay"]
    assert ends["eager"].differences(ends["replay"]) == [] == ends["eager"].differences(ends["capture"])
    assert isinstance(trainer.plans[0].captured, CudaGraph) and trainer.last_action == "replay"


def test_a_host_read_is_named_before_cuda_refuses_it():
    trainer = _trainer("replay")
    for number in range(2):
        trainer.train_step(_batch(number))
    trainer.step.model[2].forward = lambda x: x * x.mean().item()
    with pytest.raises(HostReadError, match=r"\(forward, 2\)"):
        trainer.train_step(_batch(2))
    torch.cuda.synchronize()
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_a_tensor_changed_behind_the_graph_is_found_by_the_proof():
    trainer = _trainer("replay")
    for number in range(3):
        trainer.train_step(_batch(number))
    plan = trainer.plans[0]
    true_replay = plan.captured.replay
    plan.captured.replay = lambda: (true_replay(), trainer.step.model[0].weight.data.add_(1))
    with pytest.raises(ProofError, match="the replayed step is not the eager one"):
        trainer.train_step(_batch(3))
