"""Tensors of a golden as bytes of one safetensors file without metadata, and back; their hashes; the hashes of inputs and recipes.

Equal tensors give equal files, byte for byte. A dtype that safetensors does not hold lies in the file as plain bytes; its true dtype and
shape stand in the manifest, as those of every tensor do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from compressor.errors import UserInputError
from compressor.json_text import to_json
from harness.errors import GoldenError
from harness.goldens.store.manifest import TensorEntry
from harness.tolerance.bits import dtype_name, dtype_of, from_bytes, to_bytes, without_bytes

# What safetensors and every reader of it hold as it is; all else is stored as bytes.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_NATIVE = frozenset([*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
_RESERVED = "__metadata__"
"""A key of the file format itself."""


def as_tensors(name: str, given: Any) -> dict[str, Tensor]:
    """Bring what a test gave into one form: tensors on the CPU, by name, contiguous, free of views and gradients.

    Args:
        name: of the golden, for errors.
        given: one tensor (which is named `value`), or a mapping from name to tensor; numpy arrays count as tensors.

    Returns:
        The tensors, sorted by name.

    Raises:
        GoldenError: there is nothing to compare, a name is empty, or something is no dense tensor with values.
    """
    named = given if isinstance(given, Mapping) else {"value": given}
    if not named:
        raise GoldenError(f"golden {name!r}: no tensors were given, and a golden of nothing checks nothing; give one or more")
    for key in named:
        if key == _RESERVED:
            raise GoldenError(f"golden {name!r}: {key!r} is where a file of safetensors has its metadata; give the tensor another name")
        if not isinstance(key, str) or not key.isprintable() or not key:
            raise GoldenError(f"golden {name!r}: {key!r} is no name for a tensor; give a printable text")
    return {key: _as_tensor(f"golden {name!r}, tensor {key!r}", named[key]) for key in sorted(named)}


def _as_tensor(where: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray | np.generic):
        try:
            value = torch.from_numpy(np.array(value))
        except TypeError as error:
            raise GoldenError(f"{where}: {error}; give a tensor") from error
    if not isinstance(value, Tensor):
        raise GoldenError(f"{where}: a {type(value).__name__} is no tensor; give a torch tensor or a numpy array")
    kind = without_bytes(value)
    if kind:
        raise GoldenError(f"{where}: a {kind} tensor has no plain bytes to compare; give its parts as dense tensors")
    plain = value.detach().as_subclass(Tensor)
    return plain.resolve_conj().resolve_neg().cpu().contiguous()


def devices_of(given: Any) -> set[str]:
    """Return the kinds of device that the given tensors lie on."""
    values = given.values() if isinstance(given, Mapping) else [given]
    return {value.device.type for value in values if isinstance(value, Tensor)}


def describe(tensor: Tensor) -> TensorEntry:
    """Return hash of the bytes, shape and dtype of a tensor."""
    return TensorEntry(_sha256(tensor), list(tensor.shape), dtype_name(tensor.dtype))


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(to_bytes(tensor).numpy().tobytes()).hexdigest()


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file without metadata.

    Args:
        tensors: contiguous, on the CPU.

    Returns:
        The file.
    """
    # A clone each: safetensors refuses tensors that share memory, and two outputs of a test may be one.
    held = {name: tensor.clone() if tensor.dtype in _NATIVE else to_bytes(tensor).clone().reshape(-1) for name, tensor in tensors.items()}
    data: bytes = save(held)
    return data


def decode(where: str, data: bytes, entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """Read a file back and hold it against its manifest.

    Args:
        where: names the file in errors.
        data: the file.
        entries: hash, shape and dtype of each tensor.

    Returns:
        The tensors by name.

    Raises:
        GoldenError: the file is no safetensors file, or not the one that the manifest describes.
    """
    try:
        held = load(data)
    except SafetensorError as error:
        raise GoldenError(f"{where}: is corrupt or cut off ({error}); take it from version control again") from error
    if set(held) != set(entries):
        raise GoldenError(f"{where}: holds {sorted(held)} where its manifest lists {sorted(entries)}; take both from one version")
    return {name: _decoded(f"{where}: tensor {name!r}", held[name], entry) for name, entry in entries.items()}


def _decoded(where: str, held: Tensor, entry: TensorEntry) -> Tensor:
    try:
        dtype = dtype_of(entry.dtype)
    except UserInputError as error:
        raise GoldenError(f"{where}: {error}") from error
    size = torch.empty(0, dtype=dtype).element_size()
    stored = dtype if dtype in _NATIVE else torch.uint8
    if held.dtype != stored or held.numel() * held.element_size() != math.prod(entry.shape) * size:
        raise GoldenError(f"{where}: is not the {entry.dtype} {entry.shape} that its manifest lists; take both from one version")
    tensor = held if dtype in _NATIVE else from_bytes(held, dtype, tuple(entry.shape))
    if list(tensor.shape) != entry.shape or _sha256(tensor) != entry.sha256:
        raise GoldenError(f"{where}: differs from the hash or shape in its manifest; take both from one version")
    return tensor


def hash_inputs(name: str, given: Mapping[str, Any] | None) -> dict[str, TensorEntry]:
    """Return the hash of each input of a golden; tensors by their bytes, files by their content, all else by its JSON form.

    Args:
        name: of the golden, for errors.
        given: inputs by name.

    Returns:
        The hashes by name.

    Raises:
        GoldenError: an input is of a kind that has no bytes of its own.
    """
    return {key: _hash_input(f"golden {name!r}, input {key!r}", value) for key, value in sorted((given or {}).items())}


def _hash_input(where: str, value: Any) -> TensorEntry:
    if isinstance(value, Tensor | np.ndarray):
        return describe(_as_tensor(where, value))
    kind, data = canonical_bytes(where, value)
    return TensorEntry(hashlib.sha256(data).hexdigest(), [len(data)], kind)


def hash_recipe(name: str, recipe: Any) -> str | None:
    """Return the hash of a recipe: of its text, of a file's content, or of its JSON form.

    Args:
        name: of the golden, for errors.
        recipe: text, bytes, a path, JSON types, or anything with `model_dump` or `dump`; None for none.

    Returns:
        The hash, or None.

    Raises:
        GoldenError: the recipe is of another kind.
    """
    if recipe is None:
        return None
    return hashlib.sha256(canonical_bytes(f"golden {name!r}, recipe", recipe)[1]).hexdigest()


def canonical_bytes(where: str, value: Any) -> tuple[str, bytes]:
    """Return the kind and the bytes of something that is no tensor; equal values give equal bytes.

    Args:
        where: names it in errors.
        value: text, bytes, a path to a file, JSON types, or anything with `model_dump` or `dump`.

    Returns:
        A word for its kind, and bytes.

    Raises:
        GoldenError: it has no such form.
    """
    if isinstance(value, bytes):
        return "bytes", value
    if isinstance(value, str):
        return "text", value.encode("utf-8", "surrogatepass")
    if isinstance(value, Path):
        return "file", value.read_bytes()
    for method in ("model_dump", "dump"):
        if callable(getattr(value, method, None)):
            value = getattr(value, method)()
            break
    try:
        return "json", value.encode() if isinstance(value, str) else to_json(_jsonable(value)).encode()
    except TypeError as error:
        raise GoldenError(f"{where}: {error}; give a tensor, a text, bytes, a path or JSON types") from error


def _jsonable(value: Any) -> Any:
    """Keep apart what JSON would merge: keys that are no texts are refused, tuples and lists are one."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping has keys that are no texts")
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, list | tuple) else value
