"""What experts are worth, measured in float64 through the forward of their own class, and batches on which mistakes choose other experts.

One forward of many rows is enough: what a causal model computes for a token depends on nothing behind it, so that any rows, cut to any
length, are a batch whose scores are known. Of many such batches those are taken on which other readings of the criterion (means of means,
a token left out, another norm) would let other experts stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.checks.inputs.norm_linear_models import in_dtype, logits, truly

_UNDECIDED = 1e-4  # relative distance of two scores that rounding may exchange
_NUM_DRAWS = 96
Reading = Callable[[Sequence["Seen"]], Tensor]


@dataclass(frozen=True)
class Seen:
    """What was seen of the experts of one layer, by row, token and expert: [R, T, E] float64.

    Attributes:
        weights: of the router; 0 where it did not choose the expert.
        hits: 1 where it did.
        norms: of what the expert gives, by order of the norm.
        ids: of the tokens, [R, T, 1] int64.
    """

    weights: Tensor
    hits: Tensor
    norms: Mapping[float, Tensor]
    ids: Tensor

    def part(self, rows: Tensor, length: int) -> Seen:
        """Return what is seen of some rows, cut to a length."""
        return self.each(lambda one: one[rows, :length])

    def each(self, change: Callable[[Tensor], Tensor]) -> Seen:
        """Return another view of the same."""
        norms = {order: change(norm) for order, norm in self.norms.items()}
        return Seen(change(self.weights), change(self.hits), norms, change(self.ids))

    def without(self, number: int) -> Seen:
        """Return the same as if one id were padding."""
        there = self.ids != number
        return replace(self, weights=self.weights * there, hits=self.hits * there)


class Draw(NamedTuple):
    """Batches, and of each layer who should stay on them; None where rounding may decide."""

    ids: list[Tensor]
    wanted: list[set[int] | None]
    told: frozenset[str]


def look(model: nn.Module, layers: Sequence[str], ids: Tensor) -> list[Seen]:
    """See what each expert would give for each token.

    Args:
        model: a causal language model of transformers; not modified.
        layers: dotted names of its fused experts.
        ids: [R, T].

    Returns:
        Of each layer.
    """
    wide: Any = in_dtype(model, torch.float64)
    wide.config._experts_implementation = "eager"  # the products of others take no float64
    found: dict[str, Seen] = {}

    def note(name: str, module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        if name in found:
            return  # asked below
        hidden, index, weights = args
        number = module.get_parameter("down_proj").shape[0]
        found[name] = Seen(torch.empty(0), torch.empty(0), {}, torch.empty(0))
        ones = weights.new_ones(len(hidden), 1)
        outputs = [module(hidden, torch.full((len(hidden), 1), expert), ones).double() for expert in range(number)]
        chosen = index[..., None] == torch.arange(number)
        norms = {order: torch.stack([one.norm(order, dim=-1) for one in outputs], -1) for order in (1.0, 2.0, torch.inf)}
        given = (weights.double()[..., None] * chosen).sum(1)
        found[name] = Seen(given, chosen.any(1).double(), norms, ids[..., None]).each(lambda one: one.view(*ids.shape, -1))

    with ExitStack() as stack, truly(torch.float64), torch.no_grad():
        for name in layers:
            module = wide.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(lambda own, args, name=name: note(name, own, args)).remove)
        logits(wide, ids)
    return [found[name] for name in layers]


def _sum(seen: Sequence[Seen], order: float = 2.0) -> Tensor:
    return torch.stack([(one.weights * one.norms[order]).sum((0, 1)) for one in seen]).sum(0)


def mean_of_all(seen: Sequence[Seen], order: float = 2.0) -> Tensor:
    """Router weight times output norm, the mean over all tokens that an expert was sent: [E].

    Args:
        seen: batches.
        order: of the norm.

    Returns:
        A score by expert; 0 without tokens.
    """
    return _sum(seen, order) / torch.stack([one.hits.sum((0, 1)) for one in seen]).sum(0).clamp(min=1)


def _mean_of_means(parts: Sequence[Seen]) -> Tensor:
    means, used = torch.stack([mean_of_all([one]) for one in parts]), torch.stack([one.hits.sum((0, 1)) > 0 for one in parts])
    return means.sum(0) / used.sum(0).clamp(min=1)


def _rows(seen: Sequence[Seen]) -> list[Seen]:
    return [one.part(torch.tensor([row]), one.hits.shape[1]) for one in seen for row in range(len(one.hits))]


def _mean_of_first(length: int, seen: Sequence[Seen]) -> Tensor:
    return mean_of_all([one.each(lambda x: x[:, :length]) for one in seen])


def _mean_without(number: int, seen: Sequence[Seen]) -> Tensor:
    return mean_of_all([one.without(number) for one in seen])


# Mistakes that are easily made: each a score [E] of batches.
READINGS: Mapping[str, Reading] = {
    "a mean of the batches' means": _mean_of_means,
    "a mean of the rows' means": lambda seen: _mean_of_means(_rows(seen)),
    "no first token": lambda seen: mean_of_all([one.each(lambda x: x[:, 1:]) for one in seen]),
    "no last token": lambda seen: mean_of_all([one.each(lambda x: x[:, :-1]) for one in seen]),
    "the first row of each batch": lambda seen: mean_of_all([one.each(lambda x: x[:1]) for one in seen]),
    "the first batch": lambda seen: mean_of_all(seen[:1]),
    "the last batch": lambda seen: mean_of_all(seen[-1:]),
    "1-norms": lambda seen: mean_of_all(seen, 1.0),
    "largest values": lambda seen: mean_of_all(seen, torch.inf),
    "sums": _sum,
    "router weights alone": lambda seen: mean_of_all([replace(one, norms={2.0: one.hits}) for one in seen]),
    "outputs alone": lambda seen: mean_of_all([replace(one, weights=one.hits) for one in seen]),
}
LOW_IDS = 3
"""Ids that are commonly special; without a model's word they are tokens."""
LONG = 65
"""Tokens of the shortest of long rows."""
LONG_READINGS: Mapping[str, Reading] = {
    **{f"the first {length} tokens of each row": partial(_mean_of_first, length) for length in (24, 32, 64)},
    **{f"id {number} as padding": partial(_mean_without, number) for number in range(LOW_IDS)},
    **{f"{name}, of long rows": reading for name, reading in READINGS.items()},
}
"""Those that need long rows, or ids that are commonly special, and all others once more, of who takes long rows otherwise."""


