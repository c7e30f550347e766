"""Toys whose layers run inside something: autocast, exception handlers, context variables, random numbers, gradients."""

from __future__ import annotations

import contextvars
import random

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from harness.traceability.toys.base import RIGHT_OR_REFUSED, Layer, Toy


class AutocastAroundTargets(Toy):
    """The layers run under autocast, the rest does not."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = layer(hidden)
            hidden = hidden * 1.1
        return self.head(hidden.float())


class AutocastOffInside(Toy):
    """The whole forward runs under autocast, one layer does not."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.layers[0](self.embed(x))
            with torch.autocast("cpu", enabled=False):
                hidden = self.layers[1](hidden.float())
            return self.head(self.layers[2](hidden))


class Refusing(Layer):
    """A layer that raises for some data."""

    def forward(self, x: Tensor) -> Tensor:
        """Raise if the first value is positive."""
        inner = self.up(x)
        if inner[0, 0, 0] > 0:
            raise ValueError("not this one")
        return x + self.down(inner)


class ExceptionCaught(Toy):
    """A layer raises, depending on the data, and the glue goes on with something else."""

    layer = Refusing

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            try:
                hidden = layer(hidden)
            except ValueError:
                hidden = hidden - 1
            finally:
                hidden = hidden * 1.5
        return self.head(hidden)


class DropoutInGlue(Toy):
    """Glue draws random numbers between the layers."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(functional.dropout(hidden, 0.3, training=True))
        return self.head(hidden)


class DropoutInLayers(Toy):
    """The layers themselves draw random numbers."""

    must = RIGHT_OR_REFUSED

    class Dropping(Layer):
        """A layer with dropout that is always on."""

        def forward(self, x: Tensor) -> Tensor:
            """Drop some of the sum."""
            return functional.dropout(super().forward(x), 0.3, training=True)

    layer = Dropping

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class RandomOutsideTorch(Toy):
    """Random numbers come from Python and numpy, freshly seeded in every forward."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        random.seed(3)
        np.random.seed(4)
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden * random.random()) + float(np.random.rand())
        return self.head(hidden)


class GradientInGlue(Toy):
    """Glue computes a gradient with respect to the hidden state and steps along it."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            with torch.enable_grad():
                point = hidden.detach().requires_grad_()
                (step,) = torch.autograd.grad((point**3).sum(), point)
            hidden = layer(hidden - 0.01 * step)
        return self.head(hidden)


class InferenceMode(Toy):
    """The forward switches inference mode on around its layers."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        with torch.inference_mode():
            hidden = self.embed(x)
            for layer in self.layers:
                hidden = layer(hidden)
        return self.head(hidden.clone())


_SCALE: contextvars.ContextVar[Tensor | float] = contextvars.ContextVar("toy_scale", default=1.0)


class Scaled(Layer):
    """A layer that reads a context variable."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale by what the glue has set."""
        return super().forward(x) * _SCALE.get()


class ContextVariable(Toy):
    """Glue hands tensors to the layers through a context variable."""

    must = RIGHT_OR_REFUSED
    layer = Scaled

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            token = _SCALE.set(torch.sigmoid(hidden.mean()))
            try:
                hidden = layer(hidden)
            finally:
                _SCALE.reset(token)
        return self.head(hidden)


class Checkpointed(Toy):
    """Every layer is called through activation checkpointing."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        from torch.utils.checkpoint import checkpoint

        hidden = self.embed(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden)


class Mapped(Toy):
    """Glue maps a function over rows with vmap, and calls a scripted function."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            bias = hidden.mean(0)
            hidden = layer(torch.vmap(lambda row, bias=bias: row * 2 - bias)(hidden))
        return self.head(hidden)
