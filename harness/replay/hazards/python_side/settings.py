"""Hazards of settings: where scripts keep numbers that a step reads, in modules, classes, arrays, the environment and partial functions."""

from __future__ import annotations

import functools
import os
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import prune

from compressor.errors import EscapedTensorError, GuardDriftError
from compressor.training import Trainer, TrainStep
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import Net, at, classify, default_optimizer, stage
from harness.replay.hazards.registry import Hazard


class _Settings:
    """Settings as attributes of a class, as many scripts keep them."""

    factor = 1.0


_SETTINGS = types.ModuleType("settings")
_SETTINGS.__dict__["factor"] = 1.0
_ARRAY = np.ones(2)


def _from_module(module: Any, h: Tensor) -> Tensor:
    return h * _SETTINGS.factor


def _from_class(module: Any, h: Tensor) -> Tensor:
    return h * _Settings.factor


def _from_array(module: Any, h: Tensor) -> Tensor:
    return h * float(_ARRAY[0])


def _from_environment(module: Any, h: Tensor) -> Tensor:
    return h * float(os.environ.get("HAZARD_FACTOR", "1"))


def _attention(module: Any, h: Tensor) -> Tensor:
    q = h.view(1, 6, 2, 8).transpose(1, 2)
    return scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(6, 16)


def _set_everywhere(number: int, trainer: Trainer) -> None:
    factor = 2.0 if number >= 6 else 1.0
    _SETTINGS.__dict__["factor"] = _Settings.factor = _ARRAY[0] = factor
    os.environ["HAZARD_FACTOR"] = str(factor)


def _partial() -> Subject:
    box, model = {"factor": 1.0}, Net()

    def loss_fn(scale: float, module: nn.Module, batch: Any) -> Tensor:
        return classify(module, batch) * box["factor"] * scale

    def change(number: int, trainer: Trainer) -> None:
        box["factor"] = 2.0 if number >= 6 else 1.0

    return Subject(TrainStep(model, functools.partial(loss_fn, 0.5), default_optimizer(model.parameters())), change)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "module_number",
        "a number of a module of settings that forward reads is changed",
        stage(_from_module, before=_set_everywhere),
        GuardDriftError,
        "'factor' of module settings",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "class_of_settings",
        "a number of a class of settings that forward reads is changed",
        stage(_from_class, before=_set_everywhere),
        GuardDriftError,
        "_Settings",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "array_in_place",
        "a numpy array that forward reads is written in place",
        stage(_from_array, before=_set_everywhere),
        GuardDriftError,
        "_ARRAY",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "environment",
        "a variable of the environment that forward reads is changed",
        stage(_from_environment, before=_set_everywhere),
        GuardDriftError,
        "environ",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "partial_loss",
        "the loss function is a partial one, and a dict that it closes over is changed",
        _partial,
        GuardDriftError,
        "box",
        "tracel-ai/burn#5779",
    ),
    Hazard(
        "attention_kernel",
        "flash attention is forbidden while a plan is in use",
        stage(_attention, before=at(6, lambda trainer: torch.backends.cuda.enable_flash_sdp(False))),
        GuardDriftError,
        "flash attention",
        "torch docs: scaled_dot_product_attention",
    ),
    Hazard(
        "mkldnn",
        "mkldnn is switched off while a plan is in use",
        stage(before=at(6, lambda trainer: torch.backends.mkldnn.set_flags(False))),
        GuardDriftError,
        "torch.backends.mkldnn.enabled",
        "torch docs: backends.mkldnn",
    ),
    Hazard(
        "pruned_by_torch",
        "torch.nn.utils.prune, whose hook makes the weight anew in every forward",
        stage(prepare=lambda module: prune.l1_unstructured(module.last, "weight", 0.3)),
        EscapedTensorError,
        "attribute 'weight' of last",
        "torch docs: nn.utils.prune",
        may_leave=("attribute:last.weight",),
    ),
)
