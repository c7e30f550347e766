"""Training steps of models that are at hand: a folder of a causal language model, or an architecture of the zoo with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.errors import UserInputError
from compressor.model.targets import text_config
from compressor.training import TrainStep, adamw
from harness.traceability.architectures import Architecture, zoo
from harness.traceability.batches import make_batches

# The causal mask of a model, given with its tokens: without one transformers looks at positions on the host, which no capture repeats.

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest logit
_TOLERANCE_OF_HALVES = 3e-2
# What models raise that know no such mask.
_REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError)


def causal_mask(model: nn.Module, input_ids: Tensor) -> dict[str, Any]:
    """Find the mask under which a model gives the very logits that it gives by itself.

    Args:
        model: of transformers; its training flags are as before afterwards.
        input_ids: tokens, [N, T]; the mask is for T of them.

    Returns:
        `attention_mask` as an argument of the model; nothing where the model predicts no tokens, or no such mask gives its logits.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        own = _logits(model, input_ids, {})
        if own is None:
            return {}
        tried = [(_distance(model, input_ids, mask, own), number, mask) for number, mask in enumerate(_candidates(model, input_ids))]
    finally:
        for module, training in flags:
            module.training = training
    distance, _, mask = min(tried, key=lambda one: one[:2])
    return mask if distance <= _TOLERANCE.get(own.dtype, _TOLERANCE_OF_HALVES) * float(own.abs().max()) else {}


@torch.no_grad()
def _logits(model: nn.Module, input_ids: Tensor, mask: dict[str, Any]) -> Tensor | None:
    try:
        logits = getattr(model(input_ids=input_ids, **mask), "logits", None)
    except _REFUSALS:
        return None
    return logits if isinstance(logits, Tensor) and logits.shape[:2] == input_ids.shape else None


def _distance(model: nn.Module, input_ids: Tensor, mask: dict[str, Any], own: Tensor) -> float:
    logits = _logits(model, input_ids, mask)
    distance = math.inf if logits is None else float((logits - own).abs().max())
    return math.inf if math.isnan(distance) else distance


def _candidates(model: nn.Module, input_ids: Tensor) -> Iterator[dict[str, Any]]:
    config = text_config(getattr(model, "config", None))
    place = torch.arange(input_ids.shape[1], device=input_ids.device)
    causal = place[:, None] >= place
    added_to = next(model.parameters()).dtype if getattr(config, "_attn_implementation", None) == "eager" else None
    full = _spell(causal, added_to)
    yield {"attention_mask": full}
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window < input_ids.shape[1]:
        sliding = _spell(causal & (place[:, None] - place < window), added_to)
        yield {"attention_mask": sliding}
        yield {"attention_mask": {"full_attention": full, "sliding_attention": sliding}}


def _spell(allowed: Tensor, added_to: torch.dtype | None) -> Tensor:
    """What kernels of torch take as booleans, attention in Python adds to its scores."""
    if added_to is None:
        return allowed[None, None]
    zeros = torch.zeros(allowed.shape, dtype=added_to, device=allowed.device)
    return zeros.masked_fill(~allowed, torch.finfo(added_to).min)[None, None]


@dataclass(frozen=True)
class Size:
    """Size of a batch of tokens.

    Attributes:
        batch_size: rows.
        seq_length: tokens of a row.
    """

    batch_size: int = 2
    seq_length: int = 16


@dataclass(frozen=True)
class ModelSteps:
    """Training steps of one model.

    Attributes:
        name: for reports.
        factory: makes a fresh step.
        batch_at: gives the batch of a step.
        notes: what of the recipe a run of that length does not reach.
    """

    name: str
    factory: Callable[[], TrainStep]
    batch_at: Callable[[int], Any]
    notes: tuple[str, ...] = ()


def steps_of(source: str, size: Size, recipe: str | None = None, device: str = "auto", num_steps: int | None = None) -> ModelSteps:
    """Make training steps of a model.

    Args:
        source: a folder in the layout of transformers, an architecture of the zoo, or a name on the hub (`owner/name`).
        size: of the batches; those of an architecture that takes more than tokens have the zoo's own.
        recipe: of modifiers that take part, or None.
        device: to train on.
        num_steps: length of the run; None: nobody knows.

    Returns:
        Factory and batches.

    Raises:
        UserInputError: neither a folder nor an architecture, or a modifier that so few steps would never start.
    """
    from compressor.model.hub import split_name
    from compressor.model.loading.load import resolve_device
    from compressor.recipe import load_recipe
    from compressor.training_run.settings import check_recipe

    if size.batch_size < 1 or size.seq_length < 2:
        raise UserInputError(f"--batch-size {size.batch_size}, --seq-length {size.seq_length}: give at least 1 row of 2 tokens")
    where = resolve_device(device)
    notes = [] if recipe is None or num_steps is None else check_recipe(load_recipe(recipe).modifiers, num_steps, "steps")
    if Path(source).is_dir():
        build, batch_at = _folder(source, size, where)
    elif source in zoo():
        build, batch_at = _architecture(zoo()[source], size, where)
    elif split_name(source) is not None:
        build, batch_at = _folder(source, size, where)
    else:
        from compressor.spelling import suggest

        raise UserInputError(f"MODEL: {source!r} is neither a folder nor an architecture of the zoo; {suggest(source, zoo())}")

    def factory() -> TrainStep:
        model = build().train()
        session = None if recipe is None else _session(model, recipe, where)
        return TrainStep(model, model_loss, adamw(model.parameters(), lr=1e-4), session)

    return ModelSteps(source, factory, batch_at, tuple(notes))


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the loss of the next token; where a model gives no logits of tokens, the mean square of what it gives first.

    Args:
        model: of transformers.
        batch: its keyword arguments.

    Returns:
        The loss.
    """
    output = model(**batch)
    logits, ids = getattr(output, "logits", None), batch.get("decoder_input_ids", batch.get("input_ids"))
    if logits is not None and ids is not None and logits.dim() == 3 and logits.shape[:2] == ids.shape:
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    first = logits if logits is not None else next(value for value in output.values() if isinstance(value, Tensor))
    return first.float().square().mean()


def _folder(source: str, size: Size, device: torch.device) -> tuple[Callable[[], nn.Module], Callable[[int], Any]]:
    from compressor.model.loading.load import load_model

    def build() -> nn.Module:
        model = load_model(source, device=device).model
        config: Any = model.config
        config.use_cache = False
        return model

    model = build()
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    mask = causal_mask(model, _tokens(vocabulary, size, 0).to(device))
    return build, lambda number: {"input_ids": _tokens(vocabulary, size, number).to(device), **mask}


def _architecture(one: Architecture, size: Size, device: torch.device) -> tuple[Callable[[], nn.Module], Callable[[int], Any]]:
    def batch_at(number: int) -> dict[str, Tensor]:
        batch = make_batches(one.kind, one.batch_options, seed=number)["same"]
        if one.kind == "text":
            batch = {"input_ids": _tokens(96, size, number)}
        return {name: tensor.to(device) for name, tensor in batch.items()} | mask

    def build() -> nn.Module:
        return one.build().to(device)

    mask = causal_mask(build(), _tokens(96, size, 0).to(device)) if one.kind == "text" else {}
    return build, batch_at


def _tokens(vocabulary: int, size: Size, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(4, vocabulary, (size.batch_size, size.seq_length), generator=generator)


def _session(model: nn.Module, recipe: str, device: torch.device) -> Any:
    from compressor.lifecycle import Session, State
    from compressor.recipe import load_recipe

    session = Session(State(model, device), load_recipe(recipe).modifiers)
    session.initialize()
    return session
