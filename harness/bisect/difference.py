"""How far predictions are from the base's: a ratio of two sums over tokens, so that it can be said of a sequence and of all of them.

kl    mean KL(base || other) per token, in nats            loss  increase of the mean loss per token, in nats
sqnr  noise over signal of the logits; shown in dB, where 20 dB is 0.01

B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import ModelError
from compressor.progress import Progress, SilentProgress
from harness.bisect.models import Pair, sorted_by_first_call
from harness.bisect.search import Measure
from harness.validation.behaviour.scoring import TokenBatch

# A model that is base here and compressed there: modules change places for the time of a forward, nothing is copied.


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


Terms = Callable[[Tensor, Tensor, TokenBatch], tuple[Tensor, Tensor]]


def _kl(other: Tensor, base: Tensor, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    wanted, found = base.log_softmax(-1), other.log_softmax(-1)
    terms = torch.where(wanted > -math.inf, wanted.exp() * (wanted - found), torch.zeros_like(wanted)).sum(-1)
    return (terms * tokens.predicting).sum(1), tokens.predicting.sum(1)


def _loss(other: Tensor, base: Tensor, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    scored = tokens.scored.to(base.device)
    targets = tokens.input_ids[:, 1:, None].to(base.device)
    losses = [-logits[:, :-1].log_softmax(-1).gather(-1, targets)[..., 0] for logits in (other, base)]
    return ((losses[0] - losses[1]) * scored).sum(1), scored.sum(1)


def _noise(other: Tensor, base: Tensor, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    judged = tokens.predicting[..., None]
    return ((other - base).square() * judged).sum((1, 2)), (base.square() * judged).sum((1, 2))


MEASURES: Mapping[str, Terms] = MappingProxyType({"kl": _kl, "loss": _loss, "sqnr": _noise})


def shown(value: float, measure: str) -> str:
    """Return a difference as people read it.

    Args:
        value: the ratio.
        measure: a key of MEASURES.

    Returns:
        With its unit.
    """
    if measure != "sqnr":
        return f"{value:.4g} nats"
    return "equal logits" if value == 0 else f"{-10 * math.log10(value):.1f} dB" if math.isfinite(value) else "-inf dB"


def limit_from(given: float | None, measure: str) -> float | None:
    """Return a limit as people give it as a ratio: SQNR comes in dB.

    Args:
        given: nats or dB; None for none.
        measure: a key of MEASURES.

    Returns:
        What `search` takes.
    """
    return 10 ** (-given / 10) if given is not None and measure == "sqnr" else given


@dataclass
class Comparer:
    """Runs mixed models over the data and compares them with the base; every mixture once.

    Attributes:
        pair: both models.
        batches: the data.
        measure: a key of MEASURES.
        progress: shows a bar for each pass.
        num_passes: over the data, the base's own included.
        by_sequence: of each mixture seen so far, the difference of each sequence.
    """

    pair: Pair
    batches: Sequence[TokenBatch]
    measure: str = "kl"
    progress: Progress = field(default_factory=SilentProgress)
    num_passes: int = 0
    by_sequence: dict[frozenset[str], list[float]] = field(default_factory=dict)
    _base: list[Tensor] = field(default_factory=list)
    _totals: dict[frozenset[str], float] = field(default_factory=dict)

    def run_base(self) -> list[str]:
        """Keep what the base predicts.

        Returns:
            The parts that differ, in the order in which they first ran.

        Raises:
            ModelError: it predicts NaN.
        """
        calls: dict[str, int] = {}
        handles = [self.pair.base.get_submodule(name).register_forward_pre_hook(_noting(name, calls)) for name in self.pair.parts]
        try:
            self._base = self._logits(self.pair.base)
        finally:
            for handle in handles:
                handle.remove()
        # Comparisons with NaN hold nowhere, so that any model would seem equal to such a base.
        if any(bool(logits.log_softmax(-1)[tokens.real].isnan().any()) for logits, tokens in zip(self._base, self.batches, strict=True)):
            raise ModelError("the base model's predictions are not finite on this data; nothing can be compared with it")
        return sorted_by_first_call(self.pair.parts, calls)

    def __call__(self, names: frozenset[str]) -> float:
        """Return the difference with these parts compressed."""
        if names not in self._totals:
            self._totals[names], self.by_sequence[names] = self._compare(names, {})
        return self._totals[names]

    def instead(self, name: str, module: nn.Module) -> float:
        """Return the difference with one part compressed and another module in its place.

        Args:
            name: of the part.
            module: to put there.

        Returns:
            The difference.
        """
        return self._compare(frozenset([name]), {name: module})[0]

    def of_layers(self, layers: Mapping[str, Sequence[str]]) -> Measure:
        """Return the same measure over layers instead of parts.

        Args:
            layers: parts by layer.

        Returns:
            A function of the names of layers.
        """
        return lambda names: self(frozenset(part for layer in names for part in layers[layer]))

    def outside(self) -> float:
        """Return how far the compressed model is from the base with all its parts: what differs there is no part of a module."""
        everything = frozenset(self.pair.parts)
        with swapped(self.pair, everything) as mixed:
            inside = self._logits(mixed)
        self._totals[everything], self.by_sequence[everything] = self._distance(inside, self._base)
        return self._distance(self._logits(self.pair.compressed), inside)[0]

    def _compare(self, names: frozenset[str], instead: Mapping[str, nn.Module]) -> tuple[float, list[float]]:
        with swapped(self.pair, names, instead) as mixed:
            logits = self._logits(mixed)
        return self._distance(logits, self._base)

    def _distance(self, logits: Sequence[Tensor], bases: Sequence[Tensor]) -> tuple[float, list[float]]:
        terms = [
            MEASURES[self.measure](other.to(torch.float64), base.to(torch.float64), tokens)
            for other, base, tokens in zip(logits, bases, self.batches, strict=True)
        ]
        above, below = (torch.cat([term[place].to(torch.float64) for term in terms]) for place in (0, 1))
        return _ratio(above.sum(), below.sum()), [_ratio(*each) for each in zip(above, below, strict=True)]

    def _logits(self, model: nn.Module) -> list[Tensor]:
        self.num_passes += 1
        found = []
        with self.progress.task(f"pass {self.num_passes}", len(self.batches)) as task, torch.inference_mode():
            for tokens in self.batches:
                mask: dict[str, Any] = {} if tokens.mask is None else {"attention_mask": tokens.mask.long().to(self.pair.device)}
                output = model(input_ids=tokens.input_ids.to(self.pair.device), use_cache=self.pair.use_cache, **mask)
                found.append(output.logits.cpu())
                task.advance(1)
        return found


def _noting(name: str, calls: dict[str, int]) -> Callable[..., None]:
    """A hook that notes when a module first ran."""

    def note(*_: Any) -> None:
        calls.setdefault(name, len(calls))

    return note


def _ratio(above: Tensor, below: Tensor) -> float:
    """The ratio; infinite where it is no number, 0 where nothing was to be compared."""
    if float(above) == 0.0:
        return 0.0
    value = float(above) / float(below) if float(below) else math.inf
    return math.inf if math.isnan(value) else value
