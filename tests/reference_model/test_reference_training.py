"""The training of the reference model: 50 steps by the trainer, in every mode, are bitwise those of the plain loop that made the weights"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.reference_model.train import TrainingPlan, batch_of, capturable, held_out_loss, reference_config, reference_trainer, train

# Groups of two heads need 4 heads; all else may be small.
SMALL = TrainingPlan(
    vocab_size=64, seq_len=16, batch_size=4, num_steps=50, warmup_steps=5, num_threads=1, hidden_size=64, intermediate_size=96, num_layers=2
)


def plain_loop(plan: TrainingPlan, train_ids: Tensor) -> tuple[LlamaForCausalLM, list[float]]:
    """The loop that made `golden/reference`, as it stood before there was a trainer; no line of it comes from compressor.training."""
    torch.manual_seed(plan.seed)
    torch.set_num_threads(plan.num_threads)
    model = LlamaForCausalLM(reference_config(plan)).float().train()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.peak_lr, betas=(0.9, 0.95), fused=True)
    losses = []
    for step in range(plan.num_steps):
        rows = torch.arange(step * plan.batch_size, (step + 1) * plan.batch_size) % len(train_ids)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr(step)
        ids = train_ids[rows].long()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int16)


@pytest.fixture(scope="module")
def plain(ids: Tensor) -> tuple[dict[str, Tensor], list[float]]:
    model, losses = plain_loop(SMALL, ids)
    return copy.deepcopy(model.state_dict()), losses


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_fifty_steps_are_those_of_the_plain_loop_bit_for_bit(mode: str, ids: Tensor, plain: tuple[dict[str, Tensor], list[float]]) -> None:
    trainer = reference_trainer(SMALL, mode)
    with capturable(trainer.step.model, SMALL):
        losses = trainer.fit(lambda step: batch_of(SMALL, ids, step, trainer.step.device), SMALL.num_steps)
    assert losses == plain[1] and losses[-1] < losses[0]
    differing = [name for name, tensor in trainer.step.model.state_dict().items() if not torch.equal(tensor, plain[0][name])]
    assert differing == []
    assert trainer.last_action == {"eager": "eager", "replay": "audit"}[mode] and len(trainer.plans) == (mode == "replay")


def test_a_rate_that_is_rounded_is_seen(ids: Tensor, plain: tuple[dict[str, Tensor], list[float]]) -> None:
    """The comparison is sharp: learning rates rounded to float32 give other weights."""
    trainer = reference_trainer(SMALL, "eager")
    for group in trainer.step.optimizer.param_groups:
        group["lr"] = group["lr"].float()
    trainer.schedule._rates = [(group["lr"], 1.0) for group in trainer.step.optimizer.param_groups]
    trainer.fit(lambda step: batch_of(SMALL, ids, step, trainer.step.device), SMALL.num_steps)
    assert any(not torch.equal(tensor, plain[0][name]) for name, tensor in trainer.step.model.state_dict().items())


@pytest.mark.nightly
def test_the_script_logs_and_keeps_what_it_makes(ids: Tensor, plain: tuple[dict[str, Tensor], list[float]], tmp_path: Path) -> None:
    model, log = train(SMALL, ids, ids[:6], tmp_path)
    assert torch.equal(model.lm_head.weight, plain[0]["lm_head.weight"])
    assert [entry["step"] for entry in log] == [50] and log == json.loads((tmp_path / "log.json").read_text())
    assert (tmp_path / "latest" / "model.safetensors").is_file()
    trainer = reference_trainer(SMALL, "eager")
    trainer.step.model.load_state_dict(plain[0])
    assert log[0]["held_out"] == pytest.approx(held_out_loss(trainer, ids[:6], SMALL)) and log[0]["train"] == plain[1][-1]
