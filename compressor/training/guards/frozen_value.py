"""Values that a later change of the original does not reach, to compare with what is there later."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from functools import cache
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

# Whose code is looked into by the guards: a user's is, that of libraries is not.

_LIBRARIES = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "transformers", "tokenizers", "datasets", "peft", "accelerate", "einops", "safetensors"),
        *("compressor", "numpy", "scipy", "sklearn", "pandas", "PIL", "matplotlib", "rich", "tqdm", "pydantic", "pydantic_core", "onnx"),
        *("pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis", "huggingface_hub", "wandb", "tensorboard", "lightning"),
    }
)
_FOREIGN = _LIBRARIES | sys.stdlib_module_names


@cache  # asked at every return of a function while a step is recorded
def is_foreign(module_name: str | None) -> bool:
    """Say whether code is a library's that no user changes while it trains, or that speaks for itself.

    Args:
        module_name: the module that defines it.

    Returns:
        True for the standard library, torch, transformers and their like, and this package.
    """
    return (module_name or "").split(".", 1)[0] in _FOREIGN


PLAIN = (bool, int, float, complex, str, bytes, type(None))
MAX_ARRAY_BYTES = 1 << 16  # larger ones are compared by identity: to look at them would cost as much as a step
_MAX_ITEMS = 64


class _Missing:
    def __repr__(self) -> str:
        """Spell what is not there."""
        return "(absent)"


MISSING = _Missing()


class Same:
    """Equal to itself alone, a tensor as long as it lies where it lay; holds the object, so that its identity is not given to another.

    Args:
        thing: the object.
    """

    __slots__ = ("_object", "_place")

    def __init__(self, thing: object) -> None:
        self._object = thing
        is_plain = isinstance(thing, Tensor) and type(thing) in (Tensor, nn.Parameter) and thing.layout is torch.strided
        self._place = (thing.data_ptr(), thing.stride()) if is_plain else None  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        """Compare by identity, and place."""
        return isinstance(other, Same) and self._object is other._object and self._place == other._place

    def __hash__(self) -> int:
        """Hash the identity."""
        return id(self._object)

    def __repr__(self) -> str:
        """Name what it is, without an address."""
        return repr(MISSING) if self._object is MISSING else str(getattr(self._object, "__qualname__", type(self._object).__name__))


def frozen(value: object, depth: int = 6) -> object:
    """Return what can be compared later: numbers and strings by value, small containers by their content, the rest by identity.

    Args:
        value: anything.
        depth: containers within containers that are looked into; deeper ones, and those that hold themselves, are compared by identity.

    Returns:
        A value that later changes of `value` do not reach.
    """
    if type(value) in PLAIN:
        return value
    if depth < 0:
        return Same(value)
    if isinstance(value, np.ndarray) and value.nbytes <= MAX_ARRAY_BYTES and not value.dtype.hasobject:
        return ("array", value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, bytearray | array) and len(value) <= MAX_ARRAY_BYTES // 8:
        return (type(value).__name__, bytes(value))
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        return (type(value).__name__, *(frozen(item, depth - 1) for item in value))
    if isinstance(value, dict | MappingProxyType) and len(value) <= _MAX_ITEMS:
        return ("dict", *((frozen(key, depth - 1), frozen(item, depth - 1)) for key, item in value.items()))
    if isinstance(value, set | frozenset) and len(value) <= _MAX_ITEMS:
        return ("set", frozenset(frozen(item, depth - 1) for item in value))
    if isinstance(value, list | dict | set | deque | MappingProxyType):
        return (type(value).__name__, len(value))
    return Same(value)
