"""The state a model is in while somebody looks at what it computes: evaluation mode, no growing caches; undone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and key/value caches off for the duration. Changes the model.

    Args:
        model: whose modules may be replaced meanwhile; a new one gets the training flag of the one before it.

    Yields:
        Nothing.
    """
    training = {name: module.training for name, module in model.named_modules()}
    caching = [config for config in _configs(model) if getattr(config, "use_cache", False)]
    try:
        model.eval()
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True
        for name, module in model.named_modules():  # by name: a module that has been replaced follows the one it replaced
            if name in training:
                module.training = training[name]


def _configs(model: nn.Module) -> list[Any]:
    """All configurations in a model; parts of a model (encoder, decoder, language model) may have their own."""
    configs = [module.__dict__["config"] for module in model.modules() if "config" in module.__dict__]
    return list({id(config): config for config in configs}.values())
