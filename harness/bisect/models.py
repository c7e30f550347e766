"""Both models, and the parts in which they differ: modules that hold parameters, in the order in which they run.

A part is a module with parameters or stored buffers of its own. It differs where its class does (a quantized layer stands for a float one)
or any of its own values, bit for bit. Parts are grouped into layers by the first number in their name: `model.layers.3`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compressor.errors import ModelError
from compressor.model.experts.unfuse import UnfusedModel, unfuse_into
from compressor.model.folder import read_config, some
from compressor.model.loading.load import load_model, load_tokenizer, resolve_device
from compressor.nn import QuantizedLayer
from compressor.nn.attention.kv_cache import kv_args
from compressor.nn.experts import UnfusedExperts
from compressor.nn.online_rotation import rotated_modules
from compressor.pages import equal_bytes, raw_bytes
from harness.validation.format.container import read_checkpoint
from harness.validation.format.fused import fused_again, with_single_experts
from harness.validation.format.record import read_record
from harness.validation.format.transforms import config_settings, read_transforms, transformed
from harness.validation.loading import fused_layouts, load_for_running, load_with_tensors, module_classes


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture.

    Attributes:
        base: the one that counts as right; every other part is put into it.
        compressed: the one under suspicion.
        tokenizer: of the base's folder; None where it has none.
        parts: names of the parts that differ, in the order of the model.
        device: where both are.
    """

    base: nn.Module
    compressed: nn.Module
    tokenizer: object
    parts: tuple[str, ...]
    device: torch.device

    @property
    def use_cache(self) -> bool:
        """Whether keys and values go through a quantizer, which only a cache shows."""
        return any(kv_args(module) is not None for model in (self.base, self.compressed) for module in model.modules())


def load_pair(base: str | Path, compressed: str | Path, *, device: str = "auto") -> Pair:
    """Load both folders and find out where they differ.

    Args:
        base: folder of the base model, or of a compressed checkpoint that was accepted.
        compressed: folder of a compressed checkpoint.
        device: where both run: auto, cpu, cuda.

    Returns:
        The pair.

    Raises:
        ModelError: a folder cannot be used, both are one, they are given the other way round, or the two are of different architectures.
    """
    base, compressed = Path(base), Path(compressed)
    for folder in (base, compressed):
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder; give the folder that holds a model's config.json")
    if base.resolve() == compressed.resolve():
        raise ModelError(f"{base}: is given as base and as compressed model; give two folders")
    if _is_marked(base) and not _is_marked(compressed):
        raise ModelError(f"{compressed}: nothing says that it was compressed, and {base} was; give the base first")
    suspect = load_for_running(compressed, device=device)
    if "quantization_config" in read_config(base):
        right = load_for_running(base, device=device)
    else:
        right = _with_moved_scales(load_model(base, device=device).model, base, compressed).to(resolve_device(device))
        if any(isinstance(module, UnfusedExperts) for module in suspect.modules()):
            unfuse_into(UnfusedModel(right), prove=False)
        for name, rotations in rotated_modules(suspect).items():  # the weights in `right` are turned for them
            for rotation in rotations:
                rotation.attach(right.get_submodule(name))
    _give_dtype(right, _dtype(suspect))
    return Pair(right.eval(), suspect, load_tokenizer(base), tuple(differing_parts(right, suspect)), resolve_device(device))


def _is_marked(folder: Path) -> bool:
    return "quantization_config" in read_config(folder) or read_record(folder) is not None


def _with_moved_scales(model: nn.Module, base: Path, compressed: Path) -> nn.Module:
    """Move the scales in the base that were moved before compression: else no module of one could stand in for that of the other."""
    classes, files = module_classes(base), read_checkpoint(base, finished=False)
    files = with_single_experts(files, read_checkpoint(compressed), fused_layouts(base))
    moved, problems = read_transforms(read_record(compressed), files, classes)
    if problems:
        raise ModelError(f"{compressed}: compression.json: {problems[0]}; see what harness validate says of it")
    if not moved:
        return model
    tensors = transformed(files, moved, classes)
    made = fused_again({name: tensors.tensor(name) for name in tensors.entries}, tensors)
    return load_with_tensors(model, made, config_settings(moved))


