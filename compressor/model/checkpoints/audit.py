"""The first look at a model before anything is done to it, the last one before a byte of it is written, and one at the files after that.

A scale that was never computed, or that became NaN on the way, gives a file that loads without complaint and talks nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from compressor.data.layouts import dense_parts, has_memory, shape_of
from compressor.errors import CheckpointError, ModelError, NumericsError, ResumeError, SchemeError
from compressor.model.folder import one_line, read_json, some
from compressor.nn.attention.kv_cache import kv_args, quantized_parts
from compressor.nn.layer import QuantizedLayer
from compressor.numerics.checksum import checksum
from compressor.numerics.qparams import QParams, check_qparams
from compressor.numerics.scheme import QuantizationScheme
from compressor.pages import HASHERS, in_pieces, let_go

_SHOWN_FAULTS = 3


@torch.no_grad()
def check_values(model: nn.Module, changed: Collection[str]) -> list[str]:
    """Look for NaN and infinity in the parameters of a model, before hours of calibration find them.

    Args:
        model: not yet compressed.
        changed: dotted names of the modules that will be compressed, or changed otherwise.

    Returns:
        A sentence on the parameters of other modules that hold NaN or infinity, which stay as they are; empty where there are none.

    Raises:
        NumericsError: a parameter of one of these modules holds NaN or infinity.
    """
    spoilt = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel() or not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            continue
        low, high = parameter.aminmax()  # one pass, and NaN wins
        let_go([parameter])
        if name.rpartition(".")[0] in changed and not bool(low.isfinite() & high.isfinite()):
            raise NumericsError(
                f"{name}: holds NaN or infinity, which have no scale and no place in an order; repair the model, or ignore "
                f"{name.rpartition('.')[0]}"
            )
        if not bool(low.isfinite() & high.isfinite()):
            spoilt.append(name)
    return [f"{len(spoilt)} parameters that stay as they are hold NaN or infinity ({some(spoilt)})"] if spoilt else []


def audit_qparams(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> None:
    """Check every scale, zero point and code of a compressed model.

    Args:
        model: the model, with its quantized layers in place.
        schemes: name of every quantized layer to its scheme.

    Raises:
        CheckpointError: `schemes` and the model's quantized layers are not the same, or a layer holds a scale that is not finite and
            positive, a zero point or code that its format does not have, or a tensor of the wrong shape.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    different = {name for name in layers.keys() | schemes.keys() if not _same(layers.get(name), schemes.get(name))}
    if different:
        raise CheckpointError(
            f"checkpoint: {len(different)} modules are not what their scheme says ({some(different)}); pass each layer's scheme"
        )
    faults = [fault for name, layer in layers.items() if (fault := _fault(name, layer)) is not None]
    faults += [fault for name, module in model.named_modules() if (fault := _kv_fault(name, module)) is not None]
    if faults:
        shown = "; ".join(faults[:_SHOWN_FAULTS])
        raise CheckpointError(f"checkpoint: {len(faults)} of {len(layers)} quantized modules cannot be written: {shown}")


def _same(layer: QuantizedLayer | None, scheme: QuantizationScheme | None) -> bool:
    """Whether the layer was made by the scheme; whom else the scheme was meant for does not matter."""
    return layer is not None and scheme is not None and layer.scheme.model_copy(update={"targets": scheme.targets}) == scheme


def _fault(name: str, layer: QuantizedLayer) -> str | None:
    try:
        _check_shapes(name, layer)
        check_qparams(layer.weight_qparams(), f"{name}.weight", layer.weight_args)
        _check_codes(name, layer)
        _check_input(name, layer)
    except (NumericsError, SchemeError) as error:
        return str(error)
    return None


def _kv_fault(name: str, attention: nn.Module) -> str | None:
    args = kv_args(attention)
    if args is None or args.dynamic:
        return None
    try:
        for part in quantized_parts(attention):
            qparams = QParams(attention.get_buffer(f"{part}_scale"), getattr(attention, f"{part}_zero_point", None))
            check_qparams(qparams, f"{name}.{part}", args)
    except NumericsError as error:
        return str(error)
    return None


