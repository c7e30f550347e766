"""Stores with known bugs: each is seen by at least one of the statements below, and the real store keeps them all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.goldens import golden as golden_module
from harness.goldens import names, store, tensors, writer
from harness.goldens.manifest import TensorEntry, read_manifest
from harness.goldens.platforms import Platform
from harness.tolerance import T0, T1, T2, T3, comparison, decoys, measures
from harness.tolerance.bits import from_bytes, to_bytes

Shelf = Any
REGRESSED = "outputs regressed"


def _flip(tensor: Tensor, element: int) -> Tensor:
    raw = to_bytes(tensor).clone()
    raw[element, 0] ^= 1
    return from_bytes(raw, tensor.dtype, tuple(tensor.shape))


def sees_the_middle_of_a_long_tensor(shelf: Shelf) -> bool:
    value = torch.arange(5000.0)
    shelf.write("long", value)
    return all(shelf.check("long", _flip(value, element))["verdict"] == REGRESSED for element in (0, 1, 999, 2500, 4998, 4999))


def sees_dtypes(shelf: Shelf) -> bool:
    shelf.write("dtype", torch.arange(5, dtype=torch.int8))
    others = (torch.float64, torch.uint8, torch.int16, torch.bfloat16)
    return all(shelf.check("dtype", torch.arange(5).to(dtype))["verdict"] == REGRESSED for dtype in others)


def sees_shapes(shelf: Shelf) -> bool:
    shelf.write("shape", torch.ones(6))
    return all(shelf.check("shape", torch.ones(shape))["verdict"] == REGRESSED for shape in ((2, 3), (6, 1), (1, 6), (7,), ()))


def sees_the_last_bit_of_every_float(shelf: Shelf) -> bool:
    found = []
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        value = torch.arange(1.0, 9.0).to(dtype)
        shelf.write(str(dtype), value)
        found.append(shelf.check(str(dtype), _flip(value, 3))["verdict"] == REGRESSED)
    return all(found)


def sees_nan_payloads_and_the_sign_of_zero(shelf: Shelf) -> bool:
    nan = torch.tensor([0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    shelf.write("nan", nan)
    others = ([0x7FC00001, 0], [0x7FC00000, -(2**31)], [-4194304, 0])
    same = shelf.check("nan", nan.clone())["verdict"] == "pass"
    return same and all(
        shelf.check("nan", torch.tensor(bits, dtype=torch.int32).view(torch.float32))["verdict"] == REGRESSED for bits in others
    )


def sees_tensors_that_came_or_went(shelf: Shelf) -> bool:
    shelf.write("set", {"a": torch.ones(1), "b": torch.ones(1)})
    one, three = {"a": torch.ones(1)}, {name: torch.ones(1) for name in "abc"}
    return all(shelf.check("set", given)["verdict"] == REGRESSED for given in (one, three))


def keeps_names_apart(shelf: Shelf) -> bool:
    every = ("a-b", "a_b", "a/b", "A-b", "a b")
    for number, name in enumerate(every):
        shelf.write(name, torch.full((2,), float(number)))
    return all(shelf.check(name, torch.full((2,), float(number)))["verdict"] == "pass" for number, name in enumerate(every))


def tells_drifted_inputs_from_regressed_outputs(shelf: Shelf) -> bool:
    value, inputs = torch.arange(4.0), torch.arange(5000.0)
    shelf.write("drift", value, inputs={"x": inputs}, recipe="a", seed=1)
    given = {"inputs": {"x": inputs}, "recipe": "a", "seed": 1}
    changes: tuple[dict[str, Any], ...] = ({"inputs": {"x": _flip(inputs, 2500)}}, {"inputs": {}}, {"recipe": "b"}, {"seed": 2})
    drifted = all(shelf.check("drift", value + 1, **{**given, **change})["verdict"] == "inputs drifted" for change in changes)
    return drifted and shelf.check("drift", value + 1, **given)["verdict"] == REGRESSED


def holds_every_bit_at_home_and_the_declared_tier_elsewhere(shelf: Shelf) -> bool:
    value = torch.arange(1.0, 9.0)
    near, far = torch.nextafter(value, value + 1), value * 1.01
    shelf.write("home", value, elsewhere=T1(2))
    at_home = shelf.check("home", near, elsewhere=T1(2))["verdict"] == REGRESSED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden_module, "current_platform", lambda device="cpu": Platform("cpu", "riscv64", "V"))
        abroad = shelf.check("home", near, elsewhere=T1(2))
        too_far = shelf.check("home", far, elsewhere=T1(2))["verdict"] == REGRESSED
    return at_home and abroad["verdict"] == "pass" and "elsewhere" in abroad["note"] and too_far


def refuses_limits_that_measure_nothing(shelf: Shelf) -> bool:
    value = torch.arange(1.0, 9.0)
    limits = (T1(1 << 33), T1(1 << 23), T3(min_sqnr_db=3.0), T3(max_relative_error=0.6))
    return all(shelf.check("vacuous", value, tier=tier)["verdict"] == "limit is vacuous" for tier in limits)


def refuses_to_loosen_without_a_reason(shelf: Shelf) -> bool:
    value = torch.arange(1.0, 9.0)
    shelf.write("loose", value, tier=T1(2))
    if shelf.check("loose", value, tier=T1(3))["verdict"] != "limit loosened":
        return False
    with pytest.raises(AssertionError, match="limit loosened"):
        shelf.write("loose", value, tier=T1(3))
    return shelf.check("loose", value, tier=T0())["verdict"] == "pass"


def forgives_ties_and_nothing_else(shelf: Shelf) -> bool:
    before = torch.tensor([0.5, 1.2, 2.5, 3.5, -1.5, 6.9, 9.0])
    codes = before.round().clamp(-8, 7).to(torch.int8)
    tier = {"codes": T2("before"), "*": T0()}
    shelf.write("ties", {"codes": codes, "before": before}, tier=tier)

    def verdict(moved: list[int]) -> str:
        return str(shelf.check("ties", {"codes": torch.tensor(moved, dtype=torch.int8), "before": before}, tier=tier)["verdict"])

    bad = ([0, 2, 2, 4, -2, 7, 7], [0, 1, 1, 4, -2, 7, 7], [0, 1, 4, 4, -2, 7, 7], [0, 1, 2, 4, -2, 6, 7], [0, 1, 2, 4, -2, 7, 11])
    return verdict([1, 1, 3, 3, -1, 7, 7]) == "pass" and all(verdict(moved) == REGRESSED for moved in bad)


def counts_ulp_exactly(shelf: Shelf) -> bool:
    value = torch.tensor([1.0, -1.0, 1e-30, 1e30])
    shelf.write("ulp", value, tier=T1(2))
    found = []
    for steps, verdict in ((2, "pass"), (3, REGRESSED)):
        moved = value
        for _ in range(steps):
            moved = torch.nextafter(moved, torch.full_like(moved, torch.inf))
        found.append(shelf.check("ulp", moved, tier=T1(2))["verdict"] == verdict)
    return all(found) and shelf.check("ulp", torch.tensor([1.0, -1.0, 1e-30, torch.nan]), tier=T1(2))["verdict"] == REGRESSED


def stores_the_same_bytes_for_the_same_tensors(shelf: Shelf) -> bool:
    value = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.ones(2)}
    shelf.write("bytes", value)
    first = shelf.content()
    shelf.write("bytes", {name: tensor.clone() for name, tensor in reversed(value.items())}, update="all")
    return shelf.content() == first


def writes_nothing_when_it_only_checks(shelf: Shelf) -> bool:
    shelf.check("never written", torch.ones(3))
    shelf.write("written", torch.ones(3))
    before = shelf.content()
    shelf.check("written", torch.zeros(3))
    return shelf.content() == before and "never written" not in read_manifest(shelf.root).goldens


STATEMENTS: tuple[Callable[[Shelf], bool], ...] = (
    sees_the_middle_of_a_long_tensor,
    sees_dtypes,
    sees_shapes,
    sees_the_last_bit_of_every_float,
    sees_nan_payloads_and_the_sign_of_zero,
    sees_tensors_that_came_or_went,
    keeps_names_apart,
    tells_drifted_inputs_from_regressed_outputs,
    holds_every_bit_at_home_and_the_declared_tier_elsewhere,
    refuses_limits_that_measure_nothing,
    refuses_to_loosen_without_a_reason,
    forgives_ties_and_nothing_else,
    counts_ulp_exactly,
    stores_the_same_bytes_for_the_same_tensors,
    writes_nothing_when_it_only_checks,
)


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.__name__)
def test_the_store_keeps_the_statement(shelf: Shelf, statement: Callable[[Shelf], bool]) -> None:
    assert statement(shelf)


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


BUGS: dict[str, list[tuple[object, str, object]]] = {
    "compares printed forms": [(measures, "differs", _by_repr)],
    "compares with a tolerance of its own": [(measures, "differs", _by_value)],
    "takes NaN for NaN and -0 for 0": [(measures, "differs", _exact_values)],
    "looks at the first 1,000 elements": [(measures, "differs", _a_sample)],
    "misses the last element": [(measures, "differs", _without_the_last)],
    "compares one byte of each element": [(measures, "differs", _first_byte_only)],
    "lets int8 pass as float64": [(comparison, "_form", lambda a, e: "" if a.shape == e.shape else "shape")],
    "lets shapes pass that broadcast": [(comparison, "_form", lambda a, e: "" if a.numel() == e.numel() and a.dtype == e.dtype else "x")],
    "every tier is a pass": [(store, "compare", lambda a, e, t, name, context: comparison.compare(e, e, t, name=name, context=context))],
    "compares the golden with itself": [(store.GoldenStore, "load", lambda self, entry, variant: dict(_LAST))],
    "maps a-b, a_b and A-b to one file": [(names, "stem_of", _careless_stem)],
    "hashes the printed form of inputs": [(tensors, "describe", _hash_of_a_sample)],
    "does not look at inputs": [(store, "_drifted", lambda asked, entry: None)],
    "judges drifted inputs as regressions": [
        (store, "_drifted", lambda asked, entry: store.Answer(store.GoldenVerdict.REGRESSED, "?") if asked.inputs != entry.inputs else None)
    ],
    "uses the tier for elsewhere at home": [
        (store, "_tier_here", lambda asked, variant: (asked.elsewhere or asked.tier, "held to the tier for elsewhere"))
    ],
    "never uses the tier for elsewhere": [(store, "_tier_here", lambda asked, variant: (asked.tier, ""))],
    "does not tell that it used the tier for elsewhere": [
        (
            store,
            "_tier_here",
            lambda asked, variant: (asked.tier if variant.platform == asked.platform or not asked.elsewhere else asked.elsewhere, ""),
        )
    ],
    "asks no decoy": [(store, "vacuous_decoys", lambda *a, **k: ())],
    "forgets halved decoys": [(decoys, "_halved", lambda expected: None)],
    "lets limits loosen": [(store, "_loosened", lambda asked, entry: None)],
    "forgives every neighbouring code": [(comparison.torch, "finfo", lambda dtype: type("Info", (), {"eps": 1.0})())],
    "never forgives a tie": [(comparison.torch, "finfo", lambda dtype: type("Info", (), {"eps": 0.0})())],
    "forgives any step at a tie": [(comparison, "_steps", lambda a, e: torch.ones(a.numel()))],
    "is off by one ulp": [(comparison, "ulp_distance", lambda a, e, real=comparison.ulp_distance: (real(a, e) - 1).clamp(min=0))],
    "counts ulp at the largest value": [
        (comparison, "ulp_distance", lambda a, e: ((a.double() - e.double()).abs() / 2**70).long().reshape(-1, 1))
    ],
    "stores what comes in the order in which it comes": [
        (golden_module, "encode", lambda given, real=tensors.encode: real({name: given[name].flip(0) for name in given}))
    ],
    "writes a new entry at every run": [(writer, "_limits", lambda tier: object())],
}
_LAST: dict[str, Tensor] = {}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(shelf: Shelf, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_check = store.GoldenStore.check

    def remembering(self: store.GoldenStore, asked: store.Question) -> store.Answer:
        _LAST.clear()
        _LAST.update(asked.tensors)
        return real_check(self, asked)

    monkeypatch.setattr(store.GoldenStore, "check", remembering)
    for place, name, wrong in BUGS[bug]:
        monkeypatch.setattr(place, name, wrong)
    assert any(_is_broken(statement, shelf) for statement in STATEMENTS), f"nothing sees a store that {bug}"


def _is_broken(statement: Callable[[Shelf], bool], shelf: Shelf) -> bool:
    try:
        return not statement(shelf)
    except Exception:  # noqa: BLE001 - a bug may also raise
        return True
