"""Planted bugs in the golden store and its tiers, against the statements that every store must keep."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from harness.goldens.store import encoding, store
from harness.goldens.store.manifest import TensorEntry
from harness.mutants.family import Family, Killer
from harness.mutants.patches import Mutant, Table
from harness.tolerance import comparison
from harness.tolerance.bits import to_bytes
from tests.mutation.golden_statements import STATEMENTS, Shelf

_DIFFERS = "harness.tolerance.measures:differs"
_FORM = "harness.tolerance.comparison:_form"
_ULP = "harness.tolerance.comparison:ulp_distance"
_EPS = "harness.tolerance.comparison:torch.finfo"
_TIER_HERE = "harness.goldens.store.store:_tier_here"
_DRIFTED = "harness.goldens.store.store:_drifted"
_LAST: dict[str, Tensor] = {}
"""What the store was last asked about, for the bug that compares a golden with itself."""


def _by_repr(left: Tensor, right: Tensor) -> Tensor:
    return torch.full((left.numel(),), repr(left) != repr(right))


def _by_value(left: Tensor, right: Tensor) -> Tensor:
    return ~torch.isclose(left.double(), right.double(), equal_nan=True).reshape(-1)


def _exact_values(left: Tensor, right: Tensor) -> Tensor:
    one, two = left.double().reshape(-1), right.double().reshape(-1)
    return (one != two) & ~(one.isnan() & two.isnan())


def _a_sample(left: Tensor, right: Tensor) -> Tensor:
    found = (to_bytes(left) != to_bytes(right)).any(dim=1)
    found[1000:] = False
    return found


def _without_the_last(left: Tensor, right: Tensor) -> Tensor:
    found = (to_bytes(left) != to_bytes(right)).any(dim=1)
    found[-1:] = False
    return found


def _first_byte_only(left: Tensor, right: Tensor) -> Tensor:
    return to_bytes(left)[:, -1] != to_bytes(right)[:, -1]


def _careless_stem(name: str) -> str:
    return name.rpartition("/")[2].replace("-", "_").replace(" ", "_").lower()


def _hash_of_a_sample(tensor: Tensor) -> TensorEntry:
    digest = hashlib.sha256(repr(tensor).encode()).hexdigest()
    return TensorEntry(digest, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _remembering(real: Callable[..., Any]) -> Callable[..., Any]:
    def check(self: store.GoldenStore, asked: store.Question) -> store.Answer:
        _LAST.clear()
        _LAST.update(asked.tensors)
        answer: store.Answer = real(self, asked)
        return answer

    return check


def _all_regress(asked: Any, entry: Any) -> Any:
    return store.Answer(store.GoldenVerdict.REGRESSED, "?") if asked.inputs != entry.inputs else None


def _silent_tier(asked: Any, variant: Any) -> tuple[Any, str]:
    at_home = variant.platform == asked.platform or not asked.elsewhere
    return (asked.tier if at_home else asked.elsewhere), ""


def _constant_eps(eps: float) -> Callable[[Any], Any]:
    return lambda dtype: type("Info", (), {"eps": eps})()


def _bug(name: str, wrong: str, killer: str, where: str, variant: Any, raises: str = "") -> Mutant:
    return Mutant(name, "golden store", wrong, (Table(where, lambda real: variant),), killer, raises=raises)


def _wrapped(name: str, wrong: str, killer: str, where: str, change: Callable[[Any], Any]) -> Mutant:
    return Mutant(name, "golden store", wrong, (Table(where, change),), killer)


_MUTANTS: Sequence[Mutant] = (
    _bug("by_repr", "compares printed forms", "sees_the_middle_of_a_long_tensor", _DIFFERS, _by_repr),
    _bug("by_value", "compares with a tolerance of its own", "sees_the_middle_of_a_long_tensor", _DIFFERS, _by_value),
    _bug("exact_values", "takes NaN for NaN and -0 for 0", "sees_nan_payloads_and_the_sign_of_zero", _DIFFERS, _exact_values),
    _bug("sample_of_elements", "looks at the first 1,000 elements", "sees_the_middle_of_a_long_tensor", _DIFFERS, _a_sample),
    _bug("without_the_last", "misses the last element", "sees_the_middle_of_a_long_tensor", _DIFFERS, _without_the_last),
    _bug("first_byte_only", "compares one byte of each element", "sees_the_middle_of_a_long_tensor", _DIFFERS, _first_byte_only),
    _bug("dtype_ignored", "lets int8 pass as float64", "sees_dtypes", _FORM, lambda a, e: "" if a.shape == e.shape else "shape"),
    _bug(
        *("shape_ignored", "lets shapes pass that hold as many elements", "sees_shapes", _FORM),
        lambda a, e: "" if a.numel() == e.numel() and a.dtype == e.dtype else "x",
    ),
    _bug(
        *("always_passes", "every tier is a pass", "sees_the_middle_of_a_long_tensor", "harness.goldens.store.store:compare"),
        lambda a, e, t, name, context: comparison.compare(e, e, t, name=name, context=context),
    ),
    Mutant(
        "compares_itself",
        "golden store",
        "compares the golden with itself",
        (
            Table("harness.goldens.store.store:GoldenStore.check", _remembering),
            Table("harness.goldens.store.store:GoldenStore.load", lambda real: lambda self, entry, variant: dict(_LAST)),
        ),
        "sees_the_middle_of_a_long_tensor",
    ),
    _bug(
        "careless_names",
        "maps a-b and a b to one file",
        "keeps_names_apart",
        "harness.goldens.store.paths:stem_of",
        _careless_stem,
        raises="GoldenError",
    ),
    _bug(
        *("hash_of_a_sample", "hashes the printed form of inputs", "tells_drifted_inputs_from_regressed_outputs"),
        *("harness.goldens.store.encoding:describe", _hash_of_a_sample),
    ),
    _bug(
        *("inputs_ignored", "does not look at inputs", "tells_drifted_inputs_from_regressed_outputs", _DRIFTED),
        lambda asked, entry: None,
    ),
    _bug("drift_regresses", "judges drifted inputs as regressions", "tells_drifted_inputs_from_regressed_outputs", _DRIFTED, _all_regress),
    _bug(
        *(
            "elsewhere_at_home",
            "uses the tier for elsewhere at home",
            "holds_every_bit_at_home_and_the_declared_tier_elsewhere",
            _TIER_HERE,
        ),
        lambda asked, variant: (asked.elsewhere or asked.tier, "held to the tier for elsewhere"),
    ),
    _bug(
        *("never_elsewhere", "never uses the tier for elsewhere", "holds_every_bit_at_home_and_the_declared_tier_elsewhere", _TIER_HERE),
        lambda asked, variant: (asked.tier, ""),
    ),
    _bug(
        *("silent_elsewhere", "does not tell that it used the tier for elsewhere"),
        *("holds_every_bit_at_home_and_the_declared_tier_elsewhere", _TIER_HERE),
        _silent_tier,
    ),
    _bug(
        *("no_decoys", "asks no decoy", "refuses_limits_that_measure_nothing", "harness.goldens.store.store:vacuous_decoys"),
        lambda *given, **named: (),
    ),
    _bug(
        *("no_halved_decoy", "forgets halved decoys", "refuses_limits_that_measure_nothing", "harness.tolerance.decoys:_halved"),
        lambda expected: None,
    ),
    _bug(
        *("loosens", "lets limits loosen", "refuses_to_loosen_without_a_reason", "harness.goldens.store.store:_loosened"),
        lambda asked, entry: None,
    ),
    _bug(
        "takes_nothing",
        "takes zeros and NaN for outputs",
        "refuses_what_is_nothing",
        "harness.goldens.store.store:_empty",
        lambda given: None,
    ),
    _bug(
        *("nothing_is_zero", "takes zeros for outputs, and refuses NaN only", "refuses_what_is_nothing"),
        *("harness.goldens.store.store:_nothing_but", lambda tensor: "NaN" if bool(tensor.isnan().any()) else ""),
    ),
    _bug(
        *("asks_no_reason", "lets tiers be loose without a reason", "asks_why_a_tier_is_loose", "harness.goldens.store.store:_unexplained"),
        lambda asked, entry: None,
        raises="GoldenError",
    ),
    _bug("every_neighbour", "forgives every neighbouring code", "forgives_ties_and_nothing_else", _EPS, _constant_eps(1.0)),
    _bug("no_ties", "never forgives a tie", "forgives_ties_and_nothing_else", _EPS, _constant_eps(0.0)),
    _bug(
        *("any_step_at_a_tie", "forgives any step at a tie", "forgives_ties_and_nothing_else", "harness.tolerance.comparison:_steps"),
        lambda a, e: torch.ones(a.numel()),
    ),
    _wrapped(
        *("off_by_one_ulp", "is off by one ulp", "counts_ulp_exactly", _ULP),
        lambda real: lambda a, e: (real(a, e) - 1).clamp(min=0),
    ),
    _bug(
        *("ulp_of_the_largest", "counts ulp at the largest value", "counts_ulp_exactly", _ULP),
        lambda a, e: ((a.double() - e.double()).abs() / 2**70).long().reshape(-1, 1),
        raises="OverflowError",
    ),
    _bug(
        *(
            "flipped_on_disk",
            "stores tensors with their first dimension reversed",
            "holds_every_bit_at_home_and_the_declared_tier_elsewhere",
        ),
        *("harness.goldens.golden:encode", lambda given: encoding.encode({name: given[name].flip(0) for name in given})),
        raises="GoldenError",
    ),
    _bug(
        *("always_rewrites", "writes a new entry at every run", "stores_the_same_bytes_for_the_same_tensors"),
        *("harness.goldens.store.writer:_limits", lambda tier: object()),
    ),
)


def _look(statement: Callable[[Shelf], bool]) -> str | None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):  # waiting for the disk proves nothing here
        kept = statement(Shelf(Path(folder)))
    return None if kept else f"it does not keep the statement {statement.__name__}"


def _killers(mutant: Mutant | None) -> Sequence[Killer]:
    return [Killer(statement.__name__, partial(_look, statement)) for statement in STATEMENTS]


FAMILY = Family("goldens", {mutant.name: mutant for mutant in _MUTANTS}, _killers)
