"""Values that a later change of the original does not reach, to compare with what is there later."""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any, TypeGuard

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
# Values that are told by what they print; one of a class of one's own may hold more, and is told by identity.
_PRINTED = (
    *(bool, int, float, complex, str, bytes, Decimal, date, time, timedelta, PurePath),
    *(torch.dtype, torch.device, np.dtype, np.generic),
)
CONTAINERS = (list, dict, set, deque, MappingProxyType)
_HOLDING = (*CONTAINERS, tuple, frozenset)
_MAX_ARRAY_BYTES = 1 << 16  # to look at larger ones would cost as much as a step
_MAX_ITEMS, _MAX_TUPLE = 64, 4096
_MAX_BITS = 1024  # Python refuses to write out whole numbers of many digits, of 641 where it is set so
_MAX_SPELLED = 400
_NAMED = (type, FunctionType, MethodType, BuiltinFunctionType)


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
        is_plain = type(thing) in (Tensor, nn.Parameter) and thing.layout is torch.strided  # type: ignore[attr-defined]
        self._place = (thing.data_ptr(), thing.stride()) if is_plain else None  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        """Compare by identity, and place."""
        return isinstance(other, Same) and self._object is other._object and self._place == other._place

    def __hash__(self) -> int:
        """Hash the identity."""
        return id(self._object)

    def __repr__(self) -> str:
        """Name what it is, without an address, and without asking an object that may raise."""
        if self._object is MISSING:
            return repr(MISSING)
        is_named = issubclass(type(self._object), _NAMED)
        return str(self._object.__qualname__) if is_named else type(self._object).__name__  # type: ignore[attr-defined]


def is_long(value: object) -> TypeGuard[int]:
    """Say whether a value is a whole number that Python may refuse to write out.

    Args:
        value: anything.

    Returns:
        False for all but whole numbers of many digits.
    """
    return isinstance(value, int) and value.bit_length() > _MAX_BITS


def exact_text(value: object) -> str:
    """Write a value out.

    Args:
        value: of a kind that is told by what it prints.

    Returns:
        As `repr`, but a long whole number in hexadecimal digits, of which Python writes any number.
    """
    return hex(value) if is_long(value) else repr(value)


def spelled(value: object) -> str:
    """Write a value out for a message.

    Args:
        value: as for `exact_text`.

    Returns:
        Its text, or the beginning of it.
    """
    return _begin(exact_text(value))


def _begin(text: str) -> str:
    return text if len(text) <= _MAX_SPELLED else f"{text[:_MAX_SPELLED]}... ({len(text)} characters)"


class Exact:
    """Equal to a value of the very type that prints alike: 1 is not 1.0, and 0.0 is not -0.0.

    Args:
        value: nothing changes it in place.
    """

    __slots__ = ("_key",)

    def __init__(self, value: object) -> None:
        self._key = (type(value), exact_text(value))

    def __eq__(self, other: object) -> bool:
        """Compare type and text."""
        return isinstance(other, Exact) and self._key == other._key

    def __hash__(self) -> int:
        """Hash type and text."""
        return hash(self._key)

    def __repr__(self) -> str:
        """Spell the value."""
        return _begin(self._key[1])


class Plain:
    """What a container holds, past the methods of a class of one's own: these may raise, count, or have no end.

    Args:
        content: a list, dict, set, deque or tuple.
    """

    __slots__ = ("_base", "content")

    def __init__(self, content: Any) -> None:
        self.content = content
        bases = (base for base in type(content).__mro__ if is_foreign(base.__module__) and issubclass(base, _HOLDING))
        self._base: Any = next(bases, type(content))

    def __len__(self) -> int:
        """Count the items."""
        return int(self._base.__len__(self.content))

    def __iter__(self) -> Iterator[Any]:
        """Give the items; of a mapping the keys."""
        return iter(self._base.__iter__(self.content))

    def items(self) -> Iterable[tuple[Any, Any]]:
        """Give keys, or places, with what lies there."""
        return self._base.items(self.content) if isinstance(self.content, Mapping) else enumerate(self)

    def values(self) -> Any:
        """Give a live view of what it holds beside its keys."""
        return self._base.values(self.content) if isinstance(self.content, Mapping) else self


def is_small_array(value: object) -> bool:
    """Say whether a value is an array, of numpy or of Python, whose bytes are compared.

    Args:
        value: anything.

    Returns:
        False, too, for arrays of objects and those of more than 64 KiB, which are compared by identity.
    """
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MAX_ARRAY_BYTES and not value.dtype.hasobject
    return isinstance(value, bytearray | array) and len(value) * getattr(value, "itemsize", 1) <= _MAX_ARRAY_BYTES


def kind(value: object) -> object:
    """Return what a container is beside its content: its class, how long it may grow, and what it makes for a missing key.

    Args:
        value: a list, a dict or their like.

    Returns:
        What can be compared later.
    """
    if isinstance(value, deque):
        return (Same(type(value)), value.maxlen)
    return (Same(type(value)), Same(value.default_factory)) if isinstance(value, defaultdict) else Same(type(value))


def fact(value: object) -> object:
    """Return what can be compared later of a value, if the content of lists, dicts and their like is compared by itself.

    Args:
        value: anything.

    Returns:
        As `frozen`, but of such a container its kind alone.
    """
    if isinstance(value, CONTAINERS):
        return kind(value)
    is_fixed = isinstance(value, tuple | frozenset) and len(Plain(value)) <= _MAX_TUPLE
    return (kind(value), *map(fact, Plain(value))) if is_fixed else frozen(value)


def _is_printed(value: object) -> bool:
    return isinstance(value, _PRINTED) and is_foreign(type(value).__module__) and not (isinstance(value, np.void) and value.dtype.hasobject)


def _parts(value: slice | range | Fraction) -> object:
    if isinstance(value, slice | range):
        return (type(value).__name__, *map(frozen, (value.start, value.stop, value.step)))
    return ("Fraction", *map(frozen, value.as_integer_ratio())) if type(value) is Fraction else Same(value)


def frozen(value: object, depth: int = 6) -> object:
    """Return what can be compared later: values by type and text, small containers by their content and its order, the rest by identity.

    Args:
        value: anything.
        depth: containers within containers that are looked into; deeper ones, and those that hold themselves, are compared by identity.

    Returns:
        A value that later changes of `value` do not reach.
    """
    if value is None or type(value) in (str, bytes):  # equal to no value of another type
        return value
    if _is_printed(value):
        return Exact(value)
    if isinstance(value, np.ndarray) and is_small_array(value):
        return ("array", value.shape, value.strides, str(value.dtype), value.tobytes())
    if isinstance(value, bytearray | array) and is_small_array(value):
        return (type(value).__name__, getattr(value, "typecode", "B"), bytes(value))
    if isinstance(value, slice | range | Fraction):
        return _parts(value)
    if isinstance(value, MethodType):  # made anew whenever it is asked for
        return ("method", Same(value.__self__), Same(value.__func__))
    if depth < 0 or not isinstance(value, _HOLDING):
        return Same(value)
    held = Plain(value)
    if len(held) > _MAX_ITEMS:
        return (kind(value), len(held)) if isinstance(value, CONTAINERS) else Same(value)
    if isinstance(value, dict | MappingProxyType):
        return (kind(value), *((frozen(key, depth - 1), frozen(item, depth - 1)) for key, item in held.items()))
    return (kind(value), *(frozen(item, depth - 1) for item in held))
