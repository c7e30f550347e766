"""The headers of safetensors files: where each tensor lies, read and written without its bytes.

safetensors itself maps a file, or takes all tensors at once. Who reads and writes tensors one by one, or in parts, needs to know their
places only. A file that is made here has the bytes that safetensors would have written, once every tensor stands in its place.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save
from torch import Tensor

from compressor.errors import ModelError
from compressor.json_text import from_json
from compressor.pages import in_pieces

_LENGTH_BYTES, _ALIGNMENT = 8, 8
_MAX_HEADER = 100_000_000  # as safetensors has it
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F8_E8M0": torch.float8_e8m0fnu,
        "U16": torch.uint16,
        "U32": torch.uint32,
        "U64": torch.uint64,
        "C64": torch.complex64,
    }
)
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: name of the file in its folder.
        dtype: of the values.
        shape: of the tensor; it lies there contiguously.
        start: byte of the file at which it begins.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Say where the tensors of a file lie.

    Args:
        path: of a safetensors file.

    Returns:
        By name, in the order of the file.

    Raises:
        ModelError: it is no whole safetensors file, or holds a dtype that is not known here.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > min(size - _LENGTH_BYTES, _MAX_HEADER):
                raise _damaged(path, "its header is cut off")
            content = from_json(stream.read(length), once=True)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise _damaged(path, f"its header: {error}" if type(error) is ValueError else "its header is no JSON") from error
    begin = _LENGTH_BYTES + length
    if not isinstance(content, dict):
        raise _damaged(path, "its header is no JSON object")
    entries = [(name, _entry(path, name, one, begin)) for name, one in content.items() if name != "__metadata__"]
    found = dict(sorted(entries, key=lambda item: (item[1].start, item[1].num_bytes)))
    end = begin
    for name, one in found.items():
        if one.start != end:
            raise _damaged(path, f"{name} begins at byte {one.start:,}, and the tensor before it ends at {end:,}")
        end += one.num_bytes
    if end != size:
        raise _damaged(path, f"its tensors end at byte {end:,}, and the file at {size:,}")
    return found


def _entry(path: Path, name: str, entry: object, begin: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"{name} has no dtype, shape and place") from error
    if dtype not in DTYPES:
        raise ModelError(f"{path}: {name} is stored as {dtype!r}, and such values are not read here; convert that tensor first")
    if not all(type(size) is int and size >= 0 for size in (*shape, start, end)):
        raise _damaged(path, f"{name} has no dtype, shape and place")
    stored = StoredTensor(path.name, DTYPES[dtype], shape, begin + start)
    if stored.num_bytes != end - start:
        raise _damaged(path, f"{name} has {end - start:,} bytes, and its shape needs {stored.num_bytes:,}")
    return stored


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path}: not a whole safetensors file ({why}); fetch it again")


def read_parts(folder: Path, stored: StoredTensor, at_most: int = 1 << 20) -> Iterator[Tensor]:
    """Read the values of a tensor without mapping its file.

    Args:
        folder: that holds the file.
        stored: the tensor.
        at_most: values of one part.

    Yields:
        Values [n] in the order of the file.

    Raises:
        ModelError: the file cannot be read, or has been cut off.
    """
    size = stored.dtype.itemsize
    path = folder / stored.file
    try:
        with path.open("rb") as stream:
            stream.seek(stored.start)
            for first in range(0, stored.num_bytes, at_most * size):
                part = bytearray(stream.read(min(at_most * size, stored.num_bytes - first)))
                if len(part) < min(at_most * size, stored.num_bytes - first):
                    raise _damaged(path, "it ends within a tensor")
                yield torch.frombuffer(part, dtype=stored.dtype)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error


def write_header(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Make the file that safetensors would write of tensors, all of which are zero: its header, and a hole behind it.

    Args:
        tensors: name to tensor, of which shape and dtype are looked at.
        path: of the file.
        metadata: of its header.

    Raises:
        OSError: it cannot be written.
    """
    rank = _dtype_ranks()
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (rank[NAMES[item[1].dtype]], item[0].encode())):
        end = place + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        os.ftruncate(stream.fileno(), _LENGTH_BYTES + len(text) + place)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write the file that safetensors would write, of whose tensors, where they are mapped from files, no more than a piece is in memory.

    Args:
        tensors: name to tensor, of dtypes that such a file can hold.
        path: of the file, which must not exist.
        metadata: of its header.

    Raises:
        OSError: it cannot be written.
    """
    write_header(tensors, path, metadata)
    with path.open("r+b") as stream:
        for name, place in read_header(path).items():
            stream.seek(place.start)
            for piece in in_pieces(tensors[name]):
                stream.write(piece.numpy().data)


@functools.cache
def _dtype_ranks() -> Mapping[str, int]:
    """In which order safetensors writes tensors of several dtypes: asked of itself, for it is its own affair."""
    whole = save({name: torch.zeros(8, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items()})
    begin = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
    entries = from_json(whole[_LENGTH_BYTES:begin])
    return {name: rank for rank, name in enumerate(sorted(entries, key=lambda name: entries[name]["data_offsets"]))}
