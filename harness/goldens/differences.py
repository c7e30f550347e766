"""The difference between a failed check's outputs and their golden, measured anew from the files of both."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.goldens.report import comparison_lines
from harness.goldens.store.candidates import Candidate
from harness.goldens.store.encoding import decode
from harness.goldens.store.manifest import GoldenEntry, read_manifest
from harness.goldens.store.paths import folder_of
from harness.goldens.store.provenance import nearest
from harness.goldens.store.store import GoldenStore
from harness.tolerance import Comparison, TierMap, compare


@dataclass(frozen=True)
class Difference:
    """What a candidate and its golden have apart.

    Attributes:
        candidate: of the failed check.
        comparisons: one per tensor that both have.
        notes: tensors that only one side has, another platform, changed inputs or limits.
        pairs: actual and expected tensor by name, for pictures.
    """

    candidate: Candidate
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]
    pairs: Mapping[str, tuple[Tensor, Tensor]] = field(repr=False)

    @property
    def ok(self) -> bool:
        """True when candidate and golden are the same after all: it was accepted meanwhile."""
        return not self.notes and all(comparison.ok for comparison in self.comparisons)

    def lines(self) -> list[str]:
        """Return the difference as text."""
        found = self.candidate
        rows = [comparison.to_dict() for comparison in self.comparisons]
        shown = [f"{found.name}: {found.verdict} in {found.test}", *(f"  {note}" for note in self.notes), *comparison_lines(rows)]
        return [*shown, f"  reproduce: pytest {shlex.quote(found.test)}", ""]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "name": self.candidate.name,
            "test": self.candidate.test,
            "verdict": self.candidate.verdict,
            "summary": self.candidate.summary,
            "notes": list(self.notes),
            "tensors": [comparison.to_dict() for comparison in self.comparisons],
        }


def difference_of(root: Path, candidate: Candidate) -> Difference:
    """Measure a candidate against its golden as it is now.

    Args:
        root: of the store.
        candidate: of a failed check.

    Returns:
        The difference.

    Raises:
        GoldenError: the store or the candidate cannot be read.
    """
    actual = decode(str(candidate.tensors_path), candidate.data(), candidate.tensors)
    entry = read_manifest(root / folder_of(candidate.name)).goldens.get(candidate.name)
    if entry is None:
        return Difference(candidate, (), ("there is no golden yet",), {})
    variant = entry.variants[nearest(candidate.platform, [variant.platform for variant in entry.variants])]
    expected = GoldenStore(root).load(entry, variant)
    tier, notes = candidate.tier, _changes(entry, candidate)
    if variant.platform != candidate.platform and candidate.elsewhere is not None:
        tier = candidate.elsewhere
    comparisons, pairs = _compare(actual, expected, tier)
    failed = any(not comparison.ok for comparison in comparisons)
    if failed and variant.platform != candidate.platform:
        notes.append(f"accepted on {variant.platform}, computed on {candidate.platform}")
    for word, names in (("only in the golden", set(expected) - set(actual)), ("only in the outputs", set(actual) - set(expected))):
        notes += [f"{word}: {name}" for name in sorted(names)]
    return Difference(candidate, comparisons, tuple(notes), pairs)


def _compare(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tier: TierMap
) -> tuple[tuple[Comparison, ...], dict[str, tuple[Tensor, Tensor]]]:
    both = sorted(set(actual) & set(expected))
    whole = set(actual) == set(expected)  # T2 reads tensors beside its own, which may be the missing ones
    found = tuple(
        compare(actual[name], expected[name], tier.tier_of(name) if whole else None, name=name, context=expected) for name in both
    )
    return found, {name: (actual[name], expected[name]) for name in both}


def _changes(entry: GoldenEntry, candidate: Candidate) -> list[str]:
    notes = []
    for name in sorted({*entry.inputs, *candidate.inputs}):
        new, old = candidate.inputs.get(name), entry.inputs.get(name)
        if new != old:
            notes.append(f"input {name!r}: {new or 'not given'} where the golden has {old or 'none'}")
    for word, now, then in (("recipe", candidate.recipe, entry.recipe), ("seed", candidate.seed, entry.seed)):
        if now != then:
            notes.append(f"{word}: {str(now)[:12]} where the golden has {str(then)[:12]}")
    names = dict.fromkeys([*candidate.tensors, *entry.variants[0].tensors])
    if candidate.tier.loosened(entry.tier, names):
        notes.append(f"limit: {candidate.tier} where the golden has {entry.tier}")
    return notes
