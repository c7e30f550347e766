"""Hazards of facts: what Python holds while a plan is in use, and somebody changes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from compressor.errors import GuardDriftError, PointerDriftError
from compressor.training import Trainer, TrainStep
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import Net, at, classify, stage, vectors
from harness.replay.hazards.registry import Hazard


def _model(trainer: Trainer) -> Any:
    return trainer.step.model


def _set_group(key: str, value: object) -> Any:
    return at(6, lambda trainer: trainer.step.optimizer.param_groups[0].__setitem__(key, value))


def _set_rate(number: int, trainer: Trainer) -> None:
    trainer.step.optimizer.param_groups[0]["lr"].fill_(1e-2 / (number + 1))


def _one_cycle() -> Subject:
    model = Net()
    step = TrainStep(model, classify, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = OneCycleLR(step.optimizer, max_lr=0.01, total_steps=20)

    def advance(number: int, trainer: Trainer) -> None:
        if number:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()

    return Subject(step, advance)


def _lambda_rate() -> Subject:
    model = Net()
    step = TrainStep(model, classify, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True))
    scheduler = LambdaLR(step.optimizer, lambda number: 1 / (1 + number))

    def advance(number: int, trainer: Trainer) -> None:
        if number:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()

    return Subject(step, advance)


def _evaluate(number: int, trainer: Trainer) -> None:
    trainer.evaluate([vectors(100 + number), vectors(200 + number)])


def _freeze(trainer: Trainer, frozen: bool = True) -> None:
    _model(trainer).first.weight.requires_grad_(not frozen)


def _add_hook(trainer: Trainer) -> None:
    _model(trainer).first.register_forward_hook(lambda module, args, out: out * 2)


def _add_gradient_hook(trainer: Trainer) -> None:
    _model(trainer).first.weight.register_hook(lambda grad: grad * 2)


def _add_after_hook(trainer: Trainer) -> None:
    _model(trainer).first.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def _hooked(module: Any) -> None:
    module.handle = module.first.register_forward_hook(lambda inner, args, out: out * 2)


_ISSUE_LR, _DROPOUT = "pytorch/pytorch#106802", "pytorch/pytorch#84614"
HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "eval_of_all",
        "model.eval() while a plan is in use",
        stage(before=at(6, lambda t: t.step.model.eval())),
        GuardDriftError,
        "training=True and is now False",
        _DROPOUT,
    ),
    Hazard(
        "eval_of_a_part",
        "one dropout goes to eval",
        stage(before=at(6, lambda t: _model(t).drop.eval())),
        GuardDriftError,
        "module drop was training=True",
        _DROPOUT,
    ),
    Hazard(
        "eval_and_back",
        "eval() and train() again between two steps",
        stage(before=at(6, lambda t: t.step.model.eval().train())),
        source=_DROPOUT,
    ),
    Hazard("evaluation_between", "evaluation before every step, with dropout", stage(before=_evaluate), source="pytorch/pytorch#144386"),
    Hazard(
        "frozen",
        "a weight stops to require its gradient",
        stage(before=at(6, lambda t: _freeze(t))),
        GuardDriftError,
        "parameter first.weight",
        "deepmodeling/deepmd-kit#6001",
    ),
    Hazard(
        "thawed",
        "a frozen weight begins to require its gradient",
        stage(prepare=lambda m: m.first.weight.requires_grad_(False), before=at(6, lambda t: _freeze(t, False))),
        GuardDriftError,
        "parameter first.weight",
        "deepmodeling/deepmd-kit#6001",
    ),
    Hazard(
        "hook_added",
        "a forward hook comes",
        stage(before=at(6, _add_hook)),
        GuardDriftError,
        "hooks=(absent)",
        "NVIDIA/TransformerEngine#2831",
    ),
    Hazard(
        "hook_removed",
        "a forward hook goes",
        stage(prepare=_hooked, before=at(6, lambda t: _model(t).handle.remove())),
        GuardDriftError,
        "module first was hooks=",
        "NVIDIA/TransformerEngine#2831",
    ),
    Hazard(
        "gradient_hook_added",
        "a hook on a weight's gradient comes",
        stage(before=at(6, _add_gradient_hook)),
        GuardDriftError,
        "parameter first.weight",
        "NVIDIA/TransformerEngine#2831",
    ),
    Hazard(
        "after_hook_added",
        "a hook after accumulation comes",
        stage(before=at(6, _add_after_hook)),
        GuardDriftError,
        "parameter first.weight",
        "NVIDIA/TransformerEngine#2831",
    ),
    Hazard("rate_tensor", "the learning rate is filled in place before every step", stage(before=_set_rate), source=_ISSUE_LR),
    Hazard(
        "rate_number",
        "the learning rate is set to a Python number",
        stage(before=_set_group("lr", 1e-3)),
        PointerDriftError,
        "group0.lr: it is gone",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "betas",
        "betas are set",
        stage(before=_set_group("betas", (0.8, 0.99))),
        GuardDriftError,
        "optimizer group 0: betas",
        "torch docs: OneCycleLR, cycle_momentum",
    ),
    Hazard(
        "weight_decay",
        "weight_decay is scheduled",
        stage(before=_set_group("weight_decay", 0.2)),
        GuardDriftError,
        "optimizer group 0: weight_decay",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "one_cycle",
        "OneCycleLR moves betas as Python numbers",
        _one_cycle,
        GuardDriftError,
        "betas",
        "torch docs: OneCycleLR, cycle_momentum",
    ),
    Hazard("lambda_rate", "LambdaLR fills the rate's tensor", _lambda_rate, source=_ISSUE_LR),
    Hazard(
        "deterministic",
        "use_deterministic_algorithms is switched",
        stage(before=at(6, lambda t: torch.use_deterministic_algorithms(True))),
        GuardDriftError,
        "deterministic algorithms",
        "torch docs: notes/randomness",
    ),
    Hazard(
        "default_dtype",
        "the default dtype is switched",
        stage(lambda m, h: h * torch.full((), 0.1), before=at(6, lambda t: torch.set_default_dtype(torch.float64))),
        GuardDriftError,
        "default dtype",
        "torch docs: set_default_dtype",
    ),
    Hazard(
        "num_threads",
        "the number of threads is switched, so that sums run in another order",
        stage(before=at(6, lambda t: torch.set_num_threads(torch.get_num_threads() + 1))),
        GuardDriftError,
        "number of threads",
        "torch docs: notes/numerical_accuracy",
    ),
    Hazard(
        "matmul_precision",
        "the precision of float32 products is switched",
        stage(before=at(6, lambda t: torch.set_float32_matmul_precision("medium"))),
        GuardDriftError,
        "matmul precision",
        "torch docs: notes/numerical_accuracy",
    ),
    Hazard(
        "accumulate_changed",
        "a setting of the step is changed",
        stage(before=at(6, lambda t: setattr(t.step, "clip_norm", 1.0))),
        GuardDriftError,
        "step settings",
        "pytorch/pytorch#169545",
    ),
    Hazard(
        "autocast_changed",
        "autocast is switched on",
        stage(before=at(6, lambda t: setattr(t.step, "autocast", torch.bfloat16))),
        GuardDriftError,
        "step settings",
        "pytorch/pytorch#61880",
    ),
    Hazard(
        "loss_exchanged",
        "the loss function is exchanged",
        stage(before=at(6, lambda t: setattr(t.step, "loss_fn", lambda model, batch: classify(model, batch) * 2))),
        GuardDriftError,
        "step settings",
        "pytorch/pytorch#114844",
    ),
)
