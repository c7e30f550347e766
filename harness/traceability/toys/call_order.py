"""Toys whose layers are called in an unusual order, more than once, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from harness.traceability.toys.base import RIGHT_OR_REFUSED, WIDTH, Layer, Toy


class TwoInputs(nn.Module):
    """A layer that mistakes its inputs for each other if they are swapped."""

    def __init__(self) -> None:
        """Make the linears."""
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return both inputs, changed, in the other order."""
        return right - self.up(left), left + torch.tanh(self.down(right))


class Crossed(Toy):
    """Two tensors of one shape cross over in every layer."""

    layer = TwoInputs

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        left = self.embed(x)
        right = left.flip(1)
        for layer in self.layers:
            left, right = layer(left, right=right)
        return self.head(left - 2 * right)


class CalledTwice(Toy):
    """The first layer is called again after the others."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in [*self.layers, self.layers[0]]:
            hidden = layer(hidden)
        return self.head(hidden)


class CalledTwiceInARow(Toy):
    """Every layer is called twice, the second time on its own output."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(layer(hidden)[..., : hidden.shape[-1]])
        return self.head(hidden)


class UntilItConverges(Toy):
    """One layer is called until the data say that it is enough."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for _ in range(6):
            if hidden.abs().mean() > 2.0 * x.shape[0]:
                break
            hidden = self.layers[0](hidden * 1.3)
        return self.head(self.layers[2](self.layers[1](hidden)))


class EarlyExit(Toy):
    """The layers stop when the data say so; some batches never reach the last one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            if index and hidden.shape[0] > 1 and hidden[0, 0, 0] > 0:
                break
            hidden = layer(hidden)
        return self.head(hidden)


class OrderByData(Toy):
    """The data decide in which order the layers come."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for index in hidden.mean(dim=(0, 1))[:3].argsort().tolist():
            hidden = self.layers[index](hidden)
        return self.head(hidden)


class Backwards(Toy):
    """The layers are called in the reverse of the order in which the model lists them."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return self.head(hidden)


class OneBranchEach(Toy):
    """Batches with a mask and batches without one take different layers first."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        if mask is not None:
            hidden = self.layers[2](hidden * mask[..., None])
        return self.head(self.layers[1](self.layers[0](hidden)))


class UnusedTarget(Toy):
    """The output of a layer goes nowhere; the layer is to be calibrated all the same."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        self.layers[1](hidden * 2)
        return self.head(self.layers[2](self.layers[0](hidden)))


class BypassedTarget(Toy):
    """A layer's `forward` is called, not the layer: no hook would see anything."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer.forward(hidden)
        return self.head(hidden)


class Yielding(Layer):
    """A layer whose output is a generator."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        """Yield two tensors."""
        inner = self.up(x)
        yield torch.tanh(inner)[..., :WIDTH]
        yield self.down(inner)


class GeneratorOutput(Toy):
    """A layer returns a generator: its body runs when the glue asks for values, after the call has returned."""

    must = RIGHT_OR_REFUSED
    layer = Yielding

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = sum(layer(hidden), start=hidden)
        return self.head(hidden)


class GeneratorGlue(Toy):
    """The layers are called inside a generator, one for each value that is asked for."""

    def walk(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield what each layer returns.

        Args:
            hidden: the first input.

        Yields:
            The output of a layer.
        """
        for layer in self.layers:
            hidden = layer(hidden)
            yield hidden

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        return self.head(torch.stack(list(self.walk(self.embed(x)))).sum(0))


class Applying(Layer):
    """A layer that is given a function."""

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """Apply the function between the linears."""
        return x + self.down(function(self.up(x)))


class ClosureOverTensors(Toy):
    """Layers are given functions that hold tensors of this batch."""

    layer = Applying

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            gate = torch.sigmoid(hidden.mean(-1, keepdim=True))
            hidden = layer(hidden, lambda inner, gate=gate: torch.relu(inner) * gate + x.mean())
        return self.head(hidden)


class InThreads(Toy):
    """Each layer runs in a thread of its own."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            box: list[Tensor] = []

            def work(layer: nn.Module = layer, hidden: Tensor = hidden, box: list[Tensor] = box) -> None:
                with torch.no_grad():
                    box.append(layer(hidden))

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            hidden = box[0]
        return self.head(hidden)
