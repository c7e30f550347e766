"""Which scales may move in a model and what may be turned, before a recipe is written: what `compressor mappings` prints and draws."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compressor.data import Batch
from compressor.errors import TargetError
from compressor.mappings import Mappings, Refusal, ScalePair, find_pairs
from compressor.mappings.basis import Basis, find_basis
from compressor.mappings.pairs import pattern_of
from compressor.model.evaluation import check_dtypes_around
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.loading.sample_batches import sample_batches
from compressor.model.loading.stand_in import stand_in
from compressor.settings.options import from_settings
from compressor.settings.verbs import MappingsSettings
from compressor.tracing.footprint import Footprint
from compressor.tracing.picture import Box, Picture, shortened

_WIDTH = 120  # characters of a line of what may not move


@dataclass(frozen=True)
class MappingsReport:
    """What was found.

    Attributes:
        model_class: class of the model.
        weights: what its weights are.
        batches: what ran.
        found: the pairs, and what was refused.
        num_left_out: layers that the model lacks because they repeat others.
        basis: the hidden states that may be turned; None where there are none.
        why_no_basis: what is in the way; empty where nothing is.
    """

    model_class: str
    weights: str
    batches: str
    found: Mappings
    num_left_out: int = 0
    basis: Basis | None = None
    why_no_basis: str = ""

    @property
    def kinds(self) -> list[list[ScalePair]]:
        """Pairs by their kind: the same names of source and readers but for the numbers of layers and experts."""
        made: dict[tuple[str, str], list[ScalePair]] = {}
        for pair in self.found.pairs:
            made.setdefault((pattern_of(pair.source), _kinds(pair.readers)), []).append(pair)
        return list(made.values())

    @property
    def refused_kinds(self) -> dict[str, list[Refusal]]:
        """Refused sources by their kind."""
        made: dict[str, list[Refusal]] = {}
        for refusal in self.found.refused:
            made.setdefault(pattern_of(refusal.source), []).append(refusal)
        return made

    @property
    def headline(self) -> str:
        """The first line of the report."""
        found = self.found
        return f"{self.model_class}: {len(found.pairs)} scales may move, {len(self.kinds)} kinds; {len(found.refused)} may not"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        own = {"model_class": self.model_class, "weights": self.weights, "batches": self.batches, "num_left_out": self.num_left_out}
        pairs, refused = [asdict(pair) for pair in self.found.pairs], [asdict(one) for one in self.found.refused]
        basis = {"basis": None if self.basis is None else asdict(self.basis), "why_no_basis": self.why_no_basis}
        return {**own, "pairs": pairs, "refused": refused, **basis}

    def lines(self) -> list[str]:
        """Return the report for people, kind by kind."""
        lines = [self.headline, f"weights: {self.weights}", f"batches: {self.batches}"]
        for first, *others in self.kinds:
            kind, place = f"{pattern_of(first.source)} ({1 + len(others)})", "; ".join((first.place, *_remarks(first)))
            lines.append(f"{kind} -> {_kinds(first.readers)}, at {place}")
        lines += [f"not {kind} ({len(all_)}): {all_[0].why}" for kind, all_ in self.refused_kinds.items()]
        return [*lines, *self._basis_lines()]

    def _basis_lines(self) -> list[str]:
        if self.basis is None:
            return [f"hidden states may not be turned: {self.why_no_basis}"]
        mean = "; only by what keeps their mean" if self.basis.keeps_mean else ""
        return [
            f"hidden states of {self.basis.size} channels may be turned{mean}: written by {_kinds(self.basis.writers)}; "
            f"read by {_kinds(_basis_readers(self.basis))}, at {self.basis.place}"
        ]

    def picture(self) -> Picture:
        """Return what is drawn: an arrow for each kind, in the order of the model, from where a scale may leave to what reads it."""
        pairs = [
            _arrow(f"{pattern_of(first.source)} ({1 + len(others)})", (f"at {first.place}", *_remarks(first)), first.readers)
            for first, *others in self.kinds
        ]
        if self.basis is not None:
            what, readers = f"hidden states of {self.basis.size} channels may be turned", _basis_readers(self.basis)
            writers = [f"written by {name}" for name in dict.fromkeys(map(pattern_of, self.basis.writers))]
            pairs.append(_arrow(what, (f"at {self.basis.place}", *writers), readers))
        refused = [f"{kind} ({len(all_)}): {all_[0].why}" for kind, all_ in self.refused_kinds.items()]
        refused += [f"hidden states may not be turned: {self.why_no_basis}"] if self.why_no_basis else []
        lines = tuple(line for reason in refused for line in textwrap.wrap(reason, _WIDTH, subsequent_indent=4 * "\N{NO-BREAK SPACE}"))
        title = (self.headline, "An arrow leads from what gives a scale to all that take it.", f"weights: {self.weights}")
        return Picture(title, ignored=Box("may not move", lines, "ignored") if refused else None, pairs=pairs)


@from_settings(MappingsSettings)
def find_mappings(model: str | Path | nn.Module, settings: MappingsSettings) -> MappingsReport:
    """Find which scales may move in a model; nothing is changed or written.

    Args:
        model: folder with at least a config.json (equal layers are then looked at once, with random weights), or its name on the hub; or a
            model in memory.
        settings: how it is loaded and what it is fed.

    Returns:
        The report.

    Raises:
        UserInputError: the model cannot be used.
        TracingError: its forward cannot be repeated.
    """
    check_dtypes_around(find_mappings)
    stood = stand_in(
        model,
        model_class=settings.model_class,
        trust_remote_code=settings.trust_remote_code_model,
        differing=True,
        revision=settings.model_revision,
    )
    with Footprint(stood.model):
        given = sample_batches(stood.model, settings.modality)
    with unfused_experts(stood.model, hold=True) as experts:
        try:
            found = find_pairs(stood.model, given.batches[0], torch.device("cpu"))
            basis, why = _basis(stood.model, given.batches[0])
        finally:
            experts.restore()
    return MappingsReport(type(stood.model).__name__, stood.how, given.how, found, stood.num_left_out, basis, why)


def _basis(model: nn.Module, batch: Batch) -> tuple[Basis | None, str]:
    try:
        return find_basis(model, batch, torch.device("cpu")), ""
    except TargetError as error:
        return None, str(error)


def _kinds(names: Sequence[str]) -> str:
    return shortened(list(dict.fromkeys(pattern_of(name) for name in names)))


def _arrow(title: str, lines: tuple[str, ...], readers: Sequence[str]) -> tuple[Box, Box]:
    return Box(title, lines, "stage"), Box("is read by", tuple(dict.fromkeys(map(pattern_of, readers))), "outside")


def _basis_readers(basis: Basis) -> tuple[str, ...]:
    return (*(pair.source for pair in basis.norms), *basis.readers)


def _remarks(pair: ScalePair) -> list[str]:
    heads = [f"heads of {pair.head_dim}, each read {pair.repeats} times"] if pair.head_dim is not None else []
    return heads + ([f"the norm multiplies by {pair.offset:g} + weight"] if pair.offset else [])
