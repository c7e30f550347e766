"""What may happen to a training run between two steps: the things that a state machine does to both twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.training import Trainer


@dataclass(frozen=True)
class Change:
    """One thing that may happen.

    Attributes:
        name: for counts.
        act: does it to a trainer, given two small numbers that choose where and how.
        survives_resume: a fresh instance that loads the stored state is as if it had happened to it.
    """

    name: str
    act: Callable[[Trainer, int, int], object]
    survives_resume: bool = False

    def __repr__(self) -> str:
        """Name it, for examples that Hypothesis prints."""
        return self.name


def _edit(trainer: Trainer, which: int, way: int) -> None:
    tensors = [tensor for tensor in trainer.step.tensors().values() if tensor.is_floating_point()]
    with torch.no_grad():
        _chosen(tensors, which).mul_((0.5, 1.0, -1.0)[way])


def _assign_data(trainer: Trainer, which: int, way: int) -> None:
    _, parameter = _chosen(list(trainer.step.model.named_parameters()), which)
    parameter.data = parameter.data.clone()


def _replace(trainer: Trainer, which: int, way: int) -> None:
    name, parameter = _chosen(list(trainer.step.model.named_parameters()), which)
    owner, _, key = name.rpartition(".")
    setattr(trainer.step.model.get_submodule(owner), key, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))


def _hook(trainer: Trainer, which: int, way: int) -> None:
    factor = (2.0, 0.5, 1.0)[way]
    leaves = [module for module in trainer.step.model.modules() if not list(module.children())]
    _chosen(leaves, which).register_forward_hook(lambda module, args, out: _scaled(out, factor))


def _unhook(trainer: Trainer, which: int, way: int) -> None:
    for module in trainer.step.model.modules():
        if module._forward_hooks:
            module._forward_hooks.popitem()
            return


def _rate_in_place(trainer: Trainer, which: int, way: int) -> None:
    for group in trainer.step.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_((1e-3, 1e-2, 0.0)[way])


def _rate_as_number(trainer: Trainer, which: int, way: int) -> None:
    trainer.step.optimizer.param_groups[0]["lr"] = (1e-3, 1e-2, 1e-4)[way]


def _decay(trainer: Trainer, which: int, way: int) -> None:
    trainer.step.optimizer.param_groups[0]["weight_decay"] = (0.0, 0.1, 0.2)[way]


def _training(trainer: Trainer, which: int, way: int) -> None:
    _chosen(list(trainer.step.model.modules()), which).train(way > 0)


def _number_of_module(trainer: Trainer, which: int, way: int) -> None:
    """Another rate of a dropout, another eps of a norm."""
    numbered = [module for module in trainer.step.model.modules() if isinstance(getattr(module, "p", getattr(module, "eps", None)), float)]
    if numbered:
        module: Any = _chosen(numbered, which)
        setattr(module, "p" if hasattr(module, "p") else "eps", (0.1, 0.2, 0.5)[way])


def _freeze(trainer: Trainer, which: int, way: int) -> None:
    """The first parameter stays as it is, so that something is trained."""
    parameters = list(trainer.step.model.parameters())[1:]
    if parameters:
        parameter = _chosen(parameters, which)
        parameter.requires_grad_(not parameter.requires_grad)


def _zero(trainer: Trainer, which: int, way: int) -> None:
    trainer.step.optimizer.zero_grad(set_to_none=way > 0)


def _reload(trainer: Trainer, which: int, way: int) -> None:
    trainer.step.optimizer.load_state_dict(trainer.step.optimizer.state_dict())


def _load_weights(trainer: Trainer, which: int, way: int) -> None:
    state = {key: value.detach().clone() for key, value in trainer.step.model.state_dict().items()}
    trainer.step.model.load_state_dict(state, assign=way > 1)


def _forget(trainer: Trainer, which: int, way: int) -> None:
    if which % 4 == 0:  # seldom, or nothing would ever be replayed
        trainer.forget_plans()


CHANGES: Sequence[Change] = (
    Change("edit in place", _edit, True),
    Change("assign data", _assign_data, True),
    Change("replace a parameter", _replace),
    Change("add a hook", _hook),
    Change("remove a hook", _unhook),
    Change("set a rate in place", _rate_in_place, True),
    Change("set a rate to a number", _rate_as_number),
    Change("set the decay", _decay, True),
    Change("train or eval", _training),
    Change("set a number of a module", _number_of_module),
    Change("freeze or thaw", _freeze),
    Change("zero gradients", _zero, True),
    Change("reload the optimizer", _reload, True),
    Change("load weights", _load_weights),
    Change("forget plans", _forget, True),
)


def _chosen(items: Sequence[Any], which: int) -> Any:
    return items[which % len(items)]


def _scaled(out: Any, factor: float) -> Any:
    return out * factor if isinstance(out, Tensor) and out.is_floating_point() else out
