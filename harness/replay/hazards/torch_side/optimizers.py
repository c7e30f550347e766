"""Hazards of optimizers: what they read from the device, what they keep as Python numbers, and what they do beside a step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from compressor.errors import EscapedTensorError, GuardDriftError, UserInputError
from compressor.training import Trainer, TrainStep, WeightAverages, adamw, sgd
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import Net, classify, stage
from harness.replay.hazards.registry import Hazard

optim = torch.optim


class _Counting(Optimizer):
    """Divides its rate by a Python number of steps."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1, capturable: bool = False) -> None:
        super().__init__(params, {"lr": lr, "capturable": capturable})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move along the gradient."""
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / self.num_steps)


class _Rare(_Counting):
    """Acts otherwise at every tenth step, as Shampoo and SOAP renew their bases."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move along the gradient, or along its sign."""
        self.num_steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad if self.num_steps % 10 else parameter.grad.sign(), alpha=-0.1)


class _Replacing(_Counting):
    """Keeps its momentum by assignment."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Replace the state instead of writing it."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(parameter)) + parameter.grad
            parameter.sub_(0.05 * state["momentum"])


class _Muon(_Counting):
    """Orthogonalizes a momentum by Newton's iteration."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move along the orthogonalized momentum."""
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 0.1)
            update = momentum if momentum.dim() < 2 else _orthogonal(momentum)
            parameter.sub_(update, alpha=0.05)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def _beside() -> Subject:
    """A temperature that is trained, and that the model does not hold."""
    model, temperature = Net(), nn.Parameter(torch.ones(()))

    def loss_fn(module: nn.Module, batch: Any) -> torch.Tensor:
        return classify(module, batch) * temperature.exp()

    return Subject(TrainStep(model, loss_fn, adamw([*model.parameters(), temperature])))


def _two_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    weights: list[nn.Parameter] = []
    biases: list[nn.Parameter] = []
    for parameter in parameters:
        (weights if parameter.dim() > 1 else biases).append(parameter)
    return adamw(
        [
            {"params": weights, "weight_decay": 0.1, "lr": torch.tensor(1e-2)},
            {"params": biases, "weight_decay": 0.0, "lr": torch.tensor(1e-3)},
        ]
    )


def _averaged() -> Subject:
    model = Net()
    return Subject(TrainStep(model, classify, adamw(model.parameters()), averages=WeightAverages(model, 0.9), accumulate=2, clip_norm=0.5))


def _pairs(number: int) -> list[Any]:
    from harness.replay.hazards.building_blocks import vectors

    return [vectors(2 * number), vectors(2 * number + 1)]


def _scheduled() -> Subject:
    from compressor.training import warmup_cosine

    model = Net()
    return Subject(Trainer(TrainStep(model, classify, adamw(model.parameters())), schedule=warmup_cosine(3, 30)))


def _plain(make: Any, **settings: Any) -> Any:
    return stage(optimizer=lambda parameters: make(parameters, **settings))


