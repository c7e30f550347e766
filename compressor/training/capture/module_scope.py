"""Which module an operator belongs to: by a stack of forward calls, and in the backward pass by the operator that made the graph node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_sequence_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr")  # noqa: B009 - not declared in its stubs


class _Running(local):
    """The modules that run, from the outermost; other threads, which may run models of their own, have their own list."""

    def __init__(self) -> None:
        self.stack: list[str] = []


class Whereabouts:
    """Names the running module while `watching`.

    Args:
        model: the model whose modules have names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name or "root" for name, module in model.named_modules()}
        self._running = _Running()
        self._makers: dict[int, str] = {}

    def __call__(self, backward: bool) -> str:
        """Name the module of the operator that runs now.

        Args:
            backward: this is the backward pass.

        Returns:
            A dotted name, or "" where no module is at work.
        """
        if backward:
            node: Any = torch._C._current_autograd_node()
            return "" if node is None else self._makers.get(node._sequence_nr(), "")
        stack = self._running.stack
        name = stack[-1] if stack else ""
        # A node gets its number just before its operator is dispatched.
        self._makers[_sequence_number() - 1] = name
        return name

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow forward calls of all modules; the modules' own hooks are not touched.

        Yields:
            Nothing.
        """

        def enter(module: nn.Module, args: Any) -> None:
            self._running.stack.append(self._names.get(module, type(module).__name__))

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if self._running.stack:  # empty where another thread was inside a module when the watch began
                self._running.stack.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running = _Running()
