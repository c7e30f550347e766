"""The golden store: hold tensors against what was accepted before, and say in one word what is the matter. Never writes.

Inputs are looked at first: outputs of other inputs are neither right nor wrong, so "inputs drifted" is a verdict of its own and the outputs
are not judged. Then the limits: one that was loosened without a reason, or that a decoy passes, fails whatever the outputs are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from harness.errors import GoldenError
from harness.goldens.store.encoding import decode
from harness.goldens.store.manifest import GoldenEntry, TensorEntry, Variant, find_entry
from harness.goldens.store.paths import deletion, folder_of, relative_path
from harness.goldens.store.provenance import Platform, nearest
from harness.reporting.verdict import Verdict
from harness.tolerance import Comparison, TierMap, compare, vacuous_decoys
from harness.tolerance.bits import to_bytes
from harness.tolerance.measures import measure

_COMPLEX = (torch.complex64, torch.complex128)
_WITH_NAN = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, *_COMPLEX)
_PLAINLY_DIFFERENT = 0.1
"""Relative error from which on the neighbouring tensor of a golden counts as another layer's."""


class GoldenVerdict(StrEnum):
    """What one check of a golden says."""

    PASS = "pass"
    MISSING = "missing"
    INPUTS_DRIFTED = "inputs drifted"
    REGRESSED = "outputs regressed"
    LOOSENED = "limit loosened"
    VACUOUS = "limit is vacuous"

    @property
    def verdict(self) -> Verdict:
        """What that means for who asked: a golden that cannot be held against anything is no pass."""
        return Verdict.PASS if self is GoldenVerdict.PASS else Verdict.REGRESSION


@dataclass(frozen=True)
class Question:
    """What a test asks of the store.

    Attributes:
        name: of the golden.
        tensors: what came out, contiguous, on the CPU.
        tier: how equal it must be.
        elsewhere: the tier on another platform than the golden's; None for the same.
        inputs: hashes of what the outputs were computed from.
        recipe: hash of the recipe, or None.
        seed: of everything random, or None.
        platform: where the outputs were computed.
        others: tensors of other layers that must not pass in place of these.
        reason: why the tiers are not T0.
    """

    name: str
    tensors: Mapping[str, Tensor]
    tier: TierMap
    elsewhere: TierMap | None
    inputs: Mapping[str, TensorEntry]
    recipe: str | None
    seed: int | None
    platform: Platform
    others: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Answer:
    """What the store says.

    Attributes:
        verdict: in one word.
        summary: the decisive fact.
        comparisons: one per tensor that was compared.
        note: that the golden is another platform's, and which tier applied; empty for its own.
        replaces_tier: the tier for elsewhere took the place of the tier.
    """

    verdict: GoldenVerdict
    summary: str
    comparisons: tuple[Comparison, ...] = ()
    note: str = ""
    replaces_tier: bool = False

    @property
    def ok(self) -> bool:
        """True for a pass."""
        return self.verdict.verdict is Verdict.PASS