def _check_shapes(name: str, layer: QuantizedLayer) -> None:
    tensors = dict(layer.named_buffers())
    for key, (shape, dtype) in layer.specs().items():
        found = tensors.get(key)
        if found is None:
            raise SchemeError(f"{name}.{key}: was never computed; quantize the weight and calibrate the input")
        if found.shape != shape:
            raise SchemeError(f"{name}.{key}: shape {tuple(found.shape)} is not {shape}; build the layer with from_linear")
        if found.dtype.is_floating_point != dtype.is_floating_point or found.dtype.itemsize < dtype.itemsize:
            raise SchemeError(f"{name}.{key}: {found.dtype} is not {dtype}; build the layer with from_linear")
    bias = getattr(layer, "bias", None)
    if bias is not None and bias.shape != tuple(layer.weight_size)[:1]:
        raise SchemeError(f"{name}.bias: shape {tuple(bias.shape)} is not {tuple(layer.weight_size)[:1]}; build the layer with from_linear")
    stored_shape = tensors.get("weight_shape")
    if stored_shape is not None and stored_shape.tolist() != list(layer.weight_size):
        raise SchemeError(
            f"{name}.weight_shape: {stored_shape.tolist()} is not {list(layer.weight_size)}; build the layer with from_linear"
        )


def _check_codes(name: str, layer: QuantizedLayer) -> None:
    low, high = layer.weight_args.code_range
    codes = dict(layer.named_buffers()).get("weight")  # packed codes have no room for more than their range
    if codes is not None and not _lies_in(codes.float() if codes.is_floating_point() else codes, low, high):
        raise NumericsError(f"{name}.weight: a code is NaN or not in {low:g} to {high:g}; quantize it with compressor.numerics.quantize")
    g_idx = dict(layer.named_buffers()).get("weight_g_idx")
    if g_idx is not None and not _lies_in(g_idx, 0, layer.get_buffer("weight_scale").shape[-1] - 1):
        raise NumericsError(f"{name}.weight_g_idx: a column belongs to a group that does not exist; compute it with the weight's codes")
    bias = dict(layer.named_parameters()).get("bias")
    if bias is not None and not bool(torch.isfinite(bias).all()):
        raise NumericsError(f"{name}.bias: is not finite; look for NaN or infinity in the model")


def _check_input(name: str, layer: QuantizedLayer) -> None:
    args = layer.scheme.input_activations
    if args is None or args.dynamic is True:
        return
    buffers = dict(layer.named_buffers())
    if args.has_global_scale:
        check_qparams(QParams(torch.ones(1, dtype=torch.float32), None, buffers["input_global_scale"]), f"{name}.input", args)
        return
    check_qparams(QParams(buffers["input_scale"], buffers.get("input_zero_point")), f"{name}.input", args)


def _lies_in(values: Tensor, low: float, high: float) -> bool:
    """False for NaN as well."""
    return bool(((values >= low) & (values <= high)).all())


# A digest of every tensor of a checkpoint, as it lies in the files: what compression.json says of them, so that damage shows later.


def tensor_digests(folder: Path) -> dict[str, str]:
    """Read back every tensor of a folder and hash it.

    Args:
        folder: holds safetensors files.

    Returns:
        By name: dtype and shape as the file names them, and the sha256 of the bytes, such as `BF16[64,128] 2c26b4...`.
    """
    found: dict[str, str] = {}
    with ThreadPoolExecutor(HASHERS) as pool:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                found |= zip(names, pool.map(partial(_digest, file), names), strict=True)
    return found


def _digest(file: Any, name: str) -> str:
    described, digest = file.get_slice(name), hashlib.sha256()
    for piece in in_pieces(file.get_tensor(name)):
        digest.update(piece.numpy().data)
    sizes = ",".join(map(str, described.get_shape()))
    return f"{described.get_dtype()}[{sizes}] {digest.hexdigest()}"


def check_written(folder: Path, record: Mapping[str, Any]) -> None:
    """Refuse to call a checkpoint finished that is no longer what was written.

    Args:
        folder: of the checkpoint.
        record: its compression.json.

    Raises:
        ResumeError: a tensor is missing or has other bytes than `tensors` says, config.json names other schemes, or a file cannot be read.
    """
    noted = record.get("tensors")
    try:
        found = tensor_digests(folder)
        config = read_json(folder / "config.json") if (folder / "config.json").is_file() else record
        changed = "the record of its tensors" if not isinstance(noted, Mapping) else next(
            (name for name in sorted(found.keys() | noted.keys()) if found.get(name) != noted.get(name)), None
        )  # fmt: skip
        if changed is None and config.get("quantization_config") != record.get("quantization_config"):
            changed = "the quantization_config of config.json"
    except (OSError, SafetensorError, ModelError) as error:
        changed = f"a file ({one_line(error)})"
    if changed is not None:
        raise ResumeError(f"{folder}: holds the result of this run, but {changed} is not what was written; remove the folder to run again")