def _give_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let weights have another dtype; what is kept in a dtype of its own, and tables that are computed (rotary angles), stay."""
    before = _dtype(model)
    for module in model.modules():
        for tensor in own_tensors(module).values() if before != dtype else ():
            tensor.data = tensor.data.to(dtype) if tensor.dtype == before else tensor.data


def _dtype(model: nn.Module) -> torch.dtype:
    dtype = getattr(model, "dtype", torch.float32)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def differing_parts(base: nn.Module, compressed: nn.Module) -> list[str]:
    """Compare two models part by part.

    Args:
        base: one model.
        compressed: another one of the same architecture.

    Returns:
        Names of the parts that differ.

    Raises:
        ModelError: one has modules that the other has not, or weights of other shapes.
    """
    ours, theirs = dict(base.named_modules()), dict(compressed.named_modules())
    lonely = sorted(ours.keys() ^ theirs.keys())
    if lonely:
        raise ModelError(
            f"the two models are of different architectures: {some(lonely)} are in one of them only; give a model and its base"
        )
    wrong = [f"{name} {_size(ours[name])} and {_size(theirs[name])}" for name in ours if _size(ours[name]) != _size(theirs[name])]
    if wrong:
        raise ModelError(f"the two models are of different architectures: {some(wrong)}; give a model and its base")
    return [name for name in ours if name and _is_part(ours[name], theirs[name]) and not _is_same(ours[name], theirs[name])]


def _size(module: nn.Module) -> tuple[int, ...]:
    if isinstance(module, QuantizedLayer):
        return tuple(module.weight_size)
    weight = module._parameters.get("weight")
    if weight is None:
        return ()
    shape = tuple(weight.shape)
    return shape[::-1] if type(module).__name__ == "Conv1D" else shape


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and stored buffers of a module, without those of its children.

    Args:
        module: any module.

    Returns:
        Name to tensor.
    """
    buffers = {key: value for key, value in module._buffers.items() if key not in module._non_persistent_buffers_set}
    return {key: value for key, value in {**module._parameters, **buffers}.items() if value is not None}


def _is_part(*modules: nn.Module) -> bool:
    return any(own_tensors(module) or kv_args(module) is not None for module in modules)


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    if type(one) is not type(other) or kv_args(one) != kv_args(other) or getattr(one, "scheme", None) != getattr(other, "scheme", None):
        return False
    left, right = own_tensors(one), own_tensors(other)
    return left.keys() == right.keys() and all(_same_bits(left[key], right[key]) for key in left)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return equal_bytes(raw_bytes(one), raw_bytes(other))


def layer_of(name: str) -> str:
    """Return the layer to which a part belongs.

    Args:
        name: dotted.

    Returns:
        The name up to its first number; the whole name where there is none.
    """
    pieces = name.split(".")
    numbers = [place for place, piece in enumerate(pieces) if piece.isdecimal()]
    return ".".join(pieces[: numbers[0] + 1]) if numbers else name


def group_into_layers(parts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the parts of each layer, layers in the order of their first part.

    Args:
        parts: in the order in which they run.

    Returns:
        Layer to parts.
    """
    layers: dict[str, tuple[str, ...]] = {}
    for name in parts:
        layers[layer_of(name)] = (*layers.get(layer_of(name), ()), name)
    return layers


def sorted_by_first_call(parts: Sequence[str], calls: Mapping[str, int]) -> list[str]:
    """Return the parts in the order in which they ran; those that did not run come last.

    Args:
        parts: names.
        calls: position of the first call, by name.

    Returns:
        The same names.
    """
    return sorted(parts, key=lambda name: calls.get(name, len(calls) + len(parts)))
