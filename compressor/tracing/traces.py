"""What a run finds changed in Python since it was planned, and what its forwards leave on a model, taken back when it ends.

Planning has seen which containers, tensors and generators a forward changes; only these are looked at, which for most models is nothing.
A change is a forward's, and not one of compression, if it came while forwards ran; it is taken back only where nobody has changed the
same thing since.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from compressor.data.collate import Batch
from compressor.random_state import generator_state, set_generator_state
from compressor.tracing.containers import RAW, attributes_of, content, fill, holds, in_slots, is_of_model
from compressor.tracing.footprint import HeldContainers, KeptTensor, Stirred
from compressor.tracing.graph.nested_values import SETTINGS, Modes, call_name
from compressor.tracing.graph.nodes import Unrepeatable
from compressor.tracing.graph.planner import without_traces
from compressor.tracing.reads import Unnoticed
from compressor.tracing.targets.call_order import plain_forward
from compressor.tracing.targets.sample_state import OF_EVERY_MODULE

_MISSING = object()


class Traces:
    """A ledger of what forwards changed. A context manager that takes it back at the end.

    Attributes:
        unproved: a place in the model that has changed though no proof saw it change; empty where there is none, or before the end.
    """

    def __init__(
        self, model: nn.Module, stirred: Stirred, settle: Callable[[], object] | None = None, keeping: Collection[str] | None = None
    ) -> None:
        """Keep nothing yet.

        Args:
            model: that runs.
            stirred: what to look at.
            settle: runs a forward that brings the model to the state in which all forwards are to begin; None for a model that has one.
            keeping: dotted names of the modules on which, or below, hooks keep statistics, to look at all others at the end, too; None
                where there is no need to.
        """
        self.unproved = ""
        self._held = None if keeping is None else HeldContainers(model, keeping, {*stirred.containers, *stirred.tensors})
        self._model, self._stirred, self._settle = model, stirred, settle
        self._made: dict[tuple[int, Any], tuple[Any, Any]] = {}  # container and key to what was there, and what a forward left
        self._before: list[tuple[Any, Any]] = []
        self._tensors: dict[int, KeptTensor] = {}
        self._marked: list[KeptTensor] = []
        self._generators: list[tuple[Any, Any]] = []

    def __enter__(self) -> Self:
        """Keep what there is now; then settle the model."""
        self._before = [(one, content(one)) for one in self._stirred.containers.values()]
        self._generators = [(one, generator_state(one)) for one in self._stirred.generators.values()]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._tensors = {key: KeptTensor(tensor) for key, tensor in self._stirred.tensors.items()}
            for kept in self._tensors.values():
                kept.copy()
            self._marked = [KeptTensor(tensor) for tensor in self._stirred.marked.values()]
        if self._settle is not None:
            try:
                with self.forwards():
                    self._settle()
            except BaseException:
                self.undo()
                raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Take everything back."""
        self.unproved = "" if self._held is None else self._held.changed()
        self.undo()

    @contextmanager
    def forwards(self) -> Iterator[None]:
        """Let forwards run, and take note of what they change.

        Yields:
            Nothing.
        """
        before = [(one, content(one)) for one in self._stirred.containers.values()]
        try:
            yield
        finally:
            for one, kept in before:
                if not holds(one, kept):
                    self._note(one, kept)

    def _note(self, container: Any, kept: Any) -> None:
        if not isinstance(kept, dict):
            self._add((id(container), None), kept, content(container), holds)
            return
        now = content(container)
        for key in {**kept, **now}:
            if kept.get(key, _MISSING) is not now.get(key, _MISSING):
                self._add((id(container), key), kept.get(key, _MISSING), now.get(key, _MISSING), lambda a, b: a is b)

    def _add(self, place: tuple[int, Any], before: Any, now: Any, same: Callable[[Any, Any], bool]) -> None:
        first, left = self._made.get(place, (before, before))
        self._made[place] = (first if same(before, left) else before, now)

    @torch.no_grad()
    def give_back(self, names: Collection[str]) -> None:
        """Put the weights of some modules back, for those who compress them; what becomes of these then stays.

        Args:
            names: dotted names.
        """
        for name in names:
            module = self._model.get_submodule(name)
            self._undo_container(module._parameters)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                kept = self._tensors.pop(id(tensor), None)
                if kept is not None:
                    kept.put_back()

    @torch.no_grad()
    def undo(self) -> None:
        """Take everything back; forwards may go on after that, as if none had run."""
        for container, base in self._before:
            self._undo_container(container)
            if isinstance(base, dict) and content(container) == base and not holds(container, base):
                fill(container, base)  # the same, in another order
        self._made.clear()
        with torch._C.DisableTorchFunction():
            for kept in self._tensors.values():
                kept.put_back()
            for kept in self._marked:
                kept.unmark()
        for generator, state in self._generators:
            set_generator_state(generator, state)

    def _undo_container(self, container: Any) -> None:
        for place in [place for place in self._made if place[0] == id(container)]:
            first, left = self._made.pop(place)
            if not isinstance(content(container), dict):
                if holds(container, left):
                    fill(container, first)
                continue
            now = content(container)
            if now.get(place[1], _MISSING) is left:
                if first is _MISSING:
                    del now[place[1]]
                else:
                    now[place[1]] = first
                fill(container, now)