# The invariant of every checkpoint: what no modifier has claimed is, byte for byte, what was loaded.
#
# Whatever writes to a weight that the recipe leaves alone (a forward that rescales its layers, a hook, a bug in an engine or a modifier),
# it is found here, before anything is saved, and by name.


class Content(NamedTuple):
    """What a stored tensor is compared by."""

    dtype: torch.dtype
    shape: tuple[Any, ...]
    checksums: tuple[int, ...]


def contents(model: nn.Module, known: Mapping[str, Content] | None = None, exempt: Collection[str] = frozenset()) -> dict[str, Content]:
    """Take the contents of everything that a checkpoint stores.

    Args:
        model: not modified.
        known: earlier contents, which are taken over for names that are still there.
        exempt: names of tensors that are left out.

    Returns:
        Name in the state_dict to content.
    """
    tensors = {name: tensor for name, tensor in _stored(model) if name not in exempt}
    return _contents(tensors, {name: content for name, content in (known or {}).items() if name in tensors})


def check_unclaimed(model: nn.Module, base: Mapping[str, Content], claimed: Collection[str], exempt: Collection[str] = frozenset()) -> None:
    """Refuse a model in which something has changed that nobody was to change.

    Args:
        model: not modified.
        base: `contents` of the model before anything was done to it.
        claimed: dotted names of the modules that modifiers change; what is new below them belongs to them.
        exempt: names of tensors that may change, too, such as those that are trained.

    Raises:
        CheckpointError: another tensor differs from the base's, is gone, or is new.
    """
    found, claimed = dict(_stored(model)), _by_all_names(model, claimed)
    mine = {name for name in found if _owner(name) in claimed or name in exempt}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    objects = {name: id(tensor) for name, tensor in named}
    tied = {objects.get(name) for name in mine} - {None}  # the head of a model whose embedding is pruned; memory alone ties nothing
    free = {name: tensor for name, tensor in found.items() if name not in mine and objects.get(name) not in tied}
    now = _contents(free, {})
    wrong = [name for name in free if name in base and now[name] != base[name]]
    wrong += [name for name in free if name not in base and not _is_inside(name, claimed)]
    wrong += [name for name in base if name not in found and name not in exempt and not _is_inside(name, claimed)]
    if wrong:
        raise CheckpointError(
            f"{wrong[0]}: {len(wrong)} tensors ({some(wrong)}) are no longer what was loaded, and no modifier has claimed their modules; "
            "see whether the model's forward or a hook writes to them (in memory they stay as they are now: load the model anew); a "
            "modifier that means to change them says so with state.touch()"
        )


def _by_all_names(model: nn.Module, claimed: Collection[str]) -> set[str]:
    """The same modules, and by what other names the model knows them."""
    modules = {id(module) for name, module in model.named_modules() if name in claimed}
    return {*claimed, *(name for name, module in model.named_modules(remove_duplicate=False) if id(module) in modules)}


def _contents(tensors: Mapping[str, Tensor], known: Mapping[str, Content]) -> dict[str, Content]:
    found = dict(known)
    seen: dict[tuple[object, ...], int] = {}  # tied tensors are read once
    for name, tensor in tensors.items():
        if name not in found:
            found[name] = Content(tensor.dtype, shape_of(tensor), _checksums(tensor, seen))
    return found


def _checksums(tensor: Tensor, seen: dict[tuple[object, ...], int]) -> tuple[int, ...]:
    if tensor.is_quantized or not has_memory(tensor):
        return tuple(map(checksum, dense_parts(tensor)))
    place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    if place not in seen:
        seen[place] = checksum(tensor)
    return (seen[place],)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and not value.is_meta:
            yield name, value


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_inside(name: str, modules: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:number]) in modules for number in range(len(parts)))
