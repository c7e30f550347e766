"""A digest of every tensor of a checkpoint, as it lies in the files: what compression.json says of them, so that damage shows later."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from compressor.errors import ModelError, ResumeError
from compressor.model.folder import one_line, read_json


def tensor_digests(folder: Path) -> dict[str, str]:
    """Read back every tensor of a folder and hash it.

    Args:
        folder: holds safetensors files.

    Returns:
        By name: dtype and shape as the file names them, and the sha256 of the bytes, such as `BF16[64,128] 2c26b4...`.
    """
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                described = file.get_slice(name)
                sizes = ",".join(map(str, described.get_shape()))
                raw = file.get_tensor(name).reshape(-1).view(torch.uint8).numpy()
                found[name] = f"{described.get_dtype()}[{sizes}] {hashlib.sha256(raw).hexdigest()}"
    return found


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
