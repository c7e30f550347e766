"""What a recorder does with symbolic numbers: arithmetic becomes nodes, decisions become guards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from compressor.tracing.graph.encoding import Encoder
from compressor.tracing.graph.symbolic import SymbolicFloat, SymbolicInt, plain


class Numbers:
    """The part of a recorder that symbolic numbers talk to."""

    inside: int
    encoder: Encoder
    emit: Callable[..., fx.Node]
    guard: Callable[..., None]
    opaque: Callable[[], AbstractContextManager[None]]

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Compute with symbolic numbers.

        Args:
            function: of the operator module, or one like it.
            args: numbers, one of them symbolic.

        Returns:
            A symbolic number where this is recorded.
        """
        value = function(*map(plain, args))
        if self.inside:
            return value
        with self.opaque():
            node = self.emit("call_function", function, self.encoder.encode(args), size=True)
        return self.number(value, node)

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Compare symbolic numbers, under a guard on the outcome.

        Args:
            function: of the operator module, or one like it.
            args: numbers, one of them symbolic.

        Returns:
            The plain outcome.
        """
        value = function(*map(plain, args))
        if not self.inside:
            with self.opaque():
                self.guard(self.emit("call_function", function, self.encoder.encode(args), size=True), value)
        return value

    def pin(self, node: fx.Node, value: Any) -> None:
        """Put a guard on a number that Python is about to use.

        Args:
            node: that computes it.
            value: of it.
        """
        if not self.inside:
            with self.opaque():
                self.guard(node, value)

    def number(self, value: Any, node: fx.Node) -> Any:
        """Make a number symbolic.

        Args:
            value: plain.
            node: that computes it.

        Returns:
            A symbolic number; bools and complex numbers come back plain, under a guard.
        """
        node.meta["number"] = True
        if type(value) in (bool, complex):
            self.guard(node, value)
            return value
        return SymbolicInt(value, node, self) if isinstance(value, int) else SymbolicFloat(value, node, self)
