"""What a user hands to a trace, and where it is no batch or no model that can run: said in our words, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from compressor.data.collate import Batch
from compressor.errors import TracingError


def as_batches(batches: Iterable[Any]) -> list[Batch]:
    """Take batches as people write them.

    Args:
        batches: mappings of names to values (also those of tokenizers), tuples or lists of values, or tensors, one for each forward.

    Returns:
        A dict for keyword arguments or a tuple for positional ones, each.

    Raises:
        TracingError: a single batch in the place of several, no batch, or something that is none.
    """
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TracingError(
            f"batches: a {type(batches).__name__} was given, where several batches are expected, one for each forward; give [batch]"
        )
    made = [_as_batch(batch, index) for index, batch in enumerate(batches)]
    if not made:
        raise TracingError("trace: no batch was given, and a plan is made by running one; give at least one")
    return made


def _as_batch(raw: Any, index: int) -> Batch:
    if isinstance(raw, Mapping):
        batch: Any = {str(name): value for name, value in raw.items()}
    elif isinstance(raw, tuple | list | Tensor):
        batch = (raw,) if isinstance(raw, Tensor) else tuple(raw)
    else:
        raise TracingError(f"batches: batch {index} is a {type(raw).__name__}; give a mapping, a tuple or a tensor")
    values = batch.values() if isinstance(batch, dict) else batch
    if not any(isinstance(value, Tensor) for value in values):
        raise TracingError(f"batches: batch {index} holds no tensor; give the forward's inputs (of a tokenizer, with return_tensors='pt')")
    if any(isinstance(value, Tensor) and value.is_meta for value in values):
        raise TracingError(f"batches: batch {index} holds a tensor on the meta device, without values; give one with values")
    return batch


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be run and followed.

    Args:
        model: not modified.

    Raises:
        TracingError: it is compiled, or has weights without values.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise TracingError(
                f"{name or 'the model'}: is compiled, and what a compiled module calls cannot be followed; give the model as it was before "
                "torch.compile (of a wrapper, its ._orig_mod), and compile after compression"
            )
    bare = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if bare:
        more = f", and {len(bare) - 1} more are" if bare[1:] else ""
        raise TracingError(
            f"{bare[0]}: is on the meta device, without values{more}, and a plan is made by running the model; load its weights, or use "
            "`compressor trace`, which makes some"
        )
