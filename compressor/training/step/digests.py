"""Short hashes of what a tensor holds and of where the random generators stand."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from compressor.pages import equal_bytes, raw_bytes


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors have the same metadata and the same bytes.

    Args:
        a: one tensor.
        b: the other.

    Returns:
        True when nothing tells them apart.
    """
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and equal_bytes(raw_bytes(a), raw_bytes(b))


def content_digest(tensor: Tensor) -> str:
    """Hash what a tensor holds.

    Args:
        tensor: any dense tensor; one on another device is copied to the host.

    Returns:
        16 hexadecimal digits.
    """
    copied = raw_bytes(tensor).to("cpu", copy=True)  # memory that numpy has seen can never be resized again
    return hashlib.blake2b(copied.numpy().data, digest_size=8).hexdigest()


def rng_digest() -> bytes:
    """Hash the state of the CPU's default generator."""
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).digest()
