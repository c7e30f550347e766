"""The answer of `harness bisect`: as text for people, as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from harness.bisect.blame import Blame
from harness.bisect.difference import shown
from harness.bisect.search import Culprit, Search
from harness.reporting.verdict import EXIT_CODES, Verdict


class Answer(StrEnum):
    """What a search found."""

    FOUND = "found"
    SPREAD = "spread"
    EQUAL = "no difference"

    @property
    def verdict(self) -> Verdict:
        """What that means for who asked."""
        return {Answer.EQUAL: Verdict.PASS, Answer.FOUND: Verdict.REGRESSION, Answer.SPREAD: Verdict.INCONCLUSIVE}[self]


@dataclass(frozen=True)
class GuiltyLayer:
    """One layer and the modules in it that make its difference.

    Attributes:
        culprit: the layer.
        modules: guilty modules; empty where no module makes most of it by itself.
        shares: difference of each module by itself; only where it is spread over the layer.
    """

    culprit: Culprit
    modules: tuple[Blame, ...]
    shares: Mapping[str, float]


@dataclass(frozen=True)
class BisectReport:
    """What was found.

    Attributes:
        base: folder.
        compressed: folder.
        measure: kl, loss or sqnr.
        num_parts: modules that differ in any bit.
        num_layers: layers in which they are.
        num_sequences: of the data.
        search: over the layers.
        layers: the guilty ones.
        num_passes: over the data, in all.
        suspects: further modules whose weight is much farther from the base's than is usual, in dB, by name: weight and usual value.
        test: a pytest file that fails until the first guilty part is repaired; None where there is none.
    """

    base: str
    compressed: str
    measure: str
    num_parts: int
    num_layers: int
    num_sequences: int
    search: Search
    layers: tuple[GuiltyLayer, ...]
    num_passes: int
    suspects: Mapping[str, tuple[float, float]]
    test: str | None

    @property
    def answer(self) -> Answer:
        """Whether there is a difference, and whether layers were found that make it."""
        if not self.search.differs:
            return Answer.EQUAL
        return Answer.FOUND if self.layers else Answer.SPREAD

    @property
    def verdict(self) -> Verdict:
        """What the answer means."""
        return self.answer.verdict

    @property
    def exit_code(self) -> int:
        """Of the command line."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "schema_version": 2,
            "verdict": self.verdict.value,
            "answer": self.answer.value,
            "base": self.base,
            "compressed": self.compressed,
            "measure": self.measure,
            "total": self.search.total,
            "limit": self.search.limit,
            "is_monotone": self.search.is_monotone,
            "num_layers": self.num_layers,
            "num_parts": self.num_parts,
            "num_sequences": self.num_sequences,
            "num_passes": self.num_passes,
            "layers": [
                {
                    **vars(layer.culprit),
                    "modules": [blame.to_dict() for blame in layer.modules],
                    "alone_by_module": dict(layer.shares),
                }
                for layer in self.layers
            ],
            "suspects": {name: {"weight_sqnr_db": weight, "usual_sqnr_db": usual} for name, (weight, usual) in self.suspects.items()},
            "alone_by_layer": dict(self.search.alone),
            "test": self.test,
        }

    def to_text(self) -> str:
        """Return lines for people, without the test."""
        found = self.search
        lines = [
            f"base        {self.base}",
            f"compressed  {self.compressed}",
            f"differ      {self.num_parts} modules in {self.num_layers} layers",
            f"difference  {self._shown(found.total)} ({self.measure}), limit {self._shown(found.limit)}, {self.num_sequences} sequences",
        ]
        lines += [line for layer in self.layers for line in self._layer_lines(layer)]
        lines += self._spread_lines()
        lines += [
            f"suspect     {name}: weight {_decibels(weight)} against the base's, elsewhere {_decibels(usual)}"
            for name, (weight, usual) in self.suspects.items()
        ]
        lines += [f"passes      {self.num_passes} over the data, where one per module would be {self.num_parts + 1}"]
        lines += [] if found.is_monotone else ["note        not monotone: more compressed parts were seen to differ less; effects cancel"]
        return "\n".join([*lines, f"answer      {self.answer.value}"]) + "\n"

    def _shown(self, value: float) -> str:
        return shown(value, self.measure)

    def _layer_lines(self, layer: GuiltyLayer) -> list[str]:
        culprit = layer.culprit
        lines = [f"layer       {culprit.name}: alone {self._shown(culprit.alone)}; without it {self._shown(culprit.rest)} are left"]
        lines += [line for blame in layer.modules for line in self._module_lines(blame)]
        if layer.shares:
            lines += ["  spread over its modules, each alone:", *self._share_lines(layer.shares, "    ")]
        return lines

    def _module_lines(self, blame: Blame) -> list[str]:
        recorded = f", error {blame.recorded_error:.3g} when it was made" if blame.recorded_error is not None else ""
        made = f"{blame.modifier}{f' ({blame.scheme})' if blame.scheme else ''}{recorded}"
        lines = [
            f"  module    {blame.module}: alone {self._shown(blame.alone)}",
            f"  modifier  {made}",
            f"  stage     {blame.stage or 'unknown'}",
        ]
        if blame.weight_sqnr_db is not None:
            usual = (
                f"; {blame.module.rpartition('.')[2]} elsewhere {_decibels(blame.usual_sqnr_db)}" if blame.usual_sqnr_db is not None else ""
            )
            lines.append(f"  weight    {_decibels(blame.weight_sqnr_db)} against the base's{usual}")
        return lines + ([f"  part      {blame.part}"] if blame.part else [])

    def _spread_lines(self) -> list[str]:
        alone = self.search.alone
        if not alone:
            return []
        if self.layers:
            return ["rest        the rest is spread, each layer alone:", *self._share_lines(alone, "  ")]
        beyond = [name for name, value in alone.items() if value > self.search.limit]
        which = (
            f"{len(beyond)} layers go beyond the limit by themselves, {beyond[0]} first"
            if beyond
            else "no layer goes beyond the limit by itself"
        )
        return [f"spread      {which}; each alone:", *self._share_lines(alone, "  ")]

    def _share_lines(self, alone: Mapping[str, float], indent: str) -> list[str]:
        whole = sum(value for value in alone.values() if math.isfinite(value))
        width = max(map(len, alone))
        return [
            f"{indent}{name:<{width}}  {self._shown(value)}" + (f"  {value / whole:.0%}" if whole > 0 and math.isfinite(value) else "")
            for name, value in alone.items()
        ]


def _decibels(value: float) -> str:
    return "equal" if math.isinf(value) and value > 0 else f"{value:.1f} dB"
