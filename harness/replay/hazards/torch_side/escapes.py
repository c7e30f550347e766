"""Hazards of tensors that leave the step: kept by a module, collected in a list, exchanged from outside."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, cross_entropy

from compressor.errors import EscapedTensorError, GuardDriftError, ReplayError
from compressor.training import Trainer, TrainStep
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import Net, at, classify, default_optimizer, stage
from harness.replay.hazards.registry import Hazard

_OVERWRITTEN = "pytorch/pytorch#144386"


def _keep(module: Any, h: Tensor) -> Tensor:
    module.kept = h.detach()
    return h


def _keep_in_list(module: Any, h: Tensor) -> Tensor:
    module.seen.append(h.detach())
    return h


def _replace_buffer(module: Any, h: Tensor) -> Tensor:
    module.scale = module.scale * 1.01
    return h * module.scale


def _count_by_replacing(module: Any, h: Tensor) -> Tensor:
    module.calls = module.calls + 1
    return h / module.calls


def _move_buffer(module: Any, h: Tensor) -> Tensor:
    return h * module.scale.mul_(1.01)


def _scale(module: Any) -> None:
    module.register_buffer("scale", torch.ones(()))
    module.register_buffer("calls", torch.zeros(()))
    module.seen = []


def _plain_attribute(module: Any) -> None:
    module.factor = torch.ones(())  # a tensor that is no buffer


def _collected() -> Subject:
    losses: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        losses.append(loss.detach())
        return loss

    model = Net()
    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())))


def _closure() -> Subject:
    factor = torch.ones(())

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * factor

    def swap(number: int, trainer: Trainer) -> None:
        nonlocal factor
        if number == 6:
            factor = torch.full((), 2.0)

    model = Net()
    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())), swap)


def _closure_in_place(first: int) -> Subject:
    factor = torch.ones(())

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * factor

    def fill(number: int, trainer: Trainer) -> None:
        factor.fill_(1.0 + max(0, number - first))

    model = Net()
    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())), fill)


def _cached() -> Subject:
    @functools.lru_cache(maxsize=2)
    def mask(rows: int) -> Tensor:
        return torch.linspace(0.5, 1.5, rows)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return (cross_entropy(model(batch["x"]), batch["y"], reduction="none") * mask(len(batch["y"]))).mean()

    model = Net()
    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())))


def _cached_first_in_capture() -> Subject:
    cache: dict[str, Tensor] = {}
    model = Net()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if "weights" not in cache:
            cache["weights"] = torch.linspace(0.5, 1.5, len(batch["y"])) * model.get_parameter("last.bias").detach().sum().exp()
        return (cross_entropy(model(batch["x"]), batch["y"], reduction="none") * cache["weights"]).mean()

    return Subject(
        TrainStep(model, loss_fn, default_optimizer(model.parameters())), lambda number, trainer: cache.clear() if number == 2 else None
    )


def _previous_activation(module: Any, h: Tensor) -> Tensor:
    module.previous = h.detach() if module.previous is None else 0.5 * (h.detach() + module.previous)
    return h + module.previous


def _ring(module: Any, h: Tensor) -> Tensor:
    result = h + module.memory
    module.memory.copy_(h.detach())
    return result


_OUTSIDE = torch.zeros(4)


def _write_outside(module: Any, h: Tensor) -> Tensor:
    return h + _OUTSIDE.add_(1).sum() * 0


def _statistics(module: Any) -> None:
    module.mean, module.var = torch.zeros(16), torch.ones(16)


def _resized(module: Any, h: Tensor) -> Tensor:
    room = torch.empty(0)
    room.resize_(h.shape).fill_(0.5)
    return h + room


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "loose_statistics",
        "batch norm with statistics that are no buffers, which its schema does not say it writes",
        stage(lambda m, h: batch_norm(h, m.mean, m.var, training=True), prepare=_statistics),
        EscapedTensorError,
        "writes to a tensor of [16]",
        "pytorch/pytorch#70444",
    ),
    Hazard("resized", "a tensor is resized in the step", stage(_resized), ReplayError, "changes a storage", "torch docs: Tensor.resize_"),
    Hazard(
        "kept_activation",
        "a module stores an activation",
        stage(_keep, prepare=lambda m: setattr(m, "kept", None)),
        EscapedTensorError,
        "attribute 'kept' of the model",
        "pytorch/pytorch#114844",
        may_leave=("attribute:kept",),
    ),
    Hazard(
        "kept_in_list",
        "a module appends activations to a list",
        stage(_keep_in_list, prepare=_scale),
        EscapedTensorError,
        "attribute 'seen' of the model",
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "previous_activation",
        "a module mixes in what it stored in the step before",
        stage(_previous_activation, prepare=lambda m: setattr(m, "previous", None)),
        EscapedTensorError,
        "attribute 'previous'",
        "pytorch/pytorch#114844",
        may_leave=("attribute:previous",),
    ),
    Hazard(
        "memory_in_buffer",
        "the same with copy_ into a buffer",
        stage(_ring, prepare=lambda m: m.register_buffer("memory", torch.zeros(6, 16))),
        source="pytorch/pytorch#114844",
    ),
    Hazard(
        "losses_in_list",
        "the loss function collects losses",
        _collected,
        EscapedTensorError,
        "variable 'losses' that loss_fn closes over",
        _OVERWRITTEN,
    ),
    Hazard(
        "replaced_buffer",
        "a buffer is replaced instead of written",
        stage(_replace_buffer, prepare=_scale),
        EscapedTensorError,
        "buffer:scale",
        "pytorch/pytorch#70444",
        may_leave=("buffer:scale",),
    ),
    Hazard(
        "replaced_counter",
        "num_batches_tracked = num_batches_tracked + 1, as batch norm once did",
        stage(_count_by_replacing, prepare=_scale),
        EscapedTensorError,
        "buffer:calls",
        "pytorch/pytorch#70444",
        may_leave=("buffer:calls",),
    ),
    Hazard("written_buffer", "a buffer is written in place", stage(_move_buffer, prepare=_scale), source="pytorch/pytorch#70444"),
    Hazard(
        "written_global",
        "a tensor of the module's file is written in place",
        stage(_write_outside),
        EscapedTensorError,
        "writes to a tensor of [4]",
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "written_attribute",
        "a tensor that is no buffer is written in place",
        stage(lambda m, h: h * m.factor.mul_(1.01), prepare=_plain_attribute),
        EscapedTensorError,
        "writes to a tensor",
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "swapped_closure",
        "a tensor that the loss function closes over is exchanged",
        _closure,
        GuardDriftError,
        "variable 'factor' that loss_fn closes over",
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "closure_every_step",
        "the same tensor is written in place before every step",
        functools.partial(_closure_in_place, 0),
        source="pytorch/pytorch#106802",
    ),
    Hazard(
        "closure_in_place",
        "the same tensor is written in place once a plan is in use",
        functools.partial(_closure_in_place, 5),
        source="pytorch/pytorch#106802",
    ),
    Hazard(
        "swapped_attribute",
        "a tensor that a module holds, no buffer, is exchanged",
        stage(
            lambda m, h: h * m.factor,
            prepare=_plain_attribute,
            before=at(6, lambda t: setattr(t.step.model, "factor", torch.full((), 2.0))),
        ),
        GuardDriftError,
        "factor",
        "pytorch/pytorch#114844",
    ),
    Hazard("cached_tensor", "a tensor from lru_cache, made in the first step", _cached, source=_OVERWRITTEN),
    Hazard(
        "cache_filled_in_capture",
        "a cache is emptied just before the capture, so that the eager step beside it fills it anew",
        _cached_first_in_capture,
        source=_OVERWRITTEN,
    ),
)
