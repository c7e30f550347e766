"""Optimizers as users construct them: the same bits in all three modes, with schedules, counters and states of their own, also resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn, optim

from compressor.errors import GuardDriftError, ResumeError, UserInputError
from compressor.training import Snapshot, Trainer, TrainStep, load_training, save_training


class Lion(optim.Optimizer):
    """Replaces its state in every step, counts in Python, and acts otherwise at every third step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.num_updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                update = 0.9 * state.get("momentum", torch.zeros_like(parameter)) + 0.1 * parameter.grad
                parameter.add_(update.sign() if self.num_updates % 3 else update, alpha=-group["lr"] / self.num_updates)
                state["momentum"], state["seen"] = update, state.get("seen", 0) + 1


STOCK = {
    "adamw": lambda params: optim.AdamW(params, lr=1e-4),
    "adamw foreach": lambda params: optim.AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "adamw rate in a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(1e-2)),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": optim.Adam,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
    "muon": lambda params: optim.Muon([one for one in params if one.dim() == 2]),
    "adafactor of transformers": transformers.Adafactor,
    "adafactor with a rate": lambda params: transformers.Adafactor(params, lr=1e-3, relative_step=False, scale_parameter=False),
    "one's own": Lion,
}


def _trainer(cases: Any, make: Any, mode: str, **settings: Any) -> Trainer:
    torch.manual_seed(7)
    model = cases["mlp"].make().train()
    return Trainer(TrainStep(model, cases["mlp"].loss_fn, make(model.parameters()), clip_norm=0.5), mode, **settings)  # type: ignore[arg-type]


def _ordinary_loop(cases: Any, make: Any, batches: Any, num_steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = cases["mlp"].make().train()
    optimizer = make(model.parameters())
    for number in range(num_steps):
        optimizer.zero_grad()
        cases["mlp"].loss_fn(model, batches(number)).backward()
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        nn.utils.clip_grad_norm_([one for one in model.parameters() if id(one) in trained], 0.5)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_optimizer_gives_the_bits_of_an_ordinary_loop_in_every_mode(cases, batches, name):
    ends = {}
    for mode in ("eager", "capture", "replay"):
        trainer = _trainer(cases, STOCK[name], mode)
        trainer.fit(batches, 14)
        ends[mode] = Snapshot.take(trainer.step)
        assert mode != "replay" or trainer.plans
    assert ends["eager"].differences(ends["capture"]) == [] == ends["eager"].differences(ends["replay"])
    for key, value in _ordinary_loop(cases, STOCK[name], batches, 14).items():
        mine = ends["replay"].tensors.get(f"param:{key}", ends["replay"].tensors.get(f"buffer:{key}"))
        assert torch.equal(value, mine), key


@pytest.mark.parametrize("name", STOCK)
def test_a_run_that_is_resumed_ends_with_equal_bytes(cases, batches, tmp_path, name):
    whole = _trainer(cases, STOCK[name], "replay")
    whole.fit(batches, 7)
    save_training(whole, tmp_path / "state")
    whole.fit(batches, 16)
    resumed = _trainer(cases, STOCK[name], "replay")
    load_training(resumed, tmp_path / "state")
    resumed.fit(batches, 16)
    assert Snapshot.take(whole.step).differences(Snapshot.take(resumed.step)) == []
    save_training(whole, tmp_path / "one")
    save_training(resumed, tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_schedules_of_torch_and_of_the_trainer_set_python_numbers(cases, batches):
    ends = []
    for mode in ("eager", "replay"):
        trainer = _trainer(cases, optim.AdamW, mode, schedule=lambda step: 1 / (1 + step))
        cycle = optim.lr_scheduler.OneCycleLR(trainer.step.optimizer, max_lr=0.1, total_steps=30)  # also moves betas
        for number in range(12):
            trainer.train_step(batches(number))
            cycle.step()
        ends.append(Snapshot.take(trainer.step))
    assert ends[0].differences(ends[1]) == [] and trainer.step.optimizer.param_groups[0]["betas"] != (0.9, 0.999)


def test_a_loss_that_reads_the_rate_is_told_when_it_changes(cases, batches):
    torch.manual_seed(7)
    model = cases["mlp"].make().train()
    optimizer = optim.AdamW(model.parameters())

    def loss_fn(model, batch):
        return cases["mlp"].loss_fn(model, batch) * (1 + optimizer.param_groups[0]["lr"])

    trainer = Trainer(TrainStep(model, loss_fn, optimizer), "replay", audit_every=0)
    trainer.fit(batches, 6)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(GuardDriftError, match=r"optimizer group 0: lr was 0\.001 and is now 0\.5"):
        trainer.train_step(batches(6))


def test_an_optimizer_that_promises_to_read_nothing_is_captured(cases, batches):
    steps = {name: _trainer(cases, make, "replay").step for name, make in STOCK.items()}
    assert not any(step.update_is_captured for step in steps.values())
    trainer = _trainer(cases, lambda params: optim.AdamW(params, fused=True), "replay")
    assert trainer.step.update_is_captured
    trainer.fit(batches, 6)
    assert any("aten._fused_adamw_" in line for line in trainer.plans[0].captured.lines)


def test_an_optimizer_that_calls_the_loss_itself_is_refused_by_name(cases):
    with pytest.raises(UserInputError, match=r"LBFGS calls the loss itself, in a closure.*take another optimizer"):
        _trainer(cases, optim.LBFGS, "eager")
    with pytest.raises(UserInputError, match="SparseAdam takes sparse gradients only"):
        _trainer(cases, optim.SparseAdam, "eager")


class Listing(Lion):
    """Keeps what no file of tensors and numbers can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["history"] = [torch.zeros(2)]


def test_a_state_that_would_be_missing_after_a_resume_is_refused_when_it_is_saved(cases, batches, tmp_path):
    trainer = _trainer(cases, Listing, "replay")
    trainer.fit(batches, 3)
    with pytest.raises(ResumeError, match="Listing: its state 'history' is neither a tensor nor a number"):
        save_training(trainer, tmp_path / "state")
    assert not list(tmp_path.iterdir())
