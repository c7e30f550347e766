"""The five tiers of equality, as checked data that a manifest can hold. No torch: a tier says what is allowed, `compare` measures it.

    T0  bitwise: dtype, shape and every bit, NaN payloads and the sign of zero included
    T1  ulp: so many representable numbers apart
    T2  tie-aware codes: equal, but for one step where the value that was rounded lay on a tie
    T3  functional: SQNR, relative error, KL divergence, loss ratio
    T4  statistical: the paired difference of the means lies within a margin, with its interval

dtype and shape must be equal in every tier, and NaN and infinity stand in the same places. Of complex numbers both parts are held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from compressor.errors import UserInputError

Direction = Literal["max", "min", "fixed"]
"""Which change of a limit loosens it: a larger one, a smaller one, or any."""


@dataclass(frozen=True)
class Tier:
    """How equal one tensor must be.

    Attributes:
        code: T0 to T4.
        directions: for each field, which change loosens it.
    """

    code: ClassVar[str] = ""
    directions: ClassVar[Mapping[str, Direction]] = {}

    def __str__(self) -> str:
        """The tier as it would be written in a test; after the first field, those at their defaults are left out."""
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        given = [
            f"{name}={value!r}"
            for place, (name, value, default) in enumerate(values)
            if value is not None and (not place or value != default)
        ]
        return f"{self.code}({', '.join(given)})"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; what stands at None is left out."""
        return {"tier": self.code, **{f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}}

    def loosens(self, old: Tier) -> bool:
        """Say whether this tier may let something through that `old` stops.

        Args:
            old: the tier so far.

        Returns:
            False only where this tier is provably as strict: T0, or the same tier with no limit loosened.
        """
        if isinstance(self, T0):
            return False
        if type(self) is not type(old):
            return True
        return any(_is_looser(getattr(self, name), getattr(old, name), way) for name, way in self.directions.items())

    def _number(self, name: str, low: float, high: float = math.inf) -> None:
        """Refuse a limit that is no number of [low, high)."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
            raise UserInputError(f"{self.code}: {name}={value!r} is not a number from {low:g} on, below {high:g}; give one")


def _is_looser(new: Any, old: Any, way: Direction) -> bool:
    if new == old:
        return False
    if way == "fixed" or new is None:
        return True
    if old is None:
        return False
    return bool(new > old) if way == "max" else bool(new < old)


@dataclass(frozen=True)
class T0(Tier):
    """Bitwise equal."""

    code: ClassVar[str] = "T0"


@dataclass(frozen=True)
class T1(Tier):
    """At most so many units in the last place apart; integers and bools, which have no such unit, must be equal.

    Attributes:
        max_ulp: representable numbers between the two, at most; +0 and -0 are the same.
        at: where a unit is measured: at each `value`, or at the largest magnitude of the `tensor`, for sums in which terms cancel.
    """

    max_ulp: int = 1
    at: Literal["value", "tensor"] = "value"
    code: ClassVar[str] = "T1"
    directions: ClassVar[Mapping[str, Direction]] = {"max_ulp": "max", "at": "fixed"}

    def __post_init__(self) -> None:
        """Refuse limits that are none."""
        self._number("max_ulp", 0)
        if self.max_ulp != int(self.max_ulp) or self.at not in ("value", "tensor"):
            raise UserInputError(
                f"T1: max_ulp={self.max_ulp!r}, at={self.at!r} is no limit; give a whole number, and at='value' or 'tensor'"
            )


@dataclass(frozen=True)
class T2(Tier):
    """Equal codes, but for one step at ties.

    A code may be the neighbour of the expected one where the value before rounding lay in the middle between both, to within 4 eps of
    itself. That value is read from the *expected* side (the golden), so that a wrong scale cannot excuse its own codes.

    Attributes:
        values: name of the tensor beside this one that holds the values before rounding, or the weight where `scale` is given.
        scale: name of the tensor to divide `values` by; it broadcasts, or its last dimension counts the groups of the last one of `values`.
        zero_point: name of the tensor that is added after the division.
        max_share: largest share of the codes that may differ, in (0, 1].
    """

    values: str
    scale: str | None = None
    zero_point: str | None = None
    max_share: float = 1.0
    code: ClassVar[str] = "T2"
    directions: ClassVar[Mapping[str, Direction]] = {"values": "fixed", "scale": "fixed", "zero_point": "fixed", "max_share": "max"}

    def __post_init__(self) -> None:
        """Refuse a share that is none, and names that are none."""
        self._number("max_share", 0, 1.0000001)
        for name in ("values", "scale", "zero_point"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and (value is not None or name == "values"):
                raise UserInputError(
                    f"T2: {name}={value!r} names no tensor; name the one with the values before rounding, or what enters them"
                )
        if self.zero_point is not None and self.scale is None:
            raise UserInputError("T2: zero_point was given without scale; give both, or values that are divided and shifted already")


@dataclass(frozen=True)
class T3(Tier):
    """Functionally equal: every limit that is given holds.

    Attributes:
        min_sqnr_db: 10 log10(|expected|^2 / |actual - expected|^2), at least.
        max_relative_error: |actual - expected| / |expected|, at most.
        max_kl: mean KL(softmax(expected) || softmax(actual)) over the last dimension, in nats, at most; for logits.
        max_loss_ratio: mean(actual) / mean(expected), and its inverse, at most; for losses. It says nothing about their order.
    """

    min_sqnr_db: float | None = None
    max_relative_error: float | None = None
    max_kl: float | None = None
    max_loss_ratio: float | None = None
    code: ClassVar[str] = "T3"
    directions: ClassVar[Mapping[str, Direction]] = {
        "min_sqnr_db": "min",
        "max_relative_error": "max",
        "max_kl": "max",
        "max_loss_ratio": "max",
    }

    def __post_init__(self) -> None:
        """Refuse a tier without a limit."""
        lows = {"min_sqnr_db": -math.inf, "max_relative_error": 0.0, "max_kl": 0.0, "max_loss_ratio": 1.0}
        given = [name for name in lows if getattr(self, name) is not None]
        if not given:
            raise UserInputError(f"T3: no limit was given, and one is needed; give {', '.join(lows)} or several of them")
        for name in given:
            self._number(name, lows[name])


@dataclass(frozen=True)
class T4(Tier):
    """Statistically equal: the interval of the paired mean difference lies within the margin on both sides. Bools count as 0 and 1.

    Attributes:
        margin: difference of the means that is allowed, > 0, in the tensor's own unit.
        confidence: of the two-sided interval.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
    """

    margin: float
    confidence: float = 0.95
    num_resamples: int = 2000
    seed: int = 0
    code: ClassVar[str] = "T4"
    directions: ClassVar[Mapping[str, Direction]] = {"margin": "max", "confidence": "min", "num_resamples": "fixed", "seed": "fixed"}

    def __post_init__(self) -> None:
        """Refuse a margin or a confidence that is none."""
        self._number("margin", 1e-300)
        self._number("confidence", 0.5000001, 1.0)
        self._number("num_resamples", 100, 1e7)
        self._number("seed", 0)
        if self.num_resamples != int(self.num_resamples) or self.seed != int(self.seed):
            raise UserInputError(f"T4: num_resamples={self.num_resamples!r}, seed={self.seed!r} is no count; give whole numbers")


TIERS: Mapping[str, type[Tier]] = {tier.code: tier for tier in (T0, T1, T2, T3, T4)}
EVERY = "*"
"""The name in a TierMap that stands for every tensor without a tier of its own."""


@dataclass(frozen=True)
class TierMap:
    """A tier for each tensor of a golden; what is not named must be bitwise equal."""

    tiers: Mapping[str, Tier]

    @classmethod
    def of(cls, given: Tier | Mapping[str, Tier] | TierMap | None) -> TierMap:
        """Read what a test gave.

        Args:
            given: one tier for every tensor, or a tier by tensor name, where "*" stands for all others; None for T0.

        Returns:
            The map.

        Raises:
            UserInputError: something else was given.
        """
        if isinstance(given, TierMap):
            return given
        named = dict(given) if isinstance(given, Mapping) else {EVERY: T0() if given is None else given}
        for name, tier in named.items():
            if not isinstance(tier, Tier):
                raise UserInputError(f"tier of {name!r}: {tier!r} is no tier; give T0() to T4(...) of harness.tolerance")
        return cls(named)

    @classmethod
    def from_dict(cls, data: Any) -> TierMap:
        """Read `to_dict` back.

        Args:
            data: JSON types.

        Returns:
            The map.

        Raises:
            UserInputError: an unknown tier or limit.
        """
        if not isinstance(data, Mapping):
            raise UserInputError(f"tier: {data!r} is no mapping from tensor to tier; write the golden anew")
        return cls({name: _read_tier(entry) for name, entry in data.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {name: tier.to_dict() for name, tier in self.tiers.items()}

    def __str__(self) -> str:
        """The tiers, the one for all others first."""
        if set(self.tiers) == {EVERY}:
            return str(self.tiers[EVERY])
        return ", ".join(f"{name}: {self.tiers[name]}" for name in sorted(self.tiers))

    def tier_of(self, tensor: str) -> Tier:
        """Return the tier of one tensor."""
        return self.tiers.get(tensor, self.tiers.get(EVERY, T0()))

    def unknown_names(self, tensors: Iterable[str]) -> list[str]:
        """Return the names that are given a tier, or that a T2 reads, and that no tensor has."""
        present = set(tensors)
        named = {name for name in self.tiers if name != EVERY}
        for tier in self.tiers.values():
            if isinstance(tier, T2):
                named |= {name for name in (tier.values, tier.scale, tier.zero_point) if name}
        return sorted(named - present)

    def loosened(self, old: TierMap, tensors: Iterable[str]) -> list[str]:
        """Return the tensors whose tier may let more through than `old` did."""
        return [name for name in tensors if self.tier_of(name).loosens(old.tier_of(name))]


def _read_tier(entry: Any) -> Tier:
    if not isinstance(entry, Mapping) or entry.get("tier") not in [*TIERS]:
        raise UserInputError(f"tier: {entry!r} is none of {', '.join(TIERS)}; a newer harness may have written it")
    kind = TIERS[entry["tier"]]
    try:
        return kind(**{name: value for name, value in entry.items() if name != "tier"})
    except TypeError as error:
        raise UserInputError(
            f"tier: {dict(entry)!r} has limits that {kind.code} does not know; a newer harness may have written it"
        ) from error
