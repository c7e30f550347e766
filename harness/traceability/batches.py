"""Batches for the zoo: tiny, seeded, of every modality, and in four variants that a tracer tends to confuse.

`same` is what a model is traced on, `padded` has its shape and padding on both sides, `shape` has another number of rows and another
length, and `bare` leaves out what may be left out: the mask, or the images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
FIRST_TOKEN, LAST_TOKEN = 4, 96  # drawn ids; below lie the special tokens of all architectures, above those that stand for images


@dataclass(frozen=True)
class Ask:
    """What one batch shall be like.

    Attributes:
        rows: samples in it.
        length: tokens, or another measure of length where there are none.
        padded: some of it is masked.
        bare: what may be left out is left out.
        options: of the architecture.
        generator: of everything random.
    """

    rows: int
    length: int
    padded: bool = False
    bare: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    generator: torch.Generator = field(default_factory=torch.Generator)

    def tokens(self, rows: int | None = None, length: int | None = None) -> Tensor:
        """Draw token ids that mean nothing special."""
        return torch.randint(FIRST_TOKEN, LAST_TOKEN, (rows or self.rows, length or self.length), generator=self.generator)

    def normal(self, *size: int) -> Tensor:
        """Draw from the standard normal distribution."""
        return torch.randn(*size, generator=self.generator)

    def mask(self, length: int | None = None) -> Tensor:
        """Make an attention mask: the first row padded on the left, the last on the right; all ones unless padded."""
        length = length or self.length
        mask = torch.ones(self.rows, length, dtype=torch.int64)
        if self.padded:
            mask[0, : length // 3] = 0
            mask[-1, length - length // 4 :] = 0
        return mask


_VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "same": {"rows": 2, "length": 12},
        "padded": {"rows": 2, "length": 12, "padded": True},
        "shape": {"rows": 1, "length": 17},
        "bare": {"rows": 3, "length": 9, "bare": True},
    }
)


def make_batches(kind: str, options: Mapping[str, Any], seed: int = 0) -> dict[str, Batch]:
    """Draw the batches of one architecture.

    Args:
        kind: a name in MAKERS.
        options: of the maker.
        seed: of everything random.

    Returns:
        Variant to batch; `same` first.
    """
    generator = torch.Generator().manual_seed(seed)
    asks = {name: Ask(**ask, options=options, generator=generator) for name, ask in _VARIANTS.items()}
    return {name: MAKERS[kind](ask) for name, ask in asks.items()}


def _text(ask: Ask) -> Batch:
    mask = ask.mask()
    return _without_mask({"input_ids": ask.tokens() * mask, "attention_mask": mask}, ask)


def _without_mask(batch: Batch, ask: Ask) -> Batch:
    return {name: value for name, value in batch.items() if not (ask.bare and name.endswith("attention_mask"))}


def _seq2seq(ask: Ask) -> Batch:
    answer = ask.length // 2 + 1
    extra = {"decoder_input_ids": ask.tokens(length=answer), "decoder_attention_mask": ask.mask(answer).flip(0)}
    return _without_mask(_text(ask) | extra, ask)


def _image(ask: Ask) -> Batch:
    size = ask.options.get("size", 16)
    return {"pixel_values": ask.normal(ask.rows, 3, size, size)}


def _image_any_size(ask: Ask) -> Batch:
    return {"pixel_values": ask.normal(ask.rows, 3, 16, 16 if ask.length == 12 else 24)}


def _image_and_text(ask: Ask) -> Batch:
    return _text(ask) | _image(ask)


def _frames(ask: Ask) -> int:
    return int(ask.options.get("frames", 4 * ask.length))


def _speech_seq2seq(ask: Ask) -> Batch:
    features = ask.normal(ask.rows, ask.options["mels"], _frames(ask))
    return {"input_features": features, "decoder_input_ids": ask.tokens(length=ask.length // 2)}


def _speech(ask: Ask) -> Batch:
    per_unit = ask.options.get("samples", 40)
    mask = ask.mask(ask.length * per_unit)
    return _without_mask({"input_values": ask.normal(ask.rows, ask.length * per_unit) * mask, "attention_mask": mask}, ask)


def _token_ids(ask: Ask) -> Batch:
    return {"input_ids": ask.tokens()}


def _long_text(ask: Ask) -> Batch:
    """Lengths that are multiples of a block, long enough for sparse attention."""
    return _text(replace(ask, length={12: 48, 17: 56, 9: 40}[ask.length]))


def _speech_to_text(ask: Ask) -> Batch:
    return _speech(ask) | {"decoder_input_ids": ask.tokens(length=ask.length // 2)}


def _audio_tokens(ask: Ask) -> Batch:
    if ask.bare:
        return _text(ask)
    frames, mels = ask.options["frames"], ask.options["mels"]
    batch = _with_images(ask, [[ask.options["num_tokens"]]] * ask.rows) | {"input_features": ask.normal(ask.rows, mels, frames)}
    return batch | ({"feature_attention_mask": torch.ones(ask.rows, frames, dtype=torch.int64)} if ask.options.get("mask") else {})


def _image_tokens_and_question(ask: Ask) -> Batch:
    batch = _image_tokens(replace(ask, bare=False))
    return batch | {"qformer_input_ids": ask.tokens(batch["pixel_values"].shape[0], 6)}


def _with_images(ask: Ask, runs: list[list[int]]) -> Batch:
    """Make a text in which row `i` holds one run of image tokens for each number of `runs[i]`; the images are added by the caller."""
    start, end = ask.options.get("start"), ask.options.get("end")
    frame = (start is not None) + (end is not None)
    room = max(sum(num + frame + 1 for num in row) for row in runs)
    length = max(ask.length, room + 4)
    mask = ask.mask(length) if not ask.padded else torch.ones(ask.rows, length, dtype=torch.int64)
    ids = ask.tokens(length=length)
    if ask.padded:  # images must stay whole, so only the left is padded, and only where nothing stands
        mask[0, :3] = 0
    for row, nums in enumerate(runs):
        at = 3
        for num in nums:
            run = [start] * (start is not None) + [ask.options["token"]] * num + [end] * (end is not None)
            ids[row, at : at + len(run)] = torch.tensor(run)
            at += len(run) + 1
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    if ask.options.get("token_types"):
        batch["token_type_ids"] = (ids == ask.options["token"]).long()
    return batch


def _image_tokens(ask: Ask) -> Batch:
    if ask.bare:
        return _text(ask) | (
            {"token_type_ids": torch.zeros(ask.rows, ask.length, dtype=torch.int64)} if ask.options.get("token_types") else {}
        )
    per_row = 2 if ask.rows == 1 else 1
    batch = _with_images(ask, [[ask.options["num_tokens"]] * per_row] * ask.rows)
    size = ask.options["size"]
    return batch | {"pixel_values": ask.normal(ask.rows * per_row, 3, size, size)}


def _image_list(ask: Ask) -> Batch:
    if ask.bare:
        return _text(ask)
    per_row = 2 if ask.rows == 1 else 1
    size = ask.options["size"]
    batch = _with_images(ask, [[ask.options["num_tokens"]] * per_row] * ask.rows)
    return batch | {"pixel_values": ask.normal(ask.rows, per_row, 3, size, size)}


def _image_grid(ask: Ask) -> Batch:
    if ask.bare:
        return _text(ask)
    merge = ask.options["merge"]
    grids = [(1, 4, 4)] * ask.rows if ask.length == 12 else [(1, 4, 6), (1, 8, 4)]
    per_row = len(grids) // ask.rows
    nums = [t * h * w // merge**2 for t, h, w in grids]
    batch = _with_images(ask, [nums[row * per_row : (row + 1) * per_row] for row in range(ask.rows)])
    if ask.options.get("mm_types", True):
        batch["mm_token_type_ids"] = (batch["input_ids"] == ask.options["token"]).long()
    num_patches = sum(t * h * w for t, h, w in grids)
    return batch | {"pixel_values": ask.normal(num_patches, ask.options["patch"]), "image_grid_thw": torch.tensor(grids)}


def _image_sizes(ask: Ask) -> Batch:
    if ask.bare:
        return _text(ask)
    patch = ask.options["patch"]
    sizes = [(16, 16), (8, 16)][: ask.rows] if ask.length == 12 else [(12, 8)] * ask.rows
    batch = _with_images(ask, [[(h // patch) * (w // patch)] for h, w in sizes])
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    return batch | {"pixel_values": ask.normal(len(sizes), 3, height, width), "image_sizes": torch.tensor(sizes)}


def _image_tiles(ask: Ask) -> Batch:
    if ask.bare:
        return _text(ask)
    tiles, size = ask.options["tiles"], ask.options["size"]
    batch = _with_images(ask, [[1]] * ask.rows)
    used = 1 if ask.rows == 1 else tiles
    ids = torch.full((ask.rows, 1), used)
    tile_mask = (torch.arange(tiles) < used).long().expand(ask.rows, 1, tiles).contiguous()
    cross = tile_mask[:, None].expand(-1, batch["input_ids"].shape[1], -1, -1).clone()
    cross[:, :3] = 0
    pixels = ask.normal(ask.rows, 1, tiles, 3, size, size)
    return batch | {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": tile_mask, "cross_attention_mask": cross}


MAKERS: Mapping[str, Callable[[Ask], Batch]] = MappingProxyType(
    {
        "text": _text,
        "seq2seq": _seq2seq,
        "image": _image,
        "image_any_size": _image_any_size,
        "image_and_text": _image_and_text,
        "token_ids": _token_ids,
        "long_text": _long_text,
        "speech": _speech,
        "speech_to_text": _speech_to_text,
        "audio_tokens": _audio_tokens,
        "image_tokens_and_question": _image_tokens_and_question,
        "speech_seq2seq": _speech_seq2seq,
        "image_tokens": _image_tokens,
        "image_list": _image_list,
        "image_grid": _image_grid,
        "image_sizes": _image_sizes,
        "image_tiles": _image_tiles,
    }
)


def copies(batches: Sequence[Batch]) -> list[Batch]:
    """Copy batches, because a model may write to what it is given.

    Args:
        batches: not modified.

    Returns:
        Copies.
    """
    return [{name: value.clone() for name, value in batch.items()} for batch in batches]
