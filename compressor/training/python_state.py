"""What Python holds of a step at one moment, to put back when a capture is refused: a counter, a list that grew, a module's attribute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from compressor.training.guards.containers import TABLES, all_modules, classes, containers
from compressor.training.guards.optimizer_state import optimizer_classes, optimizer_containers
from compressor.training.guards.python_state import one_look, put, reached_classes, variables
from compressor.training.step.step import TrainStep

_MISSING = object()


class PythonState:
    """Copies of the containers and variables that the guards see; what these do not see is not put back.

    Args:
        step: the step; not changed.
    """

    @one_look()
    def __init__(self, step: TrainStep) -> None:
        self._contents = [(content, _copy(content)) for content in _contents(step)]
        self._classes = [
            (cls, dict(content)) for cls, content in {**classes(step), **reached_classes(step), **optimizer_classes(step)}.items()
        ]
        self._variables = [(getter, getter()) for _, getter in variables(step, with_modules=True)]

    def put_back(self) -> None:
        """Write back whatever is another object now. Changes containers, attributes and variables in place."""
        for content, kept in self._contents:
            if not _holds(content, kept):
                content.clear()
                (content.update if isinstance(content, dict | set) else content.extend)(kept)
        for cls, kept in self._classes:
            for key in [key for key in {**kept, **vars(cls)} if kept.get(key, _MISSING) is not vars(cls).get(key, _MISSING)]:
                setattr(cls, key, kept[key]) if key in kept else delattr(cls, key)
        for getter, value in self._variables:
            if getter() is not value:
                put(getter, value)


def _contents(step: TrainStep) -> Iterator[Any]:
    for _, module in all_modules(step):
        yield module.__dict__
        yield from (module.__dict__[name] for name in TABLES)
    held = [*optimizer_containers(step), *containers(step)]
    yield from {id(one.content): one.content for one in held if isinstance(one.content, list | dict | set | deque)}.values()


def _copy(content: Any) -> Any:
    return dict(content) if isinstance(content, dict) else set(content) if isinstance(content, set) else list(content)


def _holds(content: Any, kept: Any) -> bool:
    """Say whether a container holds the very same objects in the same order."""
    if isinstance(content, set):
        return len(content) == len(kept) and all(one in kept for one in content)
    items = [part for item in content.items() for part in item] if isinstance(content, dict) else list(content)
    others = [part for item in kept.items() for part in item] if isinstance(content, dict) else kept
    return len(items) == len(others) and all(one is other for one, other in zip(items, others, strict=True))
