"""Hazards of Python's own variables: numbers in globals, dicts, configs, classes and closures, and modules beside the model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import GuardDriftError
from compressor.training import Trainer, TrainStep
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import Net, at, classify, default_optimizer, stage
from harness.replay.hazards.registry import Hazard


def _model(trainer: Trainer) -> Any:
    return trainer.step.model


def _hook_closure() -> Subject:
    box = {"scale": 1.0}
    model = Net()
    model.first.register_forward_hook(lambda module, args, out: out * box["scale"])
    step = TrainStep(model, classify, default_optimizer(model.parameters()))
    return Subject(step, at(6, lambda trainer: box.__setitem__("scale", 2.0)))


def _patched_method(trainer: Trainer) -> None:
    type(_model(trainer)).middle = lambda self, h: h * 2


def _patched_instance(trainer: Trainer) -> None:
    _model(trainer).last.forward = lambda x: nn.functional.linear(x, _model(trainer).last.weight) * 2


_FLAG = {"factor": 1.0}
_NUMBER = 1.0


def _global_number(module: Any, h: Tensor) -> Tensor:
    return h * _NUMBER


def _global_dict(module: Any, h: Tensor) -> Tensor:
    return h * _FLAG["factor"]


def _change_global(number: int, trainer: Trainer) -> None:
    global _NUMBER
    _NUMBER = 2.0 if number >= 6 else 1.0


def _change_dict(number: int, trainer: Trainer) -> None:
    _FLAG["factor"] = 2.0 if number >= 6 else 1.0


def _config(module: Any) -> None:
    class Config:
        def __init__(self) -> None:
            self.factor = 1.0

    module.config = Config()


def _class_number() -> Subject:
    class Scaled(Net):
        factor = 1.0

        def middle(self, h: Tensor) -> Tensor:
            return h * self.factor

    model = Scaled()
    return Subject(TrainStep(model, classify, default_optimizer(model.parameters())), at(6, lambda trainer: setattr(Scaled, "factor", 2.0)))


class _Runner:
    """An object whose method is the loss function, as trainers of other libraries are."""

    def __init__(self) -> None:
        self.factor, self.num_epochs = 1.0, 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * self.factor


def _bound_method(attribute: str) -> Subject:
    runner, model = _Runner(), Net()

    def change(number: int, trainer: Trainer) -> None:
        setattr(runner, attribute, float(number >= 6) + 1)

    return Subject(TrainStep(model, runner.loss, default_optimizer(model.parameters())), change)


def _teacher(change: Any) -> Subject:
    teacher, model = Net(), Net()
    teacher.drop.p = 0.5

    def loss_fn(student: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch["x"])
        return classify(student, batch) + (student(batch["x"]) - target).square().mean()

    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())), at(6, lambda trainer: change(teacher)))


def _bend(teacher: Any) -> None:
    teacher.last.weight = nn.Parameter(torch.zeros(4, 16))


def _boxed(depth: str) -> Subject:
    """A tensor in an object that the loss function reaches."""

    class Box:
        factor = torch.ones(())

    box = Box()
    holder = {"dict": {"box": box}, "attribute": box}[depth]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        found: Any = holder["box"] if isinstance(holder, dict) else holder
        return classify(model, batch) * found.factor

    def swap(number: int, trainer: Trainer) -> None:
        if number == 6:
            box.factor = torch.full((), 2.0)

    model = Net()
    return Subject(TrainStep(model, loss_fn, default_optimizer(model.parameters())), swap)


_DROPOUT = "pytorch/pytorch#84614"
HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "hook_reads_dict",
        "a number in a dict that a hook reads is changed",
        _hook_closure,
        GuardDriftError,
        "box",
        "NVIDIA/TransformerEngine#2831",
    ),
    Hazard(
        "patched_class",
        "a method of the model's class is patched",
        stage(lambda m, h: h, before=at(6, _patched_method)),
        GuardDriftError,
        "middle",
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "patched_instance",
        "forward of one layer is patched",
        stage(before=at(6, _patched_instance)),
        GuardDriftError,
        "module last was forward=",
        "NVIDIA/TransformerEngine#2831",
    ),
    Hazard(
        "global_number",
        "a global number that forward reads is changed",
        stage(_global_number, before=_change_global),
        GuardDriftError,
        "_NUMBER",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "global_dict",
        "a number in a global dict that forward reads is changed",
        stage(_global_dict, before=_change_dict),
        GuardDriftError,
        "_FLAG",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "config_changed",
        "a number in the model's config is changed",
        stage(lambda m, h: h * m.config.factor, prepare=_config, before=at(6, lambda t: setattr(_model(t).config, "factor", 2.0))),
        GuardDriftError,
        "attribute 'config' of the model",
        "tracel-ai/burn#5779",
    ),
    Hazard("class_number", "a number of the model's class is changed", _class_number, GuardDriftError, "factor", "tracel-ai/burn#5779"),
    Hazard(
        "object_of_loss",
        "a number of the object whose method is the loss",
        lambda: _bound_method("factor"),
        GuardDriftError,
        "'factor'",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "object_beside_loss",
        "another number of that object, which the loss never reads",
        lambda: _bound_method("num_epochs"),
        source="tracel-ai/burn#5779",
    ),
    Hazard(
        "teacher_eval",
        "a teacher that the loss closes over goes to eval",
        lambda: _teacher(lambda teacher: teacher.eval()),
        GuardDriftError,
        "teacher",
        _DROPOUT,
    ),
    Hazard(
        "teacher_replaced",
        "a weight of the teacher is replaced",
        lambda: _teacher(_bend),
        GuardDriftError,
        "teacher",
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "teacher_in_place",
        "a weight of the teacher is written in place",
        lambda: _teacher(lambda teacher: teacher.last.weight.data.mul_(0.5)),
        source="pytorch/pytorch#114844",
    ),
    Hazard(
        "swapped_in_dict",
        "a tensor in an object in a dict that the loss function closes over is exchanged",
        functools.partial(_boxed, "dict"),
        GuardDriftError,
        "box",
        "pytorch/pytorch#114844",
    ),
    Hazard(
        "swapped_in_object",
        "a tensor in an object that the loss function closes over is exchanged",
        functools.partial(_boxed, "attribute"),
        GuardDriftError,
        "holder",
        "pytorch/pytorch#114844",
    ),
)
