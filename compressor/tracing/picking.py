"""What a user hands to a trace, and which samples a proof takes of it, and how much of each: sizes and padding differ as far as they do.

What a program has frozen shows then, in a few rows and tokens as well as in a whole batch, and sooner, for their sizes differ from those
that were recorded. Where a small batch fails, whole ones must be tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, odd_ids
from compressor.data.layouts import dense_parts, shape_of
from compressor.errors import TracingError
from compressor.settings.kinds import TEXT
from compressor.tracing.graph.nodes import Unreached
from compressor.tracing.graph.planner import content_digest, named_inputs

# Before anything runs: what a user hands to a trace.


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
    made = [as_batch(batch, f"batches: batch {index}") for index, batch in enumerate(batches)]
    if not made:
        raise TracingError("trace: no batch was given, and a plan is made by running one; give at least one")
    return made


def as_batch(raw: Any, where: str = "batch: it") -> Batch:
    """Take one batch as people write it.

    Args:
        raw: a mapping of names to values, a tuple or list of values, or a tensor.
        where: it was given, for errors.

    Returns:
        A dict for keyword arguments or a tuple for positional ones.

    Raises:
        TracingError: it is none, or token ids in it are no whole numbers in rows.
    """
    if isinstance(raw, Mapping):
        batch: Any = {str(name): value for name, value in raw.items()}
    elif isinstance(raw, tuple | list | Tensor):
        batch = (raw,) if isinstance(raw, Tensor) else tuple(raw)
    else:
        raise TracingError(f"{where} is a {type(raw).__name__}; give a mapping, a tuple or a tensor")
    if isinstance(batch, dict) and (odd := odd_ids(batch)):
        raise TracingError(f"{where}: {odd}")
    values = batch.values() if isinstance(batch, dict) else batch
    if not any(isinstance(value, Tensor) for value in values):
        raise TracingError(f"{where} holds no tensor; give the forward's inputs (of a tokenizer, with return_tensors='pt')")
    if any(isinstance(value, Tensor) and value.is_meta for value in values):
        raise TracingError(f"{where} holds a tensor on the meta device, without values; give one with values")
    return batch


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be run and followed.

    Args:
        model: not modified.

    Raises:
        TracingError: it is compiled, is TorchScript, or has weights without values.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TracingError("the model: is TorchScript, where nothing can be followed; give the model as it was before torch.jit")
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
            f"{bare[0]}: is on the meta device, without values{more}, and to be followed the model must run; load its weights, or use "
            "`compressor trace`, which makes some"
        )


# Samples and parts of them.


def has_padding(batch: Batch) -> bool:
    """Say whether some of a batch is masked.

    Args:
        batch: not modified.

    Returns:
        True if a value whose name ends in `mask` holds a zero.
    """
    masks = [item for name, item in named_inputs(batch).items() if name.endswith("mask") and isinstance(item, torch.Tensor)]
    return any(bool((part == 0).any()) for mask in masks for part in dense_parts(mask))


def facts_of(batch: Batch) -> dict[Any, Any]:
    """List what a program may have frozen of a batch: every size, and whether something is masked.

    Args:
        batch: not modified.

    Returns:
        Value of each fact.
    """
    facts: dict[Any, Any] = {"padding": has_padding(batch)}
    for name, item in named_inputs(batch).items():
        facts |= (
            {(name, place): size for place, size in enumerate(shape_of(item))} if isinstance(item, torch.Tensor) else {name: repr(item)}
        )
    return facts


def other_content(samples: Sequence[int], picked: Sequence[int], batches: Sequence[Batch], proved: dict[Any, set[Any]]) -> list[int]:
    """Pick one more sample where all that are proved hold the same, for a program was recorded from that.

    Args:
        samples: to choose from.
        picked: samples that are proved already.
        batches: of all samples.
        proved: contents are noted in it.

    Returns:
        None or one.
    """
    contents = proved.setdefault("content", set())
    contents |= {content_digest(batches[sample]) for sample in picked}
    other = next((sample for sample in samples if content_digest(batches[sample]) not in contents), None) if len(contents) < 2 else None
    if other is None:
        return []
    contents.add(content_digest(batches[other]))
    return [other]


def unproved(samples: Sequence[int], batches: Sequence[Batch], proved: dict[Any, set[Any]]) -> list[int]:
    """List the samples whose content has not been proved, equal ones once.

    Args:
        samples: to choose from.
        batches: of all samples.
        proved: contents are noted in it.

    Returns:
        The samples.
    """
    contents = proved.setdefault("every content", set())
    found = []
    for sample in samples:
        digest = content_digest(batches[sample])
        if digest not in contents:
            contents.add(digest)
            found.append(sample)
    return found


def are_new_together(batches: Sequence[Batch], proved: dict[Any, set[Any]]) -> bool:
    """Say whether batches have not taken turns in one proof: each by itself, they have met nothing that another leaves.

    Args:
        batches: that will run together.
        proved: contents that were together are noted in it.

    Returns:
        False where all of them were in one proof.
    """
    contents, together = frozenset(map(content_digest, batches)), proved.setdefault("together", set())
    if any(contents <= one for one in together):
        return False
    together.add(contents)
    return True


def pick(facts: dict[int, dict[Any, Any]], proved: dict[Any, set[Any]], enough: int = 2) -> list[int]:
    """Pick the samples that bring most news, until each fact has come with several values where it can.

    Args:
        facts: of each sample.
        proved: values of each fact so far; those of the picked samples are noted in it.
        enough: values of each fact.

    Returns:
        The samples.
    """

    def news(sample: int) -> int:
        given = ((proved.get(fact, ()), value) for fact, value in facts[sample].items())
        return sum(value not in values and len(values) < enough for values, value in given)

    picked = []
    while news(best := max(facts, key=news)):
        picked.append(best)
        for fact, value in facts[best].items():
            proved.setdefault(fact, set()).add(value)
    return picked


NUM_ROWS = 2
_SHARE, _MIN_TOKENS = 4, 16  # a quarter of the tokens, at least so many


def excerpt(batch: Batch, place: int) -> Batch:
    """Cut a batch of token ids, in which every tensor has a row for each sequence and a column for each token.

    Of anything else nobody knows what belongs together. A batch with padding keeps its length, for what is masked lies at one end.

    Args:
        batch: not modified.
        place: of the batch among those of a proof; each gets a length of its own.

    Returns:
        The first rows, cut to a quarter of the tokens, or, where there is padding, the one with the least and the one with the most; the
        batch itself if it is no batch of token ids, or small.
    """
    if not isinstance(batch, dict):
        return batch
    given: Mapping[str, Any] = batch
    tensors = {name: item for name, item in given.items() if isinstance(item, Tensor)}
    ids = tensors.get("input_ids")
    if ids is None or ids.dim() != 2 or not len(ids) or any(item.shape != ids.shape for item in tensors.values()):
        return batch
    mask = tensors.get("attention_mask")
    is_padded = mask is not None and not bool(mask.all())
    counts = None if mask is None or not is_padded else mask.sum(1)
    ends = (0, min(NUM_ROWS, len(ids)) - 1) if counts is None else (int(counts.argmax()), int(counts.argmin()))
    rows = sorted(set(ends))
    length = ids.shape[1] if is_padded else min(ids.shape[1], max(_MIN_TOKENS, ids.shape[1] // _SHARE) + place)
    return {**batch, **{name: item[rows, :length] for name, item in tensors.items()}}


def are_leaves(value: object) -> bool:
    """Say whether something is a list of functions, or of texts that name them."""
    return isinstance(value, list | tuple) and all(callable(one) or TEXT.holds(one) for one in value)


def uncalled_of(targets: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """Return the targets that no batch calls.

    Args:
        targets: dotted names.
        called: those that some batch calls.

    Returns:
        The others.

    Raises:
        Unreached: none is called.
    """
    if not called:
        some = ", ".join([*list(targets)[:3], *(["..."] if len(targets) > 3 else [])]) or "the model"
        raise Unreached(
            f"trace: no batch calls any of the sequential targets ({some}); give batches that reach them, or name others (a module is "
            "called by calling it: calls of its .forward() are not seen)"
        )
    return tuple(name for name in targets if name not in called)
