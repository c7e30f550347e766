"""Hazards of addresses: a plan writes to storages, and somebody gives a parameter, a gradient or a state another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compressor.errors import PointerDriftError
from compressor.training import Trainer
from harness.replay.hazards.building_blocks import at, stage
from harness.replay.hazards.registry import Hazard

_DRIFT = "lies elsewhere since the capture"


def _model(trainer: Trainer) -> Any:
    return trainer.step.model


def _replace_parameter(trainer: Trainer) -> None:
    last = _model(trainer).last
    last.weight = nn.Parameter(last.weight.detach().clone())


def _assign_data(trainer: Trainer) -> None:
    weight = _model(trainer).last.weight
    weight.data = weight.data * 1.01


def _assign_same_data(trainer: Trainer) -> None:
    weight = _model(trainer).last.weight
    weight.data = weight.data.clone()


def _swap_module(trainer: Trainer) -> None:
    _model(trainer).last = nn.Linear(16, 4)


def _load_state(trainer: Trainer) -> None:
    model = _model(trainer)
    model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})


def _load_state_assigning(trainer: Trainer) -> None:
    model = _model(trainer)
    model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()}, assign=True)


def _add_group(trainer: Trainer) -> None:
    model = _model(trainer)
    model.extra = nn.Parameter(torch.ones(4))
    trainer.step.optimizer.add_param_group({"params": [model.extra], "lr": torch.tensor(0.1)})


def _reload_and_forget(trainer: Trainer) -> None:
    trainer.step.optimizer.load_state_dict(trainer.step.optimizer.state_dict())
    trainer.forget_plans()


def _edit_in_place(trainer: Trainer) -> None:
    with torch.no_grad():
        for tensor in trainer.step.tensors().values():
            if tensor.is_floating_point():
                tensor.mul_(0.5)


def _tie(trainer: Trainer) -> None:
    _model(trainer).last.bias = nn.Parameter(torch.zeros(4))


def _new_gradient(trainer: Trainer) -> None:
    for parameter in _model(trainer).parameters():
        parameter.grad = torch.zeros_like(parameter)


def _resize_buffer(trainer: Trainer) -> None:
    _model(trainer).memory = torch.zeros(3)


def _clear_state(trainer: Trainer) -> None:
    trainer.step.optimizer.state.clear()


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "parameter_replaced",
        "a parameter is replaced by an equal one",
        stage(before=at(6, _replace_parameter)),
        PointerDriftError,
        "param:last.weight: it " + _DRIFT,
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "data_assigned",
        "parameter.data = other values",
        stage(before=at(6, _assign_data)),
        PointerDriftError,
        "param:last.weight: it " + _DRIFT,
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "same_data_assigned",
        "parameter.data = an equal copy, as offloading does",
        stage(before=at(6, _assign_same_data)),
        PointerDriftError,
        "param:last.weight: it " + _DRIFT,
        "huggingface/accelerate: big modeling",
    ),
    Hazard(
        "module_swapped",
        "a layer is exchanged",
        stage(before=at(6, _swap_module)),
        PointerDriftError,
        "param:last.weight: it " + _DRIFT,
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "bias_exchanged",
        "a bias is exchanged for a new parameter",
        stage(before=at(6, _tie)),
        PointerDriftError,
        "param:last.bias: it " + _DRIFT,
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "gradients_none",
        "zero_grad(set_to_none=True) between steps",
        stage(before=at(6, lambda t: t.step.optimizer.zero_grad(set_to_none=True))),
        source="pytorch/torchtitan#4659",
    ),
    Hazard(
        "gradients_new",
        "gradients are assigned anew",
        stage(before=at(6, _new_gradient)),
        PointerDriftError,
        "grad:first.weight: it " + _DRIFT,
        "NVIDIA/TransformerEngine#2937",
    ),
    Hazard(
        "gradients_zeroed",
        "zero_grad(set_to_none=False) between steps",
        stage(before=at(6, lambda t: t.step.optimizer.zero_grad(set_to_none=False))),
        source="pytorch/torchtitan#4659",
    ),
    Hazard(
        "optimizer_loaded",
        "the optimizer's own state is loaded back",
        stage(before=at(6, lambda t: t.step.optimizer.load_state_dict(t.step.optimizer.state_dict()))),
        PointerDriftError,
        "lies elsewhere",
        "pytorch/pytorch#106802",
    ),
    Hazard(
        "optimizer_loaded_and_forgotten",
        "the same, and forget_plans()",
        stage(before=at(6, _reload_and_forget)),
        source="pytorch/pytorch#106802",
        steps=14,
    ),
    Hazard(
        "optimizer_cleared",
        "the state of the optimizer is dropped",
        stage(before=at(6, _clear_state)),
        PointerDriftError,
        "is gone since the capture",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "group_added",
        "a parameter and a group come to the optimizer",
        stage(before=at(6, _add_group)),
        PointerDriftError,
        "param:extra: it is new",
        "deepmodeling/deepmd-kit#6001",
    ),
    Hazard(
        "weights_loaded", "load_state_dict of the model, which copies", stage(before=at(6, _load_state)), source="pytorch/pytorch#114844"
    ),
    Hazard(
        "weights_assigned",
        "load_state_dict(assign=True)",
        stage(before=at(6, _load_state_assigning)),
        PointerDriftError,
        _DRIFT,
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "model_to_dtype",
        "model.to(float64), with batches of the new dtype: a new plan",
        stage(optimizer=lambda p: torch.optim.SGD(p, lr=0.01), before=at(6, lambda t: t.step.model.to(torch.float64))),
        source="pytorch/pytorch#114844",
        batches=lambda number: _doubled(number),
        steps=14,
    ),
    Hazard(
        "model_to_dtype_alone",
        "model.to(float64), while autocast hides it from the batch",
        stage(
            before=at(6, lambda t: t.step.model.to(torch.bfloat16)),
            step={"autocast": torch.bfloat16},
            optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        ),
        PointerDriftError,
        _DRIFT,
        "pytorch/pytorch#114844",
    ),
    Hazard("edited_in_place", "all state is halved in place", stage(before=at(6, _edit_in_place)), source="pytorch/pytorch#114844"),
    Hazard(
        "buffer_exchanged",
        "a buffer is exchanged between steps",
        stage(prepare=lambda m: m.register_buffer("memory", torch.zeros(3)), before=at(6, _resize_buffer)),
        PointerDriftError,
        "buffer:memory: it " + _DRIFT,
        "pytorch/pytorch#70444",
    ),
    Hazard(
        "buffer_added",
        "a buffer comes between steps",
        stage(before=at(6, lambda t: t.step.model.register_buffer("late", torch.zeros(3)))),
        PointerDriftError,
        "buffer:late: it is new",
        "pytorch/pytorch#70444",
    ),
    Hazard(
        "average_exchanged",
        "a state of the optimizer is exchanged for an equal one",
        stage(before=at(6, lambda t: _clone_first_state(t))),
        PointerDriftError,
        "opt.exp_avg",
        "tracel-ai/burn#5779",
    ),
)


def _doubled(number: int) -> dict[str, torch.Tensor]:
    from harness.replay.hazards.building_blocks import vectors

    batch = vectors(number)
    return batch if number < 6 else batch | {"x": batch["x"].double()}


def _clone_first_state(trainer: Trainer) -> None:
    state = next(iter(trainer.step.optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].clone()