_LR, _LIST = "pytorch/pytorch#106802", "pytorch/pytorch#118018"
_tensor_rate = partial(torch.tensor, 1e-2)
HAZARDS: tuple[Hazard, ...] = (
    Hazard("adamw", "AdamW of this package", _plain(adamw, lr=1e-2, weight_decay=0.1), source="pytorch/pytorch#77862"),
    Hazard(
        "adam_fused",
        "fused Adam of torch, with a rate in a tensor",
        _plain(optim.Adam, lr=_tensor_rate(), fused=True),
        source="pytorch/pytorch#77862",
    ),
    Hazard(
        "adamw_amsgrad",
        "fused AdamW with amsgrad",
        _plain(optim.AdamW, lr=_tensor_rate(), fused=True, amsgrad=True),
        source="pytorch/pytorch#77862",
    ),
    Hazard(
        "adamw_plain",
        "AdamW of torch as it comes, which reads its step count",
        _plain(optim.AdamW, lr=1e-2),
        source="pytorch/pytorch#76368",
    ),
    Hazard(
        "adamw_loop",
        "AdamW one parameter after another",
        _plain(optim.AdamW, lr=1e-2, foreach=False),
        source="pytorch/pytorch#76368",
    ),
    Hazard("adafactor", "Adafactor of torch as it comes", _plain(optim.Adafactor), source="pytorch/pytorch#76368"),
    Hazard("sgd", "SGD with a constant rate", _plain(optim.SGD, lr=1e-2), source="tracel-ai/burn#5779"),
    Hazard(
        "sgd_momentum",
        "SGD with momentum, one parameter after another",
        _plain(optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
        source="tracel-ai/burn#5779",
    ),
    Hazard(
        "sgd_nesterov",
        "fused SGD with Nesterov momentum and decay",
        _plain(sgd, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
        source="tracel-ai/burn#5779",
    ),
    Hazard(
        "sgd_dampening",
        "foreach SGD with dampening, maximizing",
        _plain(optim.SGD, lr=1e-3, momentum=0.9, dampening=0.1, foreach=True, maximize=True),
        source="tracel-ai/burn#5779",
    ),
    Hazard(
        "rate_tensor_unfused",
        "a rate in a tensor, which plain SGD reads",
        _plain(optim.SGD, lr=_tensor_rate(), foreach=False),
        source=_LR,
    ),
    Hazard("adagrad", "Adagrad, which reads its step count", _plain(optim.Adagrad, lr=1e-2, foreach=False), source=_LIST),
    Hazard("rmsprop", "RMSprop", _plain(optim.RMSprop, lr=1e-3, foreach=False, momentum=0.9), source=_LIST),
    Hazard("adadelta", "Adadelta", _plain(optim.Adadelta, foreach=False), source=_LIST),
    Hazard("radam", "RAdam, which decides by its step count", _plain(optim.RAdam, lr=1e-2, foreach=False), source=_LIST),
    Hazard("lbfgs", "LBFGS, which calls the loss itself", _plain(optim.LBFGS), UserInputError, "closure", _LIST),
    Hazard("own_counter", "an optimizer that divides by a Python number of steps", _plain(_Counting), source="tracel-ai/burn#5779"),
    Hazard(
        "own_rare",
        "an optimizer that acts otherwise at every tenth step",
        _plain(_Rare),
        source="compressor/training/README.md: what follows the step index",
        steps=13,
    ),
    Hazard("own_replacing", "an optimizer that replaces its state", _plain(_Replacing), source="pytorch/pytorch#70444"),
    Hazard(
        "promised_counter",
        "an optimizer that says it is capturable and divides by a Python number of steps",
        _plain(_Counting, capturable=True),
        GuardDriftError,
        "num_steps",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "promised_rare",
        "an optimizer that says it is capturable and acts otherwise at every tenth step",
        _plain(_Rare, capturable=True),
        GuardDriftError,
        "num_steps",
        "compressor/training/README.md: what follows the step index",
        steps=13,
    ),
    Hazard(
        "promised_replacing",
        "an optimizer that says it is capturable and replaces its state",
        _plain(_Replacing, capturable=True),
        EscapedTensorError,
        "opt.momentum",
        "pytorch/pytorch#70444",
        may_leave=("opt.",),
    ),
    Hazard("own_muon", "an optimizer that orthogonalizes its momentum", _plain(_Muon, capturable=True), source="microsoft/dion#104"),
    Hazard("two_groups", "two groups with rates and decays of their own", stage(optimizer=_two_groups), source=_LR),
    Hazard("beside_the_model", "a trained temperature that the model does not hold", _beside, source="deepmodeling/deepmd-kit#6001"),
    Hazard(
        "accumulation", "two micro-batches, clipping and averages of weights", _averaged, source="pytorch/pytorch#169545", batches=_pairs
    ),
    Hazard("schedule", "warm-up and cosine of the trainer", _scheduled, source=_LR),
)
