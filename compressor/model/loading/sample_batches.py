"""Small random batches for any model, made from its config and the arguments of its forward: no processor, no tokenizer, no file.

Two batches of different shape, the second one padded where the model takes a mask. A model that reads images or sound inside a text needs
as many placeholder tokens as its tower gives features, and only the tower knows how many: so it is asked.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compressor.errors import ModelError, reason
from compressor.model.targets import text_config

Modality = Literal["text", "vision", "audio"]
MODALITIES: tuple[Modality, ...] = ("text", "vision", "audio")

_OF_INPUT: Mapping[str, Modality] = MappingProxyType(
    {
        "pixel_values": "vision",
        "pixel_values_videos": "vision",
        "flattened_patches": "vision",
        "input_features": "audio",
        "input_values": "audio",
    }
)
_WORDS: Mapping[Modality, str] = MappingProxyType({"text": "text", "vision": "images", "audio": "sound"})
_SHAPES = ((2, 12), (1, 17))  # rows and tokens of the two batches
_PLACEHOLDERS: Mapping[Modality, tuple[str, ...]] = MappingProxyType(
    {
        "vision": ("image_token_id", "image_token_index", "media_token_id"),
        "audio": ("audio_token_id", "audio_token_index"),
    }
)
_REMEDY = (
    "give real inputs by the names of the forward's arguments: --dataset inputs.safetensors, or for ONNX "
    "harness.onnx_roundtrip(model, inputs)"
)


@dataclass(frozen=True)
class SampleBatches:
    """Batches for one model.

    Attributes:
        batches: two, of different shapes.
        modality: what they hold.
        how: what they are, in one line.
    """

    batches: list[dict[str, Tensor]]
    modality: Modality
    how: str


class _Maker:
    """Draws the inputs of one model."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model = model
        self.config: Any = getattr(model, "config", None)
        if self.config is None:
            raise ModelError(f"{type(model).__name__}: has no config to make a batch from; {_REMEDY}")
        self.arguments = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(seed)
        self.text: Any = text_config(self.config)
        parameter = next(model.parameters())
        self.dtype = parameter.dtype

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float32).to(self.dtype)

    def takes(self, name: str) -> bool:
        return name in self.arguments

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these that the vision, audio or own config has."""
        parts = [getattr(self.config, part, None) for part in ("vision_config", "audio_config", "thinker_config")] + [self.config]
        found = (getattr(part, name, None) for part in parts if part is not None for name in names)
        return next((value for value in found if value is not None), default)

    def tokens(self, rows: int, length: int) -> Tensor:
        """Ids that stand for nothing special: from the first part of the vocabulary."""
        vocab = int(getattr(self.text, "vocab_size", 0) or getattr(self.config, "vocab_size", 0) or 0)
        if vocab < 2:
            raise ModelError(f"{type(self.model).__name__}: its config names no vocab_size; {_REMEDY}")
        special = [
            value for key, value in self.config.to_dict().items() if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        ]
        low = min(4, vocab - 1)
        high = min([vocab, *(value for value in special if value > low + 8)])
        return torch.randint(low, max(high, low + 1), (rows, length), generator=self.generator)

    def placeholder(self, modality: Modality) -> int | None:
        """The token that stands for an image or a sound."""
        named = (getattr(self.config, name, None) for name in _PLACEHOLDERS[modality])
        return next((value for value in named if isinstance(value, int)), None)

    def text_batch(self, rows: int, length: int, padded: bool) -> dict[str, Tensor]:
        limit = getattr(self.text, "max_position_embeddings", None)
        length = min(length, limit - 4) if isinstance(limit, int) and limit > 4 else length
        batch = {"input_ids": self.tokens(rows, length)}
        if padded and self.takes("attention_mask"):
            mask = torch.ones(rows, length, dtype=torch.int64)
            mask[-1, length - length // 4 :] = 0
            batch["attention_mask"] = mask
        return batch | self.decoder_batch(rows, length // 2 + 1)

    def decoder_batch(self, rows: int, length: int) -> dict[str, Tensor]:
        """What a decoder beside an encoder reads; empty where there is none."""
        has_one = getattr(self.config, "is_encoder_decoder", False) and self.takes("decoder_input_ids")
        return {"decoder_input_ids": self.tokens(rows, length)} if has_one else {}

    def refused(self, modality: Modality) -> ModelError:
        """The error for a modality that the model does not read, with those that it does."""
        read = [one for one in MODALITIES if reads(self.model, one)]
        advice = f"choose --modality {' or '.join(read)}" if read else _REMEDY
        return ModelError(f"{type(self.model).__name__}: reads no {_WORDS[modality]}; {advice}")


def sample_batches(model: nn.Module, modality: Modality | None = None, seed: int = 0) -> SampleBatches:
    """Make two batches for a model of transformers and run the first one, so that what comes back works.

    Args:
        model: in eval mode, with weights; not modified.
        modality: what to make; None means what the model reads first (images for a model that reads images inside a text only if asked).
        seed: of all numbers.

    Returns:
        The batches.

    Raises:
        ModelError: the model has no such input, or it cannot run what could be made.
    """
    maker = _Maker(model, seed)
    chosen = modality or _default_modality(maker)
    if not reads(model, chosen):
        raise maker.refused(chosen)
    batches, device = [], next(model.parameters()).device
    try:
        with torch.no_grad():
            for index, (rows, length) in enumerate(_SHAPES):
                batches.append(_MAKERS[chosen](maker, rows, length, index == 1))
                model(**{name: value.to(device, copy=True) for name, value in batches[-1].items()})
    except ModelError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        said = reason(error) or type(error).__name__
        raise ModelError(f"{type(model).__name__}: cannot run a {chosen} batch made from its config ({said}); {_REMEDY}") from error
    return SampleBatches(batches, chosen, f"random, {describe_batch(batches[0])}; then {describe_batch(batches[1])}")


def batch_of_shapes(model: nn.Module, rows: int, length: int) -> dict[str, Tensor]:
    """Make one batch of a given size for a model without weights; its values mean nothing.

    Args:
        model: on any device; one without a config reads token ids.
        rows: sequences, images or sounds.
        length: tokens of each sequence, beside an encoder of what its decoder reads, too.

    Returns:
        Named tensors on the CPU: token ids int64 [rows, length], or what the model reads first where that is no text.

    Raises:
        ModelError: the config does not say what they look like.
    """
    ids = torch.zeros(rows, length, dtype=torch.int64)
    if getattr(model, "config", None) is None:
        return {"input_ids": ids}
    maker = _Maker(model, seed=0)
    modality = _default_modality(maker)
    if modality == "text":
        return {"input_ids": ids} | maker.decoder_batch(rows, length)
    return _MAKERS[modality](maker, rows, length, False)


def reads(model: nn.Module, modality: Modality) -> bool:
    """Say whether the forward of a model has an argument for this, and its config does not leave out the tower.

    Args:
        model: the model.
        modality: what it may read.

    Returns:
        True if so.
    """
    if getattr(getattr(model, "config", None), f"{modality}_config", ...) is None:
        return False
    names = {"input_ids"} if modality == "text" else {name for name, kind in _OF_INPUT.items() if kind == modality}
    return not names.isdisjoint(inspect.signature(model.forward).parameters)


def unheld(model: nn.Module, batches: Iterable[Any]) -> list[Modality]:
    """Name what a model reads and none of some batches holds.

    Args:
        model: the model.
        batches: of its data.

    Returns:
        Modalities.
    """
    names = {name for batch in batches for name in (batch if isinstance(batch, Mapping) else ("input_ids",))}
    held = {_OF_INPUT.get(name, "text" if name == "input_ids" else None) for name in names}
    return [modality for modality in MODALITIES if modality not in held and reads(model, modality)]


def _default_modality(maker: _Maker) -> Modality:
    """What the model reads first; images, where text without them means nothing to it (CLIP)."""
    both = maker.takes("input_ids") and maker.takes("pixel_values")
    if both and maker.placeholder("vision") is None:
        return "vision"
    return _OF_INPUT.get(getattr(maker.model, "main_input_name", "input_ids"), "text")


def describe_batch(batch: Mapping[str, Tensor]) -> str:
    """Say what is in a batch.

    Args:
        batch: named tensors.

    Returns:
        Names and shapes in one line.
    """
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())


def _vision(maker: _Maker, rows: int, length: int, padded: bool) -> dict[str, Tensor]:
    if not any(maker.takes(name) for name in ("pixel_values", "flattened_patches")):
        raise maker.refused("vision")
    inputs, num_tokens = _image_inputs(maker, rows)
    if not maker.takes("input_ids"):
        return inputs | maker.decoder_batch(rows, length // 2)
    token = maker.placeholder("vision")
    if token is None:
        return maker.text_batch(rows, length, padded) | inputs
    per_row = num_tokens if num_tokens is not None else _count_features(maker, "get_image_features", inputs) // rows
    return _with_placeholders(maker, rows, length, token, per_row, "image") | inputs


def _image_inputs(maker: _Maker, rows: int) -> tuple[dict[str, Tensor], int | None]:
    """Images in the form that the forward takes, told by its arguments; and how many tokens each needs where arithmetic knows."""
    size = maker.setting("image_size", default=32)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    channels = int(maker.setting("num_channels", "in_channels", "in_chans", default=3))
    patch = maker.setting("patch_size", default=16)
    patch = patch if isinstance(patch, int) else patch[0]
    if maker.takes("image_grid_thw"):
        return _grid(maker, rows, channels, patch)
    if maker.takes("image_position_ids"):
        return _placed_patches(maker, rows, channels, patch)
    if maker.takes("aspect_ratio_ids"):
        return _tiles(maker, rows, channels, height, width)
    tiled = getattr(sys.modules[type(maker.model).__module__], "image_size_to_num_patches", None)
    if tiled is not None and maker.takes("image_sizes"):  # an image as a whole, and in tiles (LLaVA-NeXT)
        num = int(tiled((height, width), maker.config.image_grid_pinpoints, height))
        sizes = torch.tensor([[height, width]] * rows, dtype=torch.int64)
        return {"pixel_values": maker.normal(rows, num, channels, height, width), "image_sizes": sizes}, None
    if maker.takes("pixel_attention_mask"):
        return {"pixel_values": maker.normal(rows, 1, channels, height, width)}, None
    images = {"pixel_values": maker.normal(rows, channels, height, width)}
    if maker.takes("qformer_input_ids"):
        images["qformer_input_ids"] = torch.ones(rows, 6, dtype=torch.int64)
    if maker.takes("image_sizes") and getattr(getattr(maker.config, "vision_config", None), "model_type", "") == "pixtral":
        images["image_sizes"] = torch.tensor([[height, width]] * rows, dtype=torch.int64)
    return images, None


def _grid(maker: _Maker, rows: int, channels: int, patch: int) -> tuple[dict[str, Tensor], int | None]:
    """Patches in rows, with a grid of time, height and width for each image (Qwen2-VL and its kin)."""
    merge = int(maker.setting("spatial_merge_size", default=2))
    frames = int(maker.setting("temporal_patch_size", default=1))
    side = 2 * merge
    grid = torch.tensor([[1, side, side]] * rows, dtype=torch.int64)
    pixels = maker.normal(rows * side * side, channels * frames * patch**2)
    if any(isinstance(one, nn.Conv2d) and one.kernel_size == (patch, patch) for one in maker.model.modules()):  # as pictures (Kimi)
        pixels = pixels.unflatten(1, (channels, patch, patch))
    return {"pixel_values": pixels, "image_grid_thw": grid}, side * side // merge**2


def _placed_patches(maker: _Maker, rows: int, channels: int, patch: int) -> tuple[dict[str, Tensor], int | None]:
    """Patches in rows, with the place of each in its image (Gemma 4)."""
    side = 2 * int(maker.setting("pooling_kernel_size", default=1))
    patch = int(maker.setting("model_patch_size", default=patch))
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).repeat(rows, 1, 1)
    return {"pixel_values": maker.normal(rows, side * side, channels * patch**2), "image_position_ids": places}, None


def _tiles(maker: _Maker, rows: int, channels: int, height: int, width: int) -> tuple[dict[str, Tensor], int | None]:
    """One image of one tile per row, seen by every token (Mllama)."""
    tiles = int(maker.setting("max_num_tiles", default=1))
    mask = torch.zeros(rows, 1, tiles, dtype=torch.int64)
    mask[..., 0] = 1
    ids = torch.ones(rows, 1, dtype=torch.int64)
    return {"pixel_values": maker.normal(rows, 1, tiles, channels, height, width), "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}, 1


def _with_placeholders(maker: _Maker, rows: int, length: int, token: int, num: int, kind: str) -> dict[str, Tensor]:
    ids = maker.tokens(rows, max(length, num + 6))
    start, end = (getattr(maker.config, f"{word}_token_id", None) for word in ("vision_start", "vision_end"))
    if isinstance(start, int) and kind == "image":
        ids[:, 2] = start
    ids[:, 3 : 3 + num] = token
    if isinstance(end, int) and kind == "image":
        ids[:, 3 + num] = end
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, mark in (("token_type_ids", 1), ("mm_token_type_ids", 1 if kind == "image" else 3)):  # as processors number them
        if maker.takes(name):
            batch[name] = (ids == token).long() * mark
    if maker.takes("cross_attention_mask"):
        tiles = int(maker.setting("max_num_tiles", default=1))
        batch["cross_attention_mask"] = torch.ones(*ids.shape, 1, tiles, dtype=torch.int64)
    return batch


def _audio(maker: _Maker, rows: int, length: int, padded: bool) -> dict[str, Tensor]:
    if maker.takes("input_values_cutoffs"):
        return _coded(maker, rows, length)
    if maker.takes("input_values"):
        return {"input_values": _waveform(maker, rows)} | maker.decoder_batch(rows, length // 2)
    frames = 2 * int(maker.setting("max_source_positions", default=8 * length))
    inputs = _spectrogram(maker, rows, frames)
    token = maker.placeholder("audio")
    if token is not None and maker.takes("input_ids"):
        per_row = _tower_length(maker, frames) or _count_features(maker, "get_audio_features", inputs) // rows
        return _with_placeholders(maker, rows, length, token, per_row, "audio") | inputs
    if maker.takes("decoder_input_ids"):
        inputs["decoder_input_ids"] = maker.tokens(rows, length // 2)
    return inputs


def _coded(maker: _Maker, rows: int, length: int) -> dict[str, Tensor]:
    """Samples of two frames of a codec inside, whose codes take the places of tokens (CSM); a sound ends where its cutoff says."""
    codec, token = getattr(maker.model, "codec_model", None), maker.placeholder("audio")
    if codec is None or token is None:
        raise ModelError(f"{type(maker.model).__name__}: has no codec_model, or no token for sound, so none can be made; {_REMEDY}")
    values = maker.normal(rows, 1, math.ceil(2 * codec.config.sampling_rate / codec.config.frame_rate))
    with torch.no_grad():
        per_row = codec.encode(values).audio_codes.shape[-1]
    sound = {"input_values": values, "input_values_cutoffs": torch.full((rows, 1), values.shape[-1], dtype=torch.int64)}
    return _with_placeholders(maker, rows, length, token, per_row, "audio") | sound


def _spectrogram(maker: _Maker, rows: int, frames: int) -> dict[str, Tensor]:
    """Sound as [rows, bins, frames], or as [rows, frames, bins] where no setting of the usual names says how many bins (Gemma)."""
    bins = maker.setting("num_mel_bins", "input_feat_per_channel", "feature_size")
    late = maker.setting("input_feat_size", "audio_embed_dim", "subsampling_conv_channels")
    if bins is None and late is not None:
        inputs = {"input_features": maker.normal(rows, frames, late if isinstance(late, int) else late[0])}
    else:
        inputs = {"input_features": maker.normal(rows, int(bins or 80), frames)}
    for name, dtype in (("feature_attention_mask", torch.int64), ("input_features_mask", torch.bool)):
        if maker.takes(name):
            inputs[name] = torch.ones(rows, frames, dtype=dtype)
    return inputs


def _tower_length(maker: _Maker, frames: int) -> int:
    """Ask a model that merges sound in its forward (Qwen2-Audio) how many tokens so many frames need; 0 where it has a method for that."""
    inner = getattr(maker.model, "model", maker.model)
    if hasattr(inner, "get_audio_features") or hasattr(maker.model, "get_audio_features"):
        return 0
    ask = getattr(getattr(inner, "audio_tower", None), "_get_feat_extract_output_lengths", None)
    return 0 if ask is None else int(ask(torch.tensor([frames], dtype=torch.int64))[-1])


def _waveform(maker: _Maker, rows: int) -> Tensor:
    """Samples enough for a dozen frames; a spectrogram for the models that take one under the same name."""
    if maker.setting("max_length") and maker.setting("num_mel_bins"):
        return maker.normal(rows, int(maker.setting("max_length")), int(maker.setting("num_mel_bins")))
    stride = 1
    for step in maker.setting("conv_stride", default=(320,)):
        stride *= int(step)
    return maker.normal(rows, 24 * stride)


def _count_features(maker: _Maker, method: str, inputs: Mapping[str, Tensor]) -> int:
    """Ask the tower how many features it makes of these inputs."""
    ask = getattr(getattr(maker.model, "model", None), method, None) or getattr(maker.model, method, None)  # the first names its arguments
    if ask is None:
        raise ModelError(f"{type(maker.model).__name__}: has no {method}() that says how many tokens its inputs need; {_REMEDY}")
    known = inspect.signature(ask).parameters
    with torch.no_grad():
        given = ask(**{name: value for name, value in inputs.items() if name in known})
    hidden = getattr(maker.text, "hidden_size", None)
    return sum(value.numel() // value.shape[-1] for value in _features(given) if value.shape[-1] == hidden)


def _features(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    pooled = getattr(given, "pooler_output", None)
    if pooled is None:
        pooled = getattr(given, "last_hidden_state", None)
    if pooled is not None:
        return _features(pooled)
    return [tensor for part in given for tensor in _features(part)] if isinstance(given, list | tuple) else []


_MAKERS: Mapping[str, Callable[[_Maker, int, int, bool], dict[str, Tensor]]] = MappingProxyType(
    {"text": _Maker.text_batch, "vision": _vision, "audio": _audio}
)
