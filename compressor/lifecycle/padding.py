"""Whether the mask of a padded batch fits what modules are handed.

Shapes alone do not say: a model may flip, sort or transpose its tokens. Two further forwards of one padded batch tell: one with
other padding, one with other tokens throughout. A row of a module's input that moves with the padding, or with nothing, is no token. Where
the mask keeps such a row and drops one that is a token, padding would be counted in place of tokens. A model whose padding reaches every
row is its author's choice, and none of the kind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data import Batch, CalibrationData
from compressor.data.collate import WITHOUT_PADDING, leading_tensor, without_single_axes
from compressor.errors import CalibrationError
from compressor.lifecycle.state import State
from compressor.tracing.footprint import Footprint
from compressor.tracing.targets.call_order import plain_forward

_MOVED, _STANDS_STILL = 1e-3, 1e-6
"""Shares of a row's length: experts round a row otherwise when the rows beside it change."""
_MEDIA_TOKEN = re.compile(r"(image|video|audio|vision)\w*_token_(id|index)$")
_DIRECTIONS = 16
"""On one direction alone, one row in a hundred that moves by a tenth of its length would seem to stand still."""


def check_padding(state: State, data: CalibrationData, watched: Collection[str]) -> None:
    """Hold the mask against what modules are handed, on the batch with the most padding.

    Args:
        state: of the session, whose hooks are asleep; its model is as before.
        data: the batches with their masks; where none is padded there is nothing to do.
        watched: dotted names of the modules of which a statistic is taken.

    Raises:
        CalibrationError: the rows of a module's input are not the tokens of the batch, or lie in another order; or a decoder takes tokens
            of the very same shape, of which the mask says nothing.
    """
    for index, (one, mask) in enumerate(zip(data.batches, data.token_masks, strict=True)):
        if mask is not None and not bool(mask.all()):
            _refuse_a_second_sequence(one, mask, index)
    padded = [(batch, real) for batch in data.batches if isinstance(batch, dict) and (real := _real(batch)) is not None]
    if not padded or not watched:
        return
    batch, real = max(padded, key=lambda one: int(one[1].logical_not().sum()))
    batch, real = {name: tensor.to(state.device) for name, tensor in batch.items()}, real.to(state.device)
    ids = batch["input_ids"]
    others = _others(ids, real, _media_tokens(state.model))
    if bool((others == ids).all()):
        return  # tokens of one kind, in whatever order
    with Footprint(state.model) as footprint, torch.no_grad():
        seen = []
        for other in (ids, ids.where(real, others), others):
            with footprint.returning():
                seen.append(_rows(state.model, {**batch, "input_ids": other}, real, watched))
    for name in watched:
        for plain, padding, tokens in zip(*(one[name] for one in seen), strict=False):
            _check(name, real, plain, padding, tokens)


def _others(ids: Tensor, real: Tensor, kept: Collection[int]) -> Tensor:
    """Other tokens that the model surely knows: the neighbours', and where these are equal, another of the batch; some stay in place."""
    free = ~torch.isin(ids, torch.tensor(sorted(kept), dtype=ids.dtype, device=ids.device))
    if not bool((free & real).any()):
        return ids
    ordinary = ids[free & real]
    others = ids.roll(1, -1).where(free.roll(1, -1), ordinary[0])
    others = others.where(others != ids, ordinary.min())
    return others.where(others != ids, ordinary.max()).where(free, ids)


def _media_tokens(model: nn.Module) -> frozenset[int]:
    """Tokens that stand for images, videos and audio, as many as there are features: another number of them is refused."""
    config = getattr(model, "config", None)
    named = vars(config) if config is not None else {}
    return frozenset(value for name, value in named.items() if isinstance(value, int) and _MEDIA_TOKEN.search(name))


def _refuse_a_second_sequence(batch: Any, mask: Tensor, index: int) -> None:
    """Inputs of another shape are told apart from masked ones by their shape; those of the same shape would be masked as well."""
    names = [name for name in batch if name.startswith("decoder_")] if isinstance(batch, Mapping) else []
    for name in names:
        if name != "decoder_attention_mask" and batch[name].shape[:2] == mask.shape:
            real = batch.get("attention_mask")
            is_padded = real is not None and real.dim() == 2 and not bool(real.all())
            takes_more = not is_padded or not torch.equal(real.bool(), mask.to(real.device))
            remedies = [*(["leave out the loss_mask"] if takes_more else []), *([WITHOUT_PADDING] if is_padded else [])]
            raise CalibrationError(
                f"dataset batch {index}: {name} has the shape {tuple(mask.shape)} of the mask, which speaks of the encoder's tokens, so "
                f"that tokens of it would not count where those of the encoder do not; {', and '.join(remedies)}"
            )


