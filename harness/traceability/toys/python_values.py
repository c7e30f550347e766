"""Toys whose glue uses tensors as Python values, or leaves torch: sizes, numbers, lists, arrays."""

from __future__ import annotations

import functools
import io

import numpy as np
import torch
from torch import Tensor, nn

from harness.traceability.toys.base import RIGHT_OR_REFUSED, WIDTH, Layer, Toy


class Masked(Toy):
    """The mask is applied only if there is one and only if it masks something."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            if mask is not None and not mask.all():
                hidden = hidden * mask[..., None]
            hidden = layer(hidden)
        return self.head(hidden)


class ListIndexedBySize(Toy):
    """A list of tables is indexed by a number computed from the length."""

    def __init__(self) -> None:
        """Add the tables."""
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden + self.tables[(x.shape[1] + index) % 3])
        return self.head(hidden)


class SizesInArithmetic(Toy):
    """Sizes enter floats, ranges, slices and new tensors."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        rows, length, _ = x.shape
        hidden = self.embed(x) / length**0.5
        for layer in self.layers:
            hidden = layer(hidden + torch.arange(length)[None, :, None] / max(rows, length))
            hidden = hidden + torch.full((length, 1), float(rows)) + torch.cat([hidden[:, length // 2 :], hidden[:, : length // 2]], 1)
        return self.head(hidden) * len(x) + sum(i for i in range(rows))


class NumberOutOfTensor(Toy):
    """A tensor becomes a Python float and comes back as a factor."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            scale = hidden.abs().max().item()
            hidden = layer(hidden / scale) * round(scale, 3)
        return self.head(hidden)


class ListOutOfTensor(Toy):
    """A tensor becomes a Python list, which is sorted and becomes a tensor again."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            means = torch.tensor(sorted(hidden.mean(dim=(0, 1)).tolist()))
            hidden = layer(hidden + means)
        return self.head(hidden)


class NumpyRoundTrip(Toy):
    """Glue leaves torch for numpy and returns."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            rolled = np.roll(hidden.detach().numpy(), 1, axis=-1)
            hidden = layer(hidden + torch.from_numpy(np.ascontiguousarray(rolled)))
        return self.head(hidden)


class SavedAndLoaded(Toy):
    """Glue writes a tensor to a stream of bytes and reads it back."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            stream = io.BytesIO()
            torch.save(hidden, stream)
            stream.seek(0)
            hidden = layer(hidden + torch.load(stream, weights_only=True))
        return self.head(hidden)


class SharedMemory(Toy):
    """A numpy view of a tensor is written to, and the tensor is used afterwards."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden.clone()
            view = hidden.detach().numpy()
            view *= 1.0 + 0.1 * view.shape[1]
            hidden = layer(hidden)
        return self.head(hidden)


@functools.lru_cache(maxsize=8)
def _table(length: int) -> Tensor:
    return torch.linspace(0, 1, length)[None, :, None]


class CachedTable(Toy):
    """A table by size comes from a cache outside of the model, which fills at the first call."""

    must = RIGHT_OR_REFUSED

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden + _table(int(x.shape[1])))
        return self.head(hidden)


class SizeOfSelection(Toy):
    """How many values pass a test decides sizes and factors."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            flat = hidden.reshape(-1, hidden.shape[-1])
            kept = torch.nonzero(flat.sum(-1) > 0).flatten()
            chosen = layer(flat[kept])
            flat = flat.index_copy(0, kept, chosen) + chosen.shape[0] / flat.shape[0]
            hidden = flat.view_as(hidden)
        return self.head(hidden)


class KeyedByTensor(Toy):
    """A dictionary has tensors as keys, and a set decides by identity."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        first = self.embed(x)
        second = first + 1
        factors = {first: 2.0, second: 3.0}
        hidden = first
        for layer in self.layers:
            hidden = layer(second if hidden in {first} else hidden * factors[first])
        return self.head(hidden)


class WeightsInGlue(Toy):
    """Glue reads the weights of a layer that has been compressed by then."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
            first = self.layers[0]
            assert isinstance(first, Layer)
            hidden = hidden + hidden @ first.up.weight[:WIDTH].T
        return self.head(hidden)


class Comparisons(Toy):
    """Sizes, types and devices are compared, hashed and formatted."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        names = {f"{tuple(x.shape[:2])}": 0.5, "(1, 7)": 0.25}
        for layer in self.layers:
            if x.shape[0] == 1 or hidden.dtype not in (torch.float32, torch.float64):
                hidden = hidden * 2
            if hidden.device.type == "cpu" and hidden.shape[:2] == x.shape[:2] and x.shape[1] in {5, 7}:
                hidden = hidden - 1
            hidden = layer(hidden * names[str(tuple(int(size) for size in x.shape[:2]))])
        return self.head(hidden)
