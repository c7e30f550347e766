"""What planning has taken from Python: attributes, configurations and modes as they were, for what has changed when a run begins.

A recorded graph holds what the code between targets read there (`self.scale`, `config.flag`, `self.training`), and was proved with that.
Looked at are modules but for those inside a target, which run as they are, the objects and containers that they hold, attributes of the
classes of all these and what they hold, and the modes of torch. Tensors are read anew in each run.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.tracing.containers import RAW, attributes_of, content, in_slots
from compressor.tracing.footprint import is_of_model
from compressor.tracing.graph.nested_values import SETTINGS, Modes

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device, torch.Size, np.generic)
_ITSELF = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, logging.Logger)  # which one it is counts, not what lies in it
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_MAX_DEPTH = 5
_MAX_VALUES = 200_000
_MOST_SAID = 60  # characters of a value


class PythonValues:
    """What Python code between targets can read, as it is now."""

    def __init__(self, model: nn.Module, targets: Collection[str]) -> None:
        """Look at a model.

        Args:
            model: as it was afterwards.
            targets: dotted names.
        """
        self._targets = frozenset(targets)
        self._seen: set[int] = set()
        self._held: list[Any] = []  # so that no identity is used twice
        modes = Modes.current()
        self._values: dict[str, Any] = {f"torch {ask.__name__}": value for (ask, _), value in zip(SETTINGS, modes.settings, strict=True)}
        self._values |= {"torch is_inference_mode_enabled": torch.is_inference_mode_enabled()}
        self._values |= {f"torch autocast {kind}": (on, dtype) for kind, on, dtype in modes.autocast}
        for name, module in model.named_modules():
            if not self._is_inside(name):
                self._look_at(name, module)
        del self._seen, self._held

    def _is_inside(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:number]) in self._targets for number in range(1, len(parts))) or ("" in self._targets and name != "")

    def _look_at(self, name: str, module: nn.Module) -> None:
        for key, value in vars(module).items():
            if key not in _OF_EVERY_MODULE:
                self._take(f"{name}.{key}".lstrip("."), value)
        self._look_at_classes(type(module))

    def _look_at_classes(self, kind: type, depth: int = 0) -> None:
        for cls in kind.__mro__:
            if is_of_model(cls) and id(cls) not in self._seen:
                self._seen.add(id(cls))
                for key, value in vars(cls).items():
                    if not key.startswith("__"):
                        self._take(f"{cls.__qualname__}.{key}", value, depth)

    def _take(self, path: str, value: Any, depth: int = 0) -> None:
        if len(self._values) >= _MAX_VALUES or depth == _MAX_DEPTH or isinstance(value, Tensor | nn.Module):
            return
        if isinstance(value, (*_PLAIN, *_ITSELF)):
            self._values[path] = value
        elif isinstance(value, RAW):
            self._values[path] = content(value)
        elif isinstance(value, np.ndarray):
            self._values[path] = (value.shape, value.dtype.str, value.tobytes())
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._held.append(value)
            for key, part in _parts(value):
                self._take(f"{path}{key}", part, depth + 1)
            self._look_at_classes(type(value), depth + 1)

    def change(self, now: PythonValues) -> str:
        """Say what is another value now.

        Args:
            now: of the same model, later.

        Returns:
            The first such value with what it was and is; empty where there is none.
        """
        for path, value in self._values.items():
            if path not in now._values:
                return f"{path} was {_said(value)} and is gone"
            if not _same(value, now._values[path]):
                return f"{path} was {_said(value)} and is {_said(now._values[path])}"
        new = next((path for path in now._values if path not in self._values and path.rpartition(".")[0] not in self._targets), None)
        return "" if new is None else f"{new} is {_said(now._values[new])} and was not there"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items() if isinstance(key, str | int | enum.Enum | type))
    elif isinstance(value, list | tuple | deque):
        yield "", len(value)
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield "", tuple(sorted(repr(one) for one in value if isinstance(one, _PLAIN)))
    elif not type(value).__module__.startswith("torch"):
        yield from ((f".{key}", part) for key, part in (attributes_of(value) or {}).items())
        yield from ((f".{key.rpartition('.')[2]}", part) for key, part in in_slots(value).items())


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]} ..."
