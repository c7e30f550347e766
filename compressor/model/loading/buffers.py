"""Models without weights whose computed buffers are those of a model that was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Register parameters on the meta device, so that their memory is given back at once; buffers, which are computed, stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def recompute_buffers(model: nn.Module) -> None:
    """Compute the buffers that no file holds as `from_pretrained` does: once more, in float32, whatever dtype the model was made in.

    A class whose constructor computes a table in torch's default dtype (GPT-J, CodeGen) has it rounded where it is made in half precision.

    Args:
        model: made under `parameters_on_meta`, weights not yet filled in; its computed buffers are changed.
    """
    with torch.no_grad():
        for owner, module in _initialized_by(model, None):
            if module._non_persistent_buffers_set:
                kept = {key: value for key, value in module._buffers.items() if key not in module._non_persistent_buffers_set}
                held = {key: value.clone() for key, value in kept.items() if value is not None and not value.is_meta}
                owner._init_weights(module)
                for key, value in held.items():
                    module._buffers[key] = value


def _initialized_by(module: nn.Module, owner: nn.Module | None) -> Iterator[tuple[Any, nn.Module]]:
    """Each module below a model of transformers, with the innermost one, which initializes it."""
    from transformers import PreTrainedModel

    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        yield from _initialized_by(child, owner)
    if owner is not None:
        yield owner, module
