"""Models on which transforms show their mistakes: norm weights that are all different, embeddings whose mean is not zero, every dtype.

A fresh model hides most of them: norm weights of 1 fold into anything, embeddings without a mean can be centred without harm. And a
transformers model computes its norms, its softmax and its rotary angles in float32 whatever its dtype is, so a float64 model is only one
inside of `truly_float64`.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compressor.errors import UserInputError
from compressor.model.loading.load import quiet_transformers
from harness.checks.catalogue.registry import NothingToCheckError, described
from harness.traceability.architectures import zoo


def build(architecture: str, *, seed: int = 0, tied: bool = False) -> nn.Module:
    """Build a model that hides nothing.

    Args:
        architecture: a name of the zoo.
        seed: of weights and everything else.
        tied: embedding and head share their weight.

    Returns:
        The model, float32 on the CPU, in eval mode.

    Raises:
        UserInputError: the zoo has no such architecture.
        NothingToCheckError: it has no head over a vocabulary, cannot be tied, or does not run on token ids alone.
    """
    if architecture not in zoo():
        raise UserInputError(f"check: {architecture!r} is no architecture of the zoo; choose one of {', '.join(zoo())}")
    entry = zoo()[architecture]
    entry = replace(entry, config={**entry.config, "tie_word_embeddings": tied})
    try:
        model = entry.build(seed)
    except Exception as error:  # a config says in its own way that it takes no such setting
        if not tied:
            raise
        raise NothingToCheckError(f"{architecture} ties no weights: {described(error)}") from error
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise NothingToCheckError(f"{architecture} has no head over its vocabulary")
    own: Any = model.config
    for config in (own, own.get_text_config()):  # as a checkpoint has it, so that who switches it off is seen
        if hasattr(config, "use_cache"):
            config.use_cache = True
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():  # norms and biases
                parameter.add_(torch.rand(parameter.shape, generator=generator) - 0.5)
        embedding.weight.mul_(4).add_(0.5 * float(embedding.weight.std()) + 0.3)
    logits_before(architecture, model, token_ids(model, seed=seed)[0])
    return model


def token_ids(model: nn.Module, *, seed: int = 0, rows: int = 2, length: int = 12) -> list[Tensor]:
    """Draw batches of token ids.

    Args:
        model: whose vocabulary is drawn from.
        seed: of the draw.
        rows: of a batch.
        length: of a row.

    Returns:
        Two batches.
    """
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, _vocabulary(model), (rows, length), generator=generator) for _ in range(2)]


def every_id(model: nn.Module, *, length: int = 12) -> Tensor:
    """Return rows that hold each id of the vocabulary; at their end, ids from the beginning.

    Args:
        model: whose vocabulary it is.
        length: of a row.

    Returns:
        [B, length].
    """
    vocabulary = _vocabulary(model)
    return (torch.arange(-(-vocabulary // length) * length) % vocabulary).reshape(-1, length)


def _vocabulary(model: nn.Module) -> int:
    return len(model.get_input_embeddings().weight)  # type: ignore[operator]


def logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Run a model in inference mode.

    Args:
        model: a language model; the decoder of an encoder-decoder reads the same ids.
        input_ids: [B, T].

    Returns:
        [B, T, V].
    """
    with torch.inference_mode():
        return forward(model, input_ids)


def forward(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Run a model in the modes that are on; else as `logits`."""
    config: Any = model.config
    decoder = {"decoder_input_ids": input_ids} if getattr(config, "is_encoder_decoder", False) else {}
    found: Tensor = model(input_ids=input_ids, use_cache=False, **decoder).logits
    return found


def logits_before(architecture: str, model: nn.Module, input_ids: Tensor) -> Tensor:
    """Run a model that no subject has touched yet: that it does not run is no fault of theirs.

    Args:
        architecture: its name.
        model: as for `logits`.
        input_ids: [B, T].

    Returns:
        [B, T, V].

    Raises:
        NothingToCheckError: the model raises something.
    """
    try:
        return logits(model, input_ids)
    except Exception as error:  # a model raises what it likes
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise NothingToCheckError(f"{architecture} does not run on token ids alone in {dtype}: {described(error)}") from error


def reloaded(model: nn.Module) -> nn.Module:
    """Save a model as a checkpoint, and load it with the loader of its own class.

    Args:
        model: of transformers; not modified.

    Returns:
        What was loaded, in eval mode.
    """
    kind: Any = type(model)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]
        loaded: nn.Module = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return loaded.eval()


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy in another dtype, its computed buffers included where it is float64; grouped products of experts take no float64."""
    twin = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64:
        twin.double().set_experts_implementation("eager")  # type: ignore[operator]
    return twin


@contextmanager
def truly(dtype: torch.dtype) -> Iterator[None]:
    """Let a model compute in its dtype: in float64 what it would compute in float32.

    Args:
        dtype: of the model; nothing happens below float64.

    Yields:
        Nothing.
    """
    if dtype != torch.float64:
        yield
        return
    with _Float64():
        yield


class _Float64(TorchFunctionMode):
    """Every wish for float32 becomes one for float64."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Replace the dtype among the arguments."""
        del types
        if func is Tensor.float:
            return args[0].double()
        wide = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*wide, **named)
