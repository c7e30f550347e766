"""A model that is base here and compressed there: modules change places for the time of a forward, nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from harness.bisect.models import Pair


@contextmanager
def swapped(pair: Pair, names: frozenset[str], instead: Mapping[str, nn.Module] | None = None) -> Iterator[nn.Module]:
    """Give the base with some parts of the compressed model in their places. Both models are as before afterwards.

    A part may hold other parts (an attention that quantizes its keys, around its projections): outer ones are placed first, and the inner
    ones then one by one.

    Args:
        pair: both models.
        names: parts to take from the compressed model.
        instead: modules to put in the place of a compressed part.

    Yields:
        The base model.
    """
    order = sorted(pair.parts, key=lambda name: name.count("."))
    kept = {name: (pair.base.get_submodule(name), pair.compressed.get_submodule(name)) for name in order}
    try:
        for name in order:
            chosen = kept[name][name in names]
            pair.base.set_submodule(name, (instead or {}).get(name, chosen))
        yield pair.base
    finally:
        for name in order:
            pair.base.set_submodule(name, kept[name][0])
            pair.compressed.set_submodule(name, kept[name][1])