# What planning has taken from Python: attributes, configurations and modes as they were, for what has changed when a run begins.
#
# A recorded graph holds what the code between targets read there (`self.scale`, `config.flag`, `self.training`), and was proved with that.
# Looked at are modules but for those inside a target, which run as they are, the objects and containers that they hold, attributes of the
# classes of all these and what they hold, and the modes of torch. Tensors are read anew in each run.

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device, torch.Size, np.generic)
_ITSELF = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, logging.Logger)  # which one it is counts, not what lies in it
_MAX_DEPTH = 5
_MAX_VALUES = 200_000
_MOST_SAID = 60  # characters of a value


class PythonValues:
    """What Python code between targets can read, as it is now."""

    def __init__(self, model: nn.Module, targets: Collection[str], *, whole: bool = False) -> None:
        """Look at a model.

        Args:
            model: as it was afterwards.
            targets: dotted names.
            whole: leave out attributes of the targets themselves, too.
        """
        self._targets = frozenset(targets)
        self._seen: set[int] = set()
        self._held: list[Any] = []  # so that no identity is used twice
        modes = Modes.current()
        self._values: dict[str, Any] = {f"torch {ask.__name__}": value for (ask, _), value in zip(SETTINGS, modes.settings, strict=True)}
        self._values |= {"torch is_inference_mode_enabled": torch.is_inference_mode_enabled()}
        self._values |= {f"torch autocast {kind}": (on, dtype) for kind, on, dtype in modes.autocast}
        for name, module in model.named_modules():
            if not self._is_inside(name) and not (whole and name in self._targets):
                self._look_at(name, module)
        del self._seen, self._held

    def _is_inside(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:number]) in self._targets for number in range(1, len(parts))) or ("" in self._targets and name != "")

    def _look_at(self, name: str, module: nn.Module) -> None:
        for key, value in vars(module).items():
            if key not in OF_EVERY_MODULE or key == "training":
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


# What a target makes of its weights once and keeps: later stages would go on with the weights as they were before compression.
#
# Attributes and cached properties of modules belong to one forward each, so what is kept there is made anew. What is kept elsewhere (a
# dict, `functools.lru_cache`, a global) shows in this: a second forward no longer reads a weight that the first one has read. What had
# been kept before anybody looked does not show.


class KeptWeights(Unrepeatable):
    """What was made of a weight would outlive it."""


class _Reading(Unnoticed):
    """Counts the torch calls that are given a weight."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not call_name(func).endswith("_"):  # who writes to a weight keeps the weight, and others look for that
            self.counts.update(self._names[id(item)] for item in (*args, *kwargs.values()) if id(item) in self._names)
        return func(*args, **kwargs)


@torch.no_grad()
def check_kept_weights(model: nn.Module, targets: Mapping[str, nn.Module], batch: Batch) -> None:
    """Run two plain forwards of a batch and compare which weights they read.

    Args:
        model: as it was afterwards, but for what its forward changes elsewhere than on modules.
        targets: dotted name to module.
        batch: on the device of the model; not modified.

    Raises:
        KeptWeights: the second forward reads a weight of a target less often than the first one.
    """
    owners = {f"{target}.{name}".lstrip("."): target for target, module in targets.items() for name, _ in module.named_parameters()}
    names = {id(tensor): name for name, tensor in model.named_parameters() if name in owners and tensor.dim() > 1}
    counts = []
    for _ in range(2):
        with without_traces(), _Reading(names) as reading:
            plain_forward(model, batch)
        counts.append(reading.counts)
    fewer = next((name for name in counts[0] if counts[1][name] < counts[0][name]), None)
    if fewer is not None:
        raise KeptWeights(
            f"{fewer}: forward makes something of it once and keeps it for later forwards (a dict, functools.lru_cache, a global), where "
            f"it would stay as it was before {owners[fewer]} is compressed; make it in each forward, keep it in an attribute "
            '(self.name = ...), or use pipeline="basic"'
        )
