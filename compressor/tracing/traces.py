"""What the forwards of a run leave on a model, told apart from what compression does there, and taken back when the run ends.

Planning has seen which containers, tensors and generators a forward changes; only these are looked at, which for most models is nothing.
A change is a forward's if it came while forwards ran, and it is taken back only where nobody has changed the same thing since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from compressor.random_state import generator_state, set_generator_state
from compressor.tracing.containers import content, fill, holds
from compressor.tracing.footprint import KeptTensor, Stirred

_MISSING = object()


class Traces:
    """A ledger of what forwards changed. A context manager that takes it back at the end."""

    def __init__(self, model: nn.Module, stirred: Stirred, settle: Callable[[], object] | None = None) -> None:
        """Keep nothing yet.

        Args:
            model: that runs.
            stirred: what to look at.
            settle: runs a forward that brings the model to the state in which all forwards are to begin; None for a model that has one.
        """
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