def telling_draw(
    ids: Tensor, seen: Sequence[Seen], sparsity: float, readings: Mapping[str, Reading], untold: Collection[str], seed: int
) -> Draw:
    """Draw two batches of other sizes on which as many mistakes as possible would let other experts stay.

    Args:
        ids: [R, T].
        seen: of each layer.
        sparsity: share of the experts that go, rounded down.
        readings: the mistakes.
        untold: names of those that are looked for first.
        seed: of the draws.

    Returns:
        The best of some draws.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = [_draw(ids, seen, sparsity, readings, generator) for _ in range(_NUM_DRAWS)]
    return max(draws, key=lambda one: (len(one.told & set(untold)), len(one.told)))


def _draw(ids: Tensor, seen: Sequence[Seen], sparsity: float, readings: Mapping[str, Reading], generator: torch.Generator) -> Draw:
    rows, shortest = torch.randperm(len(ids), generator=generator), LONG if readings is LONG_READINGS else 2
    first, *lengths = (
        int(least * (most / least) ** float(torch.rand((), generator=generator)))
        for least, most in ((1, len(ids) - 2), (shortest, ids.shape[1] + 1), (shortest, ids.shape[1] + 1))
    )  # short ones as often as long ones
    cuts = [(rows[:first], lengths[0]), (rows[first : first + 2], lengths[1])]
    wanted: list[set[int] | None] = []
    told: set[str] = set()
    for layer in seen:
        batches = [layer.part(*cut) for cut in cuts]
        scores = mean_of_all(batches)
        wanted.append(staying(scores, sparsity))
        if wanted[-1] is not None:
            told |= {name for name, score in readings.items() if staying(score(batches), sparsity, 0.0) != wanted[-1]}
    return Draw([ids[chosen, :length] for chosen, length in cuts], wanted, frozenset(told))


def staying(scores: Tensor, sparsity: float, undecided: float = _UNDECIDED) -> set[int] | None:
    """Return the experts of the highest scores [E]; None where rounding may decide, unless `undecided` is 0."""
    gone = int(len(scores) * sparsity)
    values, order = scores.sort(stable=True)
    low, high = float(values[gone - 1]), float(values[gone])
    return None if high - low <= undecided * high and undecided else set(order[gone:].tolist())