class GoldenStore:
    """The goldens below one folder."""

    def __init__(self, root: str | Path) -> None:
        """Open a store; the folder need not exist yet."""
        self.root = Path(root)

    def find(self, name: str) -> GoldenEntry | None:
        """Return the manifest's entry of a golden, or None.

        Args:
            name: of the golden.

        Returns:
            The entry.

        Raises:
            GoldenError: the name makes no file, or another golden's, or the manifest cannot be read.
        """
        return find_entry(self.root, name)

    def load(self, entry: GoldenEntry, variant: Variant) -> dict[str, Tensor]:
        """Read the tensors of one variant, and hold every byte against the manifest.

        Args:
            entry: of the golden.
            variant: one of its variants.

        Returns:
            The tensors by name.

        Raises:
            GoldenError: the file is missing, cut off, corrupt, or not the one that the manifest describes.
        """
        try:
            return self._load(self.root / folder_of(entry.name) / variant.file, variant)
        except GoldenError as error:
            lost = ", all its platforms," if len(entry.variants) > 1 else ""
            anew = f"delete the golden{lost} with `{deletion(entry.name)}` and write it with `pytest --golden-update=new`"
            raise GoldenError(f"{error}; with none at hand, {anew}") from error

    def _load(self, path: Path, variant: Variant) -> dict[str, Tensor]:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise GoldenError(f"{path}: cannot be read ({error.strerror}); take it from version control again") from error
        tensors = decode(str(path), data, variant.tensors)
        if hashlib.sha256(data).hexdigest() != variant.sha256:
            raise GoldenError(f"{path}: is not the file that its manifest describes; take both from one version")
        return tensors

    def check(self, asked: Question) -> Answer:
        """Hold tensors against their golden.

        Args:
            asked: what a test asks.

        Returns:
            The answer; bad outputs never raise.

        Raises:
            GoldenError: the store cannot be read, or the question makes no sense.
        """
        _check_names(asked)
        entry = self.find(asked.name)
        if entry is None:
            return self.vacuous(asked) or self._missing(asked)
        early = _drifted(asked, entry) or _loosened(asked, entry) or _unexplained(asked, entry)
        if early:
            return early
        variant = entry.variants[nearest(asked.platform, [variant.platform for variant in entry.variants])]
        tier, note = _tier_here(asked, variant)
        return _judge(asked, self.load(entry, variant), tier, note, variant)

    def vacuous(self, asked: Question) -> Answer | None:
        """Say whether a decoy passes the limits of a question, for the outputs as they are: such limits are never written.

        Args:
            asked: what a test asks.

        Returns:
            The answer, or None for limits that measure something.
        """
        return _empty(asked.tensors) or _vacuous(asked, asked.tensors, [asked.tier, asked.elsewhere])

    def loosened(self, asked: Question) -> Answer | None:
        """Say whether a question asks less than its golden was accepted with, or less than every bit without a reason.

        Args:
            asked: what a test asks.

        Returns:
            The answer, or None.

        Raises:
            GoldenError: the manifest cannot be read.
        """
        entry = self.find(asked.name)
        return (_loosened(asked, entry) if entry else None) or _unexplained(asked, entry)

    def _missing(self, asked: Question) -> Answer:
        path = self.root / relative_path(asked.name)
        if path.exists():
            raise GoldenError(f"{path}: exists, but no manifest lists it; take {path.parent / 'manifest.json'} back, or delete the file")
        return Answer(GoldenVerdict.MISSING, f"there is no golden {asked.name!r} below {self.root}")


def _check_names(asked: Question) -> None:
    for tiers in (asked.tier, asked.elsewhere):
        unknown = tiers.unknown_names(asked.tensors) if tiers else []
        if unknown:
            raise GoldenError(
                f"golden {asked.name!r}: the tier names {unknown}, which no tensor is called; there are {sorted(asked.tensors)}"
            )


def _drifted(asked: Question, entry: GoldenEntry) -> Answer | None:
    changes = []
    for name in sorted({*asked.inputs, *entry.inputs}):
        new, old = asked.inputs.get(name), entry.inputs.get(name)
        if new != old:
            changes.append(f"input {name!r}: {new or 'not given'} where the golden has {old or 'none'}")
    for word, now, then in (("recipe", asked.recipe, entry.recipe), ("seed", asked.seed, entry.seed)):
        if now != then:
            changes.append(f"{word}: {str(now)[:12]} where the golden has {str(then)[:12]}")
    if not changes:
        return None
    text = f"{'; '.join(changes)}. The outputs were not judged: they come from something else"
    if all(variant.platform != asked.platform for variant in entry.variants):
        text += (
            f". The golden is of {entry.variants[0].platform}, this is {asked.platform}: torch.randn draws other numbers on another "
            "instruction set; draw with rand or randint, or store the inputs with golden.inputs"
        )
    return Answer(GoldenVerdict.INPUTS_DRIFTED, text)


def _loosened(asked: Question, entry: GoldenEntry) -> Answer | None:
    parts = []
    names = [*asked.tensors, *entry.variants[0].tensors]
    for word, new, old in (
        ("tier", asked.tier, entry.tier),
        ("elsewhere", asked.elsewhere or asked.tier, entry.elsewhere or entry.tier),
    ):
        if new.loosened(old, dict.fromkeys(names)):
            parts.append(f"{word}: {old} was accepted, {new} is asked")
    if not parts:
        return None
    return Answer(GoldenVerdict.LOOSENED, f"{'; '.join(parts)}. A limit is loosened only with --golden-reason")


def _unexplained(asked: Question, entry: GoldenEntry | None) -> Answer | None:
    """A tier that asks less than every bit has its reason, in the test or from the session that accepted it."""
    if asked.reason.strip() or (entry and entry.reason.strip()):
        return None
    for word, tier in (("tier", asked.tier), ("elsewhere", asked.elsewhere)):
        if tier is not None and tier.loosened(TierMap.of(None), asked.tensors):
            return Answer(GoldenVerdict.LOOSENED, f"{word}: {tier} asks less than every bit (T0), and nobody says why; give a reason=")
    return None