def note_unread_masks(state: State, data: CalibrationData) -> None:
    """Say that tokens count which a mask of another name may mean to be padding.

    Args:
        state: of the session; its report may get a note.
        data: the batches with their masks.
    """
    pairs = zip(data.batches, data.token_masks, strict=True)
    unread = {name for batch, mask in pairs for name in _masks(batch) if mask is None or name != "attention_mask"} | data.unread_masks
    decoders = {name for name in unread if name.startswith("decoder_")}
    if getattr(getattr(state.model, "config", None), "is_encoder_decoder", False):  # what a decoder is given follows from them
        named = [batch.get("labels") for batch in data.batches if isinstance(batch, Mapping)]
        decoders |= {"-100 among the labels" for labels in named if labels is not None and bool((labels == -100).any())}
    for names, remedy in (
        (unread - decoders, "a loss_mask beside it (1: counts; the model never gets it) says which do"),
        (decoders, f"no loss_mask speaks of a decoder's tokens: {WITHOUT_PADDING}"),
    ):
        if names:
            state.report.notes.append(
                f"{', '.join(sorted(names))} of the batches is not read, and all tokens that are no padding count; {remedy}"
            )


def _masks(batch: Batch) -> list[str]:
    """What looks like a mask of tokens: of ones and zeros, a row for each sample, named so or of truth values; a wider attention_mask.

    It may be of another length than the tokens, as that of a decoder is. Truth values without such a name are of their shape.
    """
    shape = leading_tensor(batch).shape[:2]
    named = batch.items() if isinstance(batch, Mapping) else ((f"position {place}", one) for place, one in enumerate(batch))
    alike = [
        (name, one)
        for name, one in named
        if (one.dim() == len(shape) == 2 and len(one) == shape[0] and "mask" in name) or (one.shape == shape and one.dtype == torch.bool)
    ]
    found = [name for name, one in alike if bool((one == 0).any()) and bool((one == 1).any()) and bool(((one == 0) | (one == 1)).all())]
    wide = isinstance(batch, Mapping) and "attention_mask" in batch and batch["attention_mask"].dim() > len(shape)
    return [*found, *(["attention_mask of more than two dimensions"] if wide else [])]


def _real(batch: Mapping[str, Tensor]) -> Tensor | None:
    """The tokens of a batch that are no padding, bool [batch, sequence]; None where nothing is padded, or nothing can be exchanged."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if mask is None or ids is None or mask.shape != ids.shape or not bool(mask.any()) or bool(mask.all()):
        return None
    return mask.bool()


def _rows(model: nn.Module, batch: Batch, real: Tensor, watched: Collection[str]) -> dict[str, list[Tensor]]:
    """Numbers for each row of what modules are handed, where the mask would be laid on it."""
    found: dict[str, list[Tensor]] = {name: [] for name in watched}
    handles = []
    for name in watched:

        def note(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.layout is torch.strided and x.is_floating_point() and _fits(x, real):
                found[name].append(_numbers(x.reshape(-1, x.shape[-1])))

        handles.append(model.get_submodule(name).register_forward_pre_hook(note))
    try:
        plain_forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _fits(x: Tensor, real: Tensor) -> bool:
    return without_single_axes(x).shape[:-1] == real.shape or (x.dim() == 2 and len(x) == real.numel())


def _numbers(rows: Tensor) -> Tensor:
    """[N, D + 1]: the projections of each row on drawn directions, and its length."""
    drawn = torch.randn(rows.shape[1], _DIRECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(rows.device)
    wide = rows.float()
    return torch.cat([wide @ drawn, wide.norm(dim=1, keepdim=True)], 1).nan_to_num()


def _check(name: str, real: Tensor, plain: Tensor, padding: Tensor, tokens: Tensor) -> None:
    kept = real.flatten()
    by_padding, by_tokens = _moved(plain, padding), _moved(plain, tokens)
    is_token = (by_tokens > _MOVED) & (by_padding <= _MOVED)
    is_none = (by_padding > _MOVED) | (by_tokens < _STANDS_STILL)  # of a row between nobody knows
    if not bool((by_tokens > _MOVED).any()):
        raise CalibrationError(
            f"{name}: its input has the shape of a padded batch of {tuple(real.shape)} tokens, and no token reaches it, so something else "
            f"would be taken out as padding; {WITHOUT_PADDING}"
        )
    if bool((is_token & ~kept).any()) and bool((is_none & kept).any()):
        raise CalibrationError(
            f"{name}: the rows of its input are not in the order of the {tuple(real.shape)} tokens of a padded batch, so padding would be "
            f"counted in place of tokens; {WITHOUT_PADDING}"
        )


def _moved(one: Tensor, other: Tensor) -> Tensor:
    """How far each row is from the other, in its length."""
    difference = (one[:, :-1] - other[:, :-1]).square().mean(1).sqrt()
    return difference / (one[:, -1] + other[:, -1]).clamp(min=torch.finfo(torch.float32).tiny)
