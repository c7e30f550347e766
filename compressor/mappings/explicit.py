"""Mappings that a recipe writes down, resolved layer by layer; whether they hold is asked of the model like of all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from compressor.errors import TargetError
from compressor.mappings.pairs import Mappings, ScalePair
from compressor.model.targets import matches


class Written(NamedTuple):
    """A mapping as it stands in a recipe.

    Attributes:
        smooth: pattern of the sources.
        balance: patterns of the layers that read one.
    """

    smooth: str
    balance: tuple[str, ...]


def resolve_written(model: nn.Module, written: Sequence[Written], where: str) -> dict[str, tuple[str, ...]]:
    """Find the modules that mappings mean: to each source the nearest layers of each pattern, as their names have it.

    Args:
        model: not modified.
        written: patterns are class names, dotted names or `re:<pattern>`.
        where: the modifier, for errors.

    Returns:
        Dotted name of each source to those of the layers that are said to read it.

    Raises:
        TargetError: a pattern matches nothing, or two mappings name one source.
    """
    names = [(name, module) for name, module in model.named_modules() if name]
    found: dict[str, tuple[str, ...]] = {}
    for mapping in written:
        sources = [name for name, module in names if matches(name, module, mapping.smooth)]
        pools = {pattern: [name for name, module in names if matches(name, module, pattern)] for pattern in mapping.balance}
        empty = next((pattern for pattern, pool in ((mapping.smooth, sources), *pools.items()) if not pool), None)
        if empty is not None:
            raise TargetError(
                f"{where}: mappings: {empty!r} matches no module of {type(model).__name__}; correct it, or leave mappings out"
            )
        for source in sources:
            if source in found:
                raise TargetError(f"{where}: mappings: {source} stands in two of them; keep one")
            near = {name for pool in pools.values() for name in _nearest(source, pool)}
            found[source] = tuple(name for name, _ in names if name in near)
    return found


def explicit_pairs(wanted: Mapping[str, tuple[str, ...]], found: Mappings, where: str) -> tuple[tuple[ScalePair, ...], tuple[str, ...]]:
    """Hold mappings of a recipe against what was proved on the model.

    Args:
        wanted: what `resolve_written` gave.
        found: what `find_pairs` found for these sources.
        where: the modifier, for errors.

    Returns:
        The pairs, with all that read their source, and notes on readers that the recipe does not name.

    Raises:
        TargetError: no scale may move there, or a layer that is named does not read the source.
    """
    pairs, notes = [], []
    for source, readers in wanted.items():
        pair = found.by_source.get(source)
        if pair is None:
            raise TargetError(f"{where}: mappings: no scale of {source} may move, for {found.why_not[source]}; take this mapping out")
        strangers = [name for name in readers if name not in pair.readers]
        if strangers:
            raise TargetError(
                f"{where}: mappings: {strangers[0]} does not read the output of {source}, as a forward shows ({', '.join(pair.readers)} "
                "do); correct the mapping"
            )
        left = [name for name in pair.readers if name not in readers]
        if left:
            more = f" and {len(left) - 1} more" if left[1:] else ""
            notes.append(f"{where}: {left[0]}{more} read {source}, too, and were scaled with the layers that are named")
        pairs.append(pair)
    return tuple(pairs), tuple(notes)


def _nearest(source: str, pool: Sequence[str]) -> list[str]:
    """The names that share the longest beginning with a source."""
    shared = {name: _shared(source, name) for name in pool}
    most = max(shared.values())
    return [name for name, depth in shared.items() if depth == most]


def _shared(one: str, other: str) -> int:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)
