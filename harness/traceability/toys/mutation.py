"""Toys that write: to tensors in place, to dictionaries, to caches, to modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.traceability.toys.base import RIGHT_OR_REFUSED, WIDTH, Layer, Toy


class Writing(Layer):
    """A layer that writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Add to `x` in place; return half of it."""
        x += self.down(torch.tanh(self.up(x)))
        return x / 2


class InPlaceAcrossLayers(Toy):
    """Layers write to their input, and the glue uses that input, and an old view of it, afterwards."""

    layer = Writing

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        view = hidden[:, :1]
        for layer in self.layers:
            hidden = layer(hidden) + hidden + view
            view = hidden.transpose(0, 1)[:1].transpose(0, 1)
        return self.head(hidden)


class InPlaceInGlue(Toy):
    """Glue writes through views, slices and `out=`."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            hidden[:, index % hidden.shape[1]] = 0.5
            hidden[..., :2].mul_(3)
            torch.add(hidden, 1, out=hidden)
            if mask is not None:
                hidden.masked_fill_(mask[..., None] == 0, -1.0)
            hidden = layer(hidden)
        return self.head(hidden)


class WritesToItsBatch(Toy):
    """The forward writes to the tensors that it was given."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            x += 1
            hidden = layer(hidden) + x
        return self.head(hidden)


class Remembering(Layer):
    """A layer that reads and writes a dictionary."""

    def forward(self, x: Tensor, memory: dict[str, Any]) -> Tensor:  # type: ignore[override]
        """Mix in what earlier layers left."""
        seen = memory.setdefault("seen", [])
        mixed = x + sum(seen) if seen else x
        inner = self.up(mixed)
        seen.append(inner[..., :WIDTH])
        memory["last"] = mixed
        return x + self.down(torch.tanh(inner))


class SharedDictionary(Toy):
    """All layers share one dictionary that is made anew in every forward."""

    layer = Remembering

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden, memory = self.embed(x), {"first": x}
        for layer in self.layers:
            hidden = layer(hidden, memory=memory)
        return self.head(hidden + memory["last"] + memory["first"] + len(memory["seen"]))


class _Cache:
    """Keeps what layers append; knows its length."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.length = 0

    def append(self, row: Tensor) -> Tensor:
        self.rows.append(row)
        self.length += row.shape[1]
        return torch.cat(self.rows, dim=1)


class Caching(Layer):
    """A layer that appends to a cache object."""

    def forward(self, x: Tensor, cache: _Cache) -> Tensor:  # type: ignore[override]
        """Attend, in a way, to all rows of the cache."""
        inner = self.up(x)
        keys = cache.append(inner[..., :WIDTH])
        return x + keys.mean(1, keepdim=True) + self.down(inner) / cache.length


class CacheObject(Toy):
    """An object of a class of its own holds the tensors that cross the layers; glue reads its length."""

    layer = Caching

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden, cache = self.embed(x), _Cache()
        for layer in self.layers:
            hidden = layer(hidden, cache) * (1 + cache.length)
        return self.head(hidden)


class FilledCache(Toy):
    """The cache object holds a tensor of this batch before the first layer sees it."""

    must = RIGHT_OR_REFUSED
    layer = Caching

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden, cache = self.embed(x), _Cache()
        cache.append(hidden.flip(1))
        for layer in self.layers:
            hidden = layer(hidden, cache)
        return self.head(hidden + cache.rows[0])


class LeavingNotes(Layer):
    """A layer that leaves a tensor on itself."""

    note: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Leave what the first linear returned."""
        self.note = self.up(x)
        return x + self.down(torch.tanh(self.note))


class NotesOnModules(Toy):
    """What layers leave on themselves is read by the glue, and what the glue leaves on the model is read later."""

    layer = LeavingNotes
    offset: Tensor

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        self.offset = x.mean(-1, keepdim=True)
        for layer in self.layers:
            hidden = layer(hidden) + self.offset
        notes = [layer.note[..., :WIDTH] for layer in self.layers if isinstance(layer, LeavingNotes)]
        return self.head(hidden + sum(notes))


class CountingSteps(Toy):
    """The model counts the layers that have run, and the count enters the numbers."""

    step: int

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        self.step = x.shape[0]
        for layer in self.layers:
            hidden = layer(hidden) * self.step
            self.step += 1
        return self.head(hidden) + self.step


class Pair(NamedTuple):
    """Two tensors and a number."""

    left: Tensor
    right: Tensor
    num: int


class Pairing(Layer):
    """A layer with a structured input and output."""

    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        """Return another pair."""
        return Pair(pair.right, pair.left + self.down(self.up(pair.right)), pair.num + 1)


class StructuredValues(Toy):
    """Named tuples with tensors and numbers cross the layers; the result is a nested structure with one tensor twice."""

    layer = Pairing

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        """See the class."""
        pair = Pair(self.embed(x), x.flip(-1), x.shape[1])
        for layer in self.layers:
            pair = layer(pair)
        logits = self.head(pair.left)
        return {"logits": logits, "pair": pair, "again": [logits, (pair.num, None, "text")]}


class OwnHook(Toy):
    """A hook of the model's own changes what a layer returns."""

    def __init__(self) -> None:
        """Hang up the hook."""
        super().__init__()
        self.layers[1].register_forward_hook(_double)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def _double(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    del module, args
    return output * 2
