"""Toys that keep something of a forward where no tracer looks: in a global, an object, a class, a thread; or that swap parameters."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from harness.traceability.toys.base import RIGHT_OR_REFUSED, Layer, Toy

_KEPT: dict[str, Tensor] = {}
_OF_THREAD = threading.local()


class ReadsGlobal(Layer):
    """A layer that reads a global."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale by what the glue has left."""
        return super().forward(x) * _KEPT["gate"]


class HandedOverInAGlobal(Toy):
    """Glue hands a tensor to the layers through a global dictionary."""

    must = RIGHT_OR_REFUSED
    layer = ReadsGlobal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            _KEPT["gate"] = torch.sigmoid(hidden.mean())
            hidden = layer(hidden)
        return self.head(hidden)


class ReadsThread(Layer):
    """A layer that reads a value of the thread."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale by what the glue has left."""
        scaled: Tensor = super().forward(x) * _OF_THREAD.gate
        return scaled


class HandedOverInTheThread(Toy):
    """Glue hands a tensor to the layers through a variable of the thread."""

    must = RIGHT_OR_REFUSED
    layer = ReadsThread

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            _OF_THREAD.gate = torch.sigmoid(hidden.mean())
            hidden = layer(hidden)
        return self.head(hidden)


class ReadsClass(Layer):
    """A layer that reads an attribute of its class."""

    gate: ClassVar[Tensor | float] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scale by what the glue has left."""
        return super().forward(x) * type(self).gate


class HandedOverInAClass(Toy):
    """Glue hands a tensor to the layers through their class."""

    must = RIGHT_OR_REFUSED
    layer = ReadsClass

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            ReadsClass.gate = torch.sigmoid(hidden.mean())
            hidden = layer(hidden)
        return self.head(hidden)


class ReadsObject(Layer):
    """A layer that holds an object which the model holds, too."""

    shared: types.SimpleNamespace

    def forward(self, x: Tensor) -> Tensor:
        """Scale by what the glue has left."""
        scaled: Tensor = super().forward(x) * self.shared.gate
        return scaled


class NumberInAnObject(Toy):
    """Glue leaves a number computed from the length in an object that the layers hold."""

    must = RIGHT_OR_REFUSED
    layer = ReadsObject

    def __init__(self) -> None:
        """Share the object."""
        super().__init__()
        self.shared = types.SimpleNamespace(gate=1.0)
        for layer in self.layers:
            layer.shared = self.shared  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            self.shared.gate = 1.0 / (x.shape[1] + index)
            hidden = layer(hidden)
        return self.head(hidden)


class SwappedParameters(Toy):
    """Every layer is called with other parameters in place of its own, which come back after the call."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            doubled = {name: parameter * 2 for name, parameter in layer.named_parameters()}
            hidden = torch.func.functional_call(layer, doubled, (hidden,))
        return self.head(hidden)


class TypeOfASize(Toy):
    """Glue asks whether a size is an `int`, and it is."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden, length = self.embed(x), x.shape[1]
        for layer in self.layers:
            hidden = layer(hidden) if isinstance(length, int) else layer(hidden * 2)  # type: ignore[redundant-expr]
            hidden = hidden * (1.0 if type(length) is int else 3.0)
        return self.head(hidden)


class Calling(Layer):
    """A layer that is given something to call or to ask for values."""

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """Apply the function between the linears."""
        return x + self.down(function(self.up(x)))


class PartialWithTensor(Toy):
    """Layers are given a partial function that holds a tensor of this batch."""

    layer = Calling

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, functools.partial(torch.mul, torch.sigmoid(hidden.mean())))
        return self.head(hidden)


class Asking(Layer):
    """A layer that takes the next value of an iterator."""

    def forward(self, x: Tensor, values: Iterator[Tensor]) -> Tensor:  # type: ignore[override]
        """Mix in the next value."""
        return x + self.down(torch.tanh(self.up(next(values))))


class GeneratorOfInputs(Toy):
    """All layers take values from one generator, whose body runs inside them."""

    must = RIGHT_OR_REFUSED
    layer = Asking

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        first, values = hidden, (hidden * number for number in range(1, 9))
        for layer in self.layers:
            hidden = layer(hidden, values)
        return self.head(hidden + first + next(values))
