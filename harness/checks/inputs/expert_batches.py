"""Batches on which mistakes about padding, or about one of many batches, let other experts stay.

Every such mistake is a choice of places that count, so that all are scored at once: a mean over other places. A row is cut, and what comes
behind its tokens is the padding, or stands in front of them; what is seen of the tokens is the same, for the model is causal, and hides
what its mask says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.checks.inputs.expert_scores import Seen, staying

Mistake = Callable[[Sequence[Tensor]], Sequence[Tensor]]
NUM_BATCHES = 8
"""Of other sizes each, but for those that come again."""
_AGAIN = {5: 0, 7: 6}  # batches that are an earlier one once more, without padding: the first, and the one before
_ALIKE = 3  # batch whose rows are one row
_MOST_ROWS, _NUM_DRAWS = 3, 96
_VAGUE = 0.05  # relative distance of two scores that count padding: what is seen of it hangs on what it sees itself
LONG = 64
"""Tokens beyond which a batch is long."""


def _each(change: Callable[[Tensor], Tensor], where: Callable[[Tensor], bool] = lambda mask: True) -> Mistake:
    return lambda masks: [change(mask) if where(mask) else mask for mask in masks]


def _in_batch(number: int, change: Callable[[Tensor], Tensor]) -> Mistake:
    return lambda masks: [change(mask) if place == number else mask for place, mask in enumerate(masks)]


def _first_of(number: int) -> Mistake:
    return lambda masks: [mask if place < number else torch.zeros_like(mask) for place, mask in enumerate(masks)]


def _each_once(masks: Sequence[Tensor]) -> list[Tensor]:
    return [_none(mask) if place in _AGAIN else mask for place, mask in enumerate(masks)]


def _spread(mask: Tensor) -> Tensor:
    """One place of padding too many on either side."""
    wide = mask.clone()
    wide[:, 1:] |= mask[:, :-1]
    wide[:, :-1] |= mask[:, 1:]
    return wide


def _without(mask: Tensor, *, last: bool) -> Tensor:
    """No first, or no last token of each row."""
    count = mask.cumsum(1)
    return mask & (count < count[:, -1:]) if last else mask & (count > 1)


def _for_expert(expert: int) -> Callable[[Tensor], Tensor]:
    return lambda mask: mask | (torch.arange(mask.shape[-1]) == expert)


def _behind_full(masks: Sequence[Tensor]) -> list[Tensor]:
    first = next((place for place, mask in enumerate(masks) if mask.all()), len(masks))
    return [torch.ones_like(mask) if place > first else mask for place, mask in enumerate(masks)]


_all, _none = torch.ones_like, torch.zeros_like
# Of masks [R, T, E] of batches, alike for all experts, what counts.
PADDING: Mapping[str, Mistake] = {
    "padding": _each(_all),
    **{f"padding of batch {place}": _in_batch(place, _all) for place in range(NUM_BATCHES)},
    **{f"padding for expert {expert}": _each(_for_expert(expert)) for expert in range(4)},
    "padding of the first row": _each(lambda mask: torch.cat([_all(mask[:1]), mask[1:]])),
    "padding behind the first row": _each(lambda mask: torch.cat([mask[:1], _all(mask[1:])])),
    "padding of the last row": _each(lambda mask: torch.cat([mask[:-1], _all(mask[-1:])])),
    "the first row's places in each": _each(lambda mask: mask[:1].expand_as(mask)),
    "the last row's places in each": _each(lambda mask: mask[-1:].expand_as(mask)),
    "places of any row in each": _each(lambda mask: mask.any(0, keepdim=True).expand_as(mask)),
    "places of all rows alone": _each(lambda mask: mask.all(0, keepdim=True).expand_as(mask)),
    "padding on the left": _each(_all, lambda mask: not mask[:, 0].all()),
    "padding on the right": _each(_all, lambda mask: not mask[:, -1].all()),
    "padding of long batches": _each(_all, lambda mask: mask.shape[1] > LONG),
    "padding behind a batch without any": _behind_full,
    "one place of padding": _each(_spread),
    "no first tokens": _each(lambda mask: _without(mask, last=False)),
    "no last tokens": _each(lambda mask: _without(mask, last=True)),
    "places read by columns": _each(lambda mask: mask.transpose(0, 1).reshape(mask.shape)),
}
BATCHES: Mapping[str, Mistake] = {
    **{f"no batch {place}": _in_batch(place, _none) for place in range(NUM_BATCHES)},
    **{f"{number} batches": _first_of(number) for number in range(1, NUM_BATCHES - 1)},
    "every other batch": lambda masks: [_none(mask) if place % 2 else mask for place, mask in enumerate(masks)],
    "batches as long as the first": lambda masks: [mask if mask.shape[1] == masks[0].shape[1] else _none(mask) for mask in masks],
    "batches of as many rows": lambda masks: [mask if len(mask) == len(masks[0]) else _none(mask) for mask in masks],
    "no more tokens than in the first": lambda masks: [_cut(mask, 1, masks[0]) for mask in masks],
    "no more rows than in the first": lambda masks: [_cut(mask, 0, masks[0]) for mask in masks],
    "no long batches": _each(_none, lambda mask: mask.shape[1] > LONG),
    "equal batches once": _each_once,
    "equal rows of a batch once": _in_batch(_ALIKE, lambda mask: torch.cat([mask[:1], _none(mask[1:])])),
    "no single tokens": _each(_none, lambda mask: mask.shape[:2].numel() == 1),
}


def _cut(mask: Tensor, axis: int, first: Tensor) -> Tensor:
    shape = [-1 if one == axis else 1 for one in range(mask.ndim)]
    return mask & (torch.arange(mask.shape[axis]) < first.shape[axis]).view(shape)


class Batches(NamedTuple):
    """Batches, their masks (None where there is no padding), of each layer who should stay, and what would have chosen otherwise."""

    ids: list[Tensor]
    masks: list[Tensor | None]
    wanted: list[set[int] | None]
    told: frozenset[str]


def telling_batches(
    ids: Tensor, seen: Sequence[Seen], sparsity: float, untold: set[str], seed: int, *, sides: Sequence[str] = ()
) -> Batches:
    """Draw batches of other sizes on which as many mistakes as possible would let other experts stay, in each layer.

    Args:
        ids: [R, T].
        seen: of each layer.
        sparsity: share of the experts that go, rounded down.
        untold: mistakes that are looked for first, as `names` has them.
        seed: of the draws.
        sides: where padding may stand, "left" and "right"; without any there is none.

    Returns:
        The best of some draws.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = [_draw(ids, seen, sparsity, generator, sides) for _ in range(_NUM_DRAWS)]
    return max(draws, key=lambda one: (len(one.told & untold), len(one.told)))