def _empty(tensors: Mapping[str, Tensor]) -> Answer | None:
    """Nothing but zeros, NaN or infinity is what comes out where nothing was computed.

    Beside tensors with values, integer zeros may be codes or zero points, and one number may be 0 or an infinite limit.
    """
    fills = {name: _nothing_but(tensor) for name, tensor in tensors.items() if tensor.numel()}
    if not fills:
        return Answer(
            GoldenVerdict.VACUOUS, f"{next(iter(tensors))}: holds no value at all, so only a shape is kept; give outputs with values"
        )
    has_values = not all(fills.values())
    for name, only in fills.items():
        may_be = has_values and (tensors[name].dtype not in _WITH_NAN or (tensors[name].numel() == 1 and only != "NaN"))
        if only and not may_be:
            return Answer(GoldenVerdict.VACUOUS, f"{name}: is nothing but {only}, which says that nothing was computed; see what made it")
    return None


def _nothing_but(tensor: Tensor) -> str:
    """Say what fills a tensor that no computation meant: no finite value but 0. Zeros and -inf together may be a mask."""
    if tensor.dtype not in _WITH_NAN:
        return "" if bool(to_bytes(tensor).any()) else "zeros"
    values = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    if bool((values.isfinite() & (values != 0)).any()):
        return ""
    kinds = {"NaN": values.isnan(), "infinity": values.isinf(), "zeros": values == 0}
    found = [word for word, where in kinds.items() if bool(where.any())]
    is_mask = found == ["infinity", "zeros"] and not bool((values.isinf() & (values != -math.inf)).any())
    return "" if is_mask else " and ".join(found)


def _tier_here(asked: Question, variant: Variant) -> tuple[TierMap, str]:
    if variant.platform == asked.platform:
        return asked.tier, ""
    where = f"accepted on {variant.platform}, checked on {asked.platform}"
    if asked.elsewhere is None:
        return asked.tier, (
            f"{where}; no tier is declared for elsewhere, so it stays {asked.tier}: declare elsewhere=..., "
            "or add this platform's own outputs with --golden-update=failed --golden-variant"
        )
    return asked.elsewhere, f"{where}; held to the tier for elsewhere, {asked.elsewhere}, in place of {asked.tier}"


def _judge(asked: Question, expected: Mapping[str, Tensor], tier: TierMap, note: str, variant: Variant) -> Answer:
    if set(asked.tensors) != set(expected):
        missing, extra = sorted(set(expected) - set(asked.tensors)), sorted(set(asked.tensors) - set(expected))
        text = "; ".join(f"{word} {names}" for word, names in (("lacks the tensors", missing), ("has more tensors:", extra)) if names)
        return Answer(GoldenVerdict.REGRESSED, text, note=note)
    found = tuple(
        compare(asked.tensors[name], expected[name], tier.tier_of(name), name=name, context=expected) for name in sorted(expected)
    )
    bad = [comparison for comparison in found if not comparison.ok]
    if bad:
        more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
        return Answer(GoldenVerdict.REGRESSED, f"{bad[0].tensor}: {bad[0].summary}{more}{_other_versions(variant)}", found, note)
    vacuous = _empty(expected) or _vacuous(asked, expected, [tier])
    if vacuous:
        return Answer(vacuous.verdict, vacuous.summary, found, note)
    replaced = tier is not asked.tier
    return Answer(GoldenVerdict.PASS, f"{len(found)} tensors within {tier}", found, note, replaced)


def _vacuous(asked: Question, expected: Mapping[str, Tensor], tiers: list[TierMap | None]) -> Answer | None:
    """Hold decoys against every tier: one that a decoy passes measures nothing."""
    for tier in tiers:
        for name, tensor in expected.items() if tier else ():
            assert tier is not None
            passed = vacuous_decoys(tensor, tier.tier_of(name), others={**_neighbours(name, expected), **asked.others}, context=expected)
            if passed:
                text = f"{name}: {tier.tier_of(name)} lets through what is plainly wrong ({', '.join(passed)}); tighten it"
                return Answer(GoldenVerdict.VACUOUS, text)
    return None


def _neighbours(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the other tensors of a golden that are plainly another layer's: two ways to compute one thing are no decoys of each other."""
    own = tensors[name]
    same_form = {
        other: tensor for other, tensor in tensors.items() if other != name and tensor.dtype == own.dtype and tensor.shape == own.shape
    }
    return {other: tensor for other, tensor in same_form.items() if measure(tensor, own).relative_error >= _PLAINLY_DIFFERENT}


def _other_versions(variant: Variant) -> str:
    from harness.goldens.store.provenance import versions

    now = versions()
    changed = [f"{name} {then} -> {now[name]}" for name, then in variant.versions.items() if name in now and now[name] != then]
    return f"; since then {', '.join(changed)}" if changed else ""
