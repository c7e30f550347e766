"""A digest of every tensor of a checkpoint, as it lies in the files: what compression.json says of them, so that damage shows later."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open


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