def names(mistakes: Mapping[str, Mistake], layers: Iterable[int]) -> set[str]:
    """Return the mistakes, by layer."""
    return {f"{name} in layer {layer}" for name in mistakes for layer in layers}


def _draw(ids: Tensor, seen: Sequence[Seen], sparsity: float, generator: torch.Generator, sides: Sequence[str]) -> Batches:
    rows = torch.randperm(len(ids), generator=generator).split(_MOST_ROWS)
    cuts = [_cut_rows(own, ids.shape[1], generator, sides) for own in rows[:NUM_BATCHES]]
    if not sides:
        cuts[_ALIKE] = (cuts[_ALIKE][0][:1].expand_as(cuts[_ALIKE][0]), cuts[_ALIKE][1])
        cuts = [cuts[_AGAIN.get(place, place)] for place in range(NUM_BATCHES)]
    masks = [mask[..., None].expand(*mask.shape, seen[0].hits.shape[-1]) for _, mask in cuts]
    mistakes = PADDING if sides else BATCHES
    there_KNE = torch.stack([torch.cat([one.flatten(0, 1) for one in own]) for own in (masks, *(one(masks) for one in mistakes.values()))])
    places_N = torch.cat([places.flatten() for places, _ in cuts])
    wanted: list[set[int] | None] = []
    told: set[str] = set()
    for number, layer in enumerate(seen):
        sizes_NE, hits_NE = (one.flatten(0, 1)[places_N] for one in (layer.weights * layer.norms[2.0], layer.hits))
        right, *wrong = (there_KNE * sizes_NE).sum(1) / (there_KNE * hits_NE).sum(1).clamp(min=1)
        wanted.append(due := staying(right, sparsity))
        chosen = zip(mistakes, wrong, strict=True) if due is not None else ()
        told |= {f"{name} in layer {number}" for name, one in chosen if staying(one, sparsity, _VAGUE if sides else 0.0) not in (due, None)}
    given = [None if mask.all() else mask for _, mask in cuts]
    return Batches([ids.flatten()[places] for places, _ in cuts], given, wanted, frozenset(told))


def _cut_rows(rows: Tensor, most: int, generator: torch.Generator, sides: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Places of a batch in [R, T] as it lies in memory, and where its tokens are; one batch in six has no padding."""
    rows = rows[: 1 + int(_between(0, len(rows), generator))]
    width = int(_log_between(1, most + 1, generator))
    side = sides[int(_between(0, len(sides), generator))] if sides and _between(0, 6, generator) > 1 else ""
    lengths = torch.tensor([[int(_log_between(1, width + 1, generator)) if side else width] for _ in rows])
    at = (torch.arange(width) - (width - lengths if side == "left" else 0)) % width
    return rows[:, None] * most + at, at < lengths


def _between(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _log_between(low: float, high: float, generator: torch.Generator) -> float:
    """Short ones as often as long ones."""
    return float(low * (high / low) ** _between(0, 1, generator))


def repadded(ids: Tensor, mask: Tensor | None, *, left: bool) -> tuple[Tensor, Tensor]:
    """Return the same tokens with more padding of another kind, and their mask.

    Args:
        ids: [R, T].
        mask: bool [R, T]; None for all.
        left: where the padding comes.

    Returns:
        [R, T + 5] each.
    """
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    others = ids[:, :1].repeat(1, ids.shape[1] + 5)
    lengths = mask.sum(1, keepdim=True)
    at = torch.arange(others.shape[1])
    there = at >= len(at) - lengths if left else at < lengths
    others[there] = ids[mask]
    return others, there
