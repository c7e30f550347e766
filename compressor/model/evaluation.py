"""What must hold while somebody looks at what a model computes: evaluation mode, no growing caches, and no other dtypes around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import UserInputError


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


def packing_notes(model: nn.Module, batches: Iterable[Any]) -> list[str]:
    """Say where a forward without a cache computes something else than one with it.

    Args:
        model: outside of `evaluation_mode`.
        batches: of its data.

    Returns:
        A note for the report, where positions begin again and nobody masks. Most decoders of transformers make their masks of positions
        then, but not with a cache; OPT, encoders and linear attention never do.
    """
    if not any(getattr(config, "use_cache", False) for config in _configs(model)):
        return []
    unmasked = (batch.get("position_ids") for batch in batches if isinstance(batch, dict) and batch.get("attention_mask") is None)
    if not any(bool((positions.diff(dim=-1) < 0).any()) for positions in unmasked if isinstance(positions, Tensor)):
        return []
    return [
        "positions begin again within a sequence, and no attention_mask is given: without a cache, as here and in training, most decoders "
        "of transformers keep what is packed apart (OPT, encoders and linear attention do not), and with one (use_cache, the model's own "
        "setting) none does; give the mask that is meant"
    ]


def _configs(model: nn.Module) -> list[Any]:
    """All configurations in a model; parts of a model (encoder, decoder, language model) may have their own."""
    configs = [module.__dict__["config"] for module in model.modules() if "config" in module.__dict__]
    return list({id(config): config for config in configs}.values())


def check_dtypes_around(function: Callable[..., Any]) -> None:
    """Refuse to run under torch.autocast or another default dtype or device: forwards would compute otherwise than elsewhere.

    Args:
        function: that was called, for the error.

    Raises:
        UserInputError: autocast is on, for any kind of device, or torch.set_default_dtype() was called, or torch.set_default_device().
    """
    kind = next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None)
    if kind is not None:
        raise UserInputError(
            f"{function.__name__}: torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)}) is on around the call, and would compute "
            "forwards and statistics in another dtype than the model's; call it outside, and cast the model if that is meant"
        )
    if torch.get_default_dtype() != torch.float32:
        raise UserInputError(
            f"{function.__name__}: torch.set_default_dtype({torch.get_default_dtype()}) is in force, and what a forward makes would "
            "have another dtype than where the result is loaded; call torch.set_default_dtype(torch.float32) first, and cast the model if "
            "that is meant"
        )
    if torch.get_default_device().type != "cpu":
        raise UserInputError(
            f"{function.__name__}: {torch.get_default_device()} is torch's default device around the call, and data would lie there; "
            "call it outside of torch.device(...) and torch.set_default_device, and say device= if that is meant"
        )


def check_trainable(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse to train, or to write to, what was made under torch.inference_mode.

    Args:
        tensors: by dotted name.

    Raises:
        UserInputError: one is an inference tensor.
    """
    name = next((name for name, tensor in tensors if tensor.is_inference()), None)
    if name is not None:
        raise UserInputError(
            f"{name}: it was made under torch.inference_mode, so it can neither be trained nor written to; build or load the model outside "
            "of it, or give copy.deepcopy(model)"
        )


@contextmanager
def plain_gradients() -> Iterator[None]:
    """Run as outside of the caller's no_grad or inference mode: who needs no gradients says so, and what is trained is trained the same.

    Yields:
        Nothing.
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield
