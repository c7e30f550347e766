"""Hazards of control flow: Python decides, and a replay runs no Python."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import GuardDriftError, HostReadError, ProofError, SignatureDriftError
from compressor.training import Trainer, TrainStep
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import Net, classify, default_optimizer, stage
from harness.replay.hazards.registry import Hazard


def _count(module: Any, h: Tensor) -> Tensor:
    module.calls += 1
    return h * (2.0 if module.calls % 10 == 0 else 1.0)


def _counted(module: Any) -> None:
    module.calls = 0
    module.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
    module.flip = False


def _parity(module: Any, h: Tensor) -> Tensor:
    return h if module.calls % 2 else -h


def _set_calls(number: int, trainer: Trainer) -> None:
    trainer.step.model.calls = number  # type: ignore[assignment]


def _layer_drop(module: Any, h: Tensor) -> Tensor:
    for layer in module.layers[: 1 + module.calls % 3]:
        h = layer(h)
    return h


def _tenth(number: list[int]) -> float:
    number[0] += 1
    return 2.0 if number[0] % 10 == 0 else 1.0


def _counter_in_closure() -> Subject:
    steps = [0]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * _tenth(steps)

    model = Net()
    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())))


def _generator_of_numbers() -> Subject:
    factors = iter(range(1, 1000))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * next(factors)

    model = Net()
    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())))


def _rare_generator() -> Subject:
    """An iterator that gives the same number until long after the proof."""
    factors = iter([1.0] * 8 + [2.0] * 100)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * next(factors)

    model = Net()
    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())))


def _capturing(module: Any, h: Tensor) -> Tensor:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return h * 2 if _get_current_dispatch_mode() is not None else h


def _stepped_in_hook() -> Subject:
    model = Net()
    seen: dict[str, int] = {"calls": 0}

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen["calls"] += 1
        return out * 2 if seen["calls"] % 10 == 0 else out

    model.first.register_forward_hook(hook)
    return Subject(TrainStep(model, classify, default_optimizer(model.parameters())))


def _optimizer_hook() -> Subject:
    model = Net()
    optimizer = default_optimizer(model.parameters())
    calls = [0]

    def post(*given: Any) -> None:
        calls[0] += 1
        if calls[0] % 7 == 0:
            with torch.no_grad():
                model.last.weight.mul_(0.9)

    optimizer.register_step_post_hook(post)
    return Subject(TrainStep(model, classify, optimizer))


def _warmed(module: Any, h: Tensor) -> Tensor:
    """Skips its loss term in the first steps, as curricula do."""
    return h + torch.where(module.seen.add_(1) > 4, h, torch.zeros_like(h))


def _number_in_memory() -> Subject:
    """A number in raw memory, where no guard can look."""
    box, model = ctypes.c_double(1.0), Net()

    def loss_fn(module: nn.Module, batch: Any) -> Tensor:
        return classify(module, batch) * box.value

    def change(number: int, trainer: Trainer) -> None:
        box.value = 1.0 + number

    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())), change)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "number_in_memory",
        "a number where no guard can look changes before every step",
        _number_in_memory,
        SignatureDriftError,
        "only a Python number differs",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "counter",
        "a module counts its calls and acts at every tenth",
        stage(_count, prepare=_counted),
        GuardDriftError,
        "the step changes the host: module model was calls=",
        "compressor/training/README.md: what follows the step index",
        may_leave=("attribute:calls",),
    ),
    Hazard(
        "counter_in_closure",
        "the loss function counts and acts at every tenth",
        _counter_in_closure,
        GuardDriftError,
        "the step changes the host",
        "compressor/training/README.md: what follows the step index",
    ),
    Hazard(
        "counter_in_hook",
        "a hook counts and acts at every tenth call",
        _stepped_in_hook,
        GuardDriftError,
        "the step changes the host",
        "NVIDIA/TransformerEngine#2831",
    ),
    Hazard(
        "counter_in_optimizer_hook",
        "a hook of the optimizer acts at every seventh step",
        _optimizer_hook,
        GuardDriftError,
        "the step changes the host",
        "compressor/training/README.md: what follows the step index",
    ),
    Hazard(
        "parity",
        "another branch in odd steps; the loop sets the number",
        stage(_parity, prepare=_counted, before=_set_calls),
        GuardDriftError,
        "module model was calls=",
        "pytorch/pytorch#63269",
    ),
    Hazard(
        "number_of_layers",
        "fewer layers in some steps",
        stage(_layer_drop, prepare=_counted, before=_set_calls),
        SignatureDriftError,
        "no step of the warm-up reached",
        "huggingface/transformers: layerdrop",
    ),
    Hazard(
        "data_branch",
        "a branch on data",
        stage(lambda m, h: h if bool((h > 0).any()) else -h),
        HostReadError,
        "reads a tensor",
        "pytorch/pytorch#63269",
    ),
    Hazard(
        "early_exit",
        "layers run until a norm is small",
        stage(lambda m, h: next((x for x in (h, h * 0.5) if x.norm() < 1), h)),
        HostReadError,
        "reads a tensor",
        "pytorch/pytorch#63269",
    ),
    Hazard(
        "iterator",
        "numbers come from an iterator",
        _generator_of_numbers,
        GuardDriftError,
        "variable 'factors' that loss_fn closes over: it is an iterator",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "rare_iterator",
        "numbers come from an iterator, and change long after the proof",
        _rare_generator,
        GuardDriftError,
        "variable 'factors' that loss_fn closes over: it is an iterator",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "asks_for_capture",
        "code that runs otherwise while it is watched, as transformers does",
        stage(_capturing),
        ProofError,
        "the recorded step is not the eager one",
        "huggingface/transformers: is_tracing",
    ),
    Hazard(
        "counter_tensor",
        "a counter in a buffer, and torch.where",
        stage(_warmed, prepare=lambda m: m.register_buffer("seen", torch.zeros((), dtype=torch.int64))),
        source="pytorch/pytorch#70444",
    ),
)
