"""An independent reader of safetensors folders: bytes of the file in, tensors out, and a list of what is wrong with the files.

It shares no code with what it checks: neither our writer nor the safetensors package. Format: 8 bytes little-endian length of the
header, the header as JSON (name -> dtype, shape, data_offsets relative to the end of the header), then the tensors without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000
MISSHAPEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What reading JSON shows where an entry is of another kind, missing or beyond all numbers."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `start` and `end` are byte positions in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass
class Checkpoint:
    """The tensors of a folder of safetensors files, and everything that is wrong with the files themselves."""

    folder: Path
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_files: int = 0

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint as it lies on disk, where this one shows some of its tensors otherwise."""
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together, without headers."""
        return sum(entry.end - entry.start for entry in self.stored.entries.values())

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes of one tensor as they lie in the file."""
        entry = self.entries[name]
        with entry.path.open("rb") as file:
            file.seek(entry.start)
            return np.frombuffer(bytearray(file.read(entry.end - entry.start)), dtype=np.uint8)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, a copy of the file's bytes."""
        entry = self.entries[name]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.from_numpy(self.raw(name)).view(entry.dtype).reshape(entry.shape)

    def parts(self, module: str) -> dict[str, torch.Tensor]:
        """Return every tensor that lies directly in a module, by its last name."""
        names = [name for name in self.entries if name.rpartition(".")[0] == module]
        return {name.rpartition(".")[2]: self.tensor(name) for name in names}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the header of one safetensors file and check it against the file's size.

    Args:
        path: the file.
    Returns:
        The tensors by name.
    Raises:
        ValueError: the file is not a well-formed safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{path.name}: {size} bytes do not hold the header of {length} bytes that the first 8 bytes announce")
        header = _json(file.read(length))
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise ValueError(f"{path.name}: tensor {name} starts at byte {entry.start}, the one before it ends at {position}")
        position = entry.end
    if position != size:
        raise ValueError(f"{path.name}: the tensors end at byte {position}, the file has {size}")
    return entries


def _json(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice in one JSON object")
    return result


def _entry(path: Path, name: str, fields: Mapping[str, Any], data_start: int) -> TensorEntry:
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"{path.name}: tensor {name} has the unknown dtype {fields['dtype']}")
    dtype, shape = DTYPES[fields["dtype"]], tuple(int(size) for size in fields["shape"])
    start, end = (int(offset) + data_start for offset in fields["data_offsets"])
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{path.name}: tensor {name} of shape {list(shape)} and dtype {fields['dtype']} cannot lie in {end - start} bytes")
    return TensorEntry(path, dtype, shape, start, end)


def whole(value: Any) -> int:
    """Take a whole number of JSON, and nothing that only becomes one.

    Args:
        value: as read.

    Returns:
        It.

    Raises:
        TypeError: a text, a flag, or a number with a part behind the point.
    """
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def read_checkpoint(folder: Path, *, finished: bool = True) -> Checkpoint:
    """Read the headers of the safetensors files of a folder; what is wrong with them is listed, not raised.

    Args:
        folder: holds model.safetensors, or shards and model.safetensors.index.json.
        finished: the folder is a finished checkpoint, in which any further safetensors file is a problem; else only the files that a
            loader reads are looked at, since people keep other arrays and formats beside a base model.
    Returns:
        The checkpoint; no entries when there is nothing to read.
    """
    checkpoint = Checkpoint(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not finished and (folder / "model.safetensors").is_file():
        paths = [folder / "model.safetensors"]
    elif not finished and (folder / "model.safetensors.index.json").is_file():
        shards = _index_files(folder / "model.safetensors.index.json")
        paths = [path for path in paths if path.name in shards]
    checkpoint.num_files = len(paths)
    for path in paths:
        try:
            entries = read_header(path)
        except OSError as error:  # a folder or a link to nowhere under that name
            checkpoint.problems.append(f"{path.name}: cannot be read ({error.strerror})")
            continue
        except MISSHAPEN as error:
            checkpoint.problems.append(f"{path.name}: {error}" if not str(error).startswith(path.name) else str(error))
            continue
        twice = sorted(entries.keys() & checkpoint.entries.keys())
        checkpoint.problems += [f"{path.name}: tensor {name} lies in {checkpoint.entries[name].path.name} too" for name in twice]
        checkpoint.entries.update(entries)
    index = folder / "model.safetensors.index.json"
    if index.is_file() and (finished or paths != [folder / "model.safetensors"]):
        checkpoint.problems += _index_problems(checkpoint, index)
    elif [path.name for path in paths] != ["model.safetensors"]:
        found = ", ".join(path.name for path in paths) or "no safetensors file"
        checkpoint.problems.append(f"without an index there must be model.safetensors and nothing else, found {found}")
    return checkpoint


def _index_files(path: Path) -> set[str]:
    """The shards that an index names; none where it cannot be read, which `_index_problems` then reports."""
    try:
        return set(_read_index(path)[0].values())
    except MISSHAPEN:
        return set()


def _read_index(path: Path) -> tuple[dict[str, Any], Any]:
    """The file of each tensor, and what the index says of their size, None where it says nothing."""
    index = _json(path.read_bytes())
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is {json.dumps(metadata)}, and no object, without which transformers does not read it")
    return dict(index["weight_map"]), metadata.get("total_size")


def _index_problems(checkpoint: Checkpoint, path: Path) -> list[str]:
    try:
        weight_map, total = _read_index(path)
    except MISSHAPEN as error:
        return [f"{path.name}: cannot be read as an index: {error!r}"]
    files = {name: entry.path.name for name, entry in checkpoint.entries.items()}
    problems = [f"{path.name}: {name} should lie in {file}, found in {files.get(name, 'no file')}"
                for name, file in sorted(weight_map.items()) if files.get(name) != file]  # fmt: skip
    problems += [f"{path.name}: tensor {name} of {files[name]} is not listed" for name in sorted(files.keys() - weight_map.keys())]
    if total is not None and total != checkpoint.num_bytes:
        problems.append(f"{path.name}: total_size is {total}, the tensors have {checkpoint.num_bytes} bytes")
    return problems
