"""Pruning and quantization-aware training are the same steps on a GPU: equal in all modes, and nothing in them asks the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.lifecycle import Session, State
from compressor.modifiers.pruning.magnitude import MagnitudePruningModifier
from compressor.modifiers.quantization import QuantizationModifier
from compressor.training import Snapshot, Trainer, TrainStep, adamw

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS: dict[str, dict[str, Any]] = {
    "int4 group": {"weights": {"num_bits": 4, "group_size": 16}},
    "int8, static": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "symmetric": False}},
    "fp8, dynamic": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    },
    "nvfp4": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}},
    "mxfp4": {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}},
}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def run(device: str, mode: str, kind: str) -> tuple[Trainer, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    modifiers = [
        MagnitudePruningModifier(final_sparsity=0.5, mask_structure="2:4", start=3, end=11, update=2, leave_enabled=True),
        QuantizationModifier(
            config_groups={"g": {"targets": ["Linear"], **FORMATS[kind]}}, start=7, end=21, disable_quantization_observer_epoch=15
        ),
    ]
    session = Session(State(model, torch.device(device)), modifiers)
    session.initialize()
    trainer = Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2), session), mode, max_plans=16)

    def batch_at(step: int) -> dict[str, Tensor]:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        return {"x": x.to(device), "y": (x[:, :4].argmax(1)).to(device)}

    return trainer, trainer.fit(batch_at, 30)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FORMATS)
def test_all_modes_are_one_step_and_codes_compute_what_was_trained(device: str, kind: str) -> None:
    eager, losses = run(device, "eager", kind)
    for mode in ("capture", "replay"):
        trainer, others = run(device, mode, kind)
        assert losses == others
        assert Snapshot.take(eager.step).differences(Snapshot.take(trainer.step)) == []
    assert trainer.last_action == "audit"  # as the last step of a run is
    model, x = trainer.step.model.eval(), torch.randn(8, 32, device=device)
    with torch.no_grad():
        want = model(x)
        trainer.step.session.finalize()
        assert torch.equal(model(x), want)
    kept = (model[0].codes().float() != 0).unflatten(1, (-1, 4)).sum(-1)
    assert int(kept.max()) <= 2
