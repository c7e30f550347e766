"""What a golden store must keep, as statements that each take an empty store: they judge stores with planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from harness.errors import GoldenError
from harness.goldens import golden as golden_module
from harness.goldens.golden import Golden, GoldenMismatch, GoldenSettings
from harness.goldens.store import store as store_module
from harness.goldens.store.candidates import read_candidate
from harness.goldens.store.manifest import read_manifest
from harness.goldens.store.provenance import Platform
from harness.goldens.store.writer import Acceptance, accept
from harness.tolerance import T0, T1, T2, T3
from harness.tolerance.bits import from_bytes, to_bytes

REGRESSED = "outputs regressed"


class Shelf:
    """A store below a folder, and what a test or a session does with it.

    Attributes:
        folder: of the store and its candidates.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is written yet."""
        self.folder = folder

    @property
    def root(self) -> Path:
        """Of the goldens."""
        return self.folder / "golden"

    @property
    def cache(self) -> Path:
        """Of the candidates; the record of what was used lies beside it."""
        return self.folder / "cache" / "golden"

    def golden(self, update: Any = "", test: str = "test_it.py::test_it", reason: str = "", *, variant: bool = False) -> Golden:
        """Return the fixture as a test has it."""
        return Golden(GoldenSettings(self.root, self.cache, update, reason, variant), test)

    def check(self, name: str, tensors: Any, **given: Any) -> dict[str, Any]:
        """Check as a test would; return the outcome, whatever it is."""
        golden = self.golden()
        try:
            golden.check(name, tensors, **given)
        except GoldenMismatch as error:
            golden.outcomes[-1]["message"] = str(error)
        return golden.outcomes[-1]

    def write(
        self,
        name: str,
        tensors: Any,
        *,
        reason: str = "",
        variant: bool = False,
        update: Any = "failed",
        why: str = "a test says why its tier is not T0",
        **given: Any,
    ) -> Acceptance:
        """Write as a session with --golden-update would; `reason` is that of the session, `why` that of the test."""
        golden = self.golden(update, reason=reason, variant=variant)
        golden.check(name, tensors, reason=why, **given)
        candidates = [read_candidate(Path(outcome["candidate"])) for outcome in golden.outcomes if outcome["candidate"]]
        return accept(self.root, candidates, reason=reason, add_variant=variant)

    def content(self) -> dict[str, bytes]:
        """Every file of the store."""
        return {str(path.relative_to(self.root)): path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file()}


def _flip(tensor: Tensor, element: int) -> Tensor:
    raw = to_bytes(tensor).clone()
    raw[element, 0] ^= 1
    return from_bytes(raw, tensor.dtype, tuple(tensor.shape))


def sees_the_middle_of_a_long_tensor(shelf: Shelf) -> bool:
    """A change of element 2,500 of 5,000 is seen."""
    value = torch.arange(5000.0)
    shelf.write("long", value)
    return all(shelf.check("long", _flip(value, element))["verdict"] == REGRESSED for element in (0, 1, 999, 2500, 4998, 4999))


def sees_dtypes(shelf: Shelf) -> bool:
    """The same numbers in another dtype are seen."""
    shelf.write("dtype", torch.arange(5, dtype=torch.int8))
    others = (torch.float64, torch.uint8, torch.int16, torch.bfloat16)
    return all(shelf.check("dtype", torch.arange(5).to(dtype))["verdict"] == REGRESSED for dtype in others)


def sees_shapes(shelf: Shelf) -> bool:
    """The same numbers in another shape are seen."""
    shelf.write("shape", torch.ones(6))
    return all(shelf.check("shape", torch.ones(shape))["verdict"] == REGRESSED for shape in ((2, 3), (6, 1), (1, 6), (7,), ()))


def sees_the_last_bit_of_every_float(shelf: Shelf) -> bool:
    """One bit is seen in every floating dtype."""
    found = []
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        value = torch.arange(1.0, 9.0).to(dtype)
        shelf.write(str(dtype), value)
        found.append(shelf.check(str(dtype), _flip(value, 3))["verdict"] == REGRESSED)
    return all(found)


def sees_nan_payloads_and_the_sign_of_zero(shelf: Shelf) -> bool:
    """NaN is compared by its bits, and -0 is not 0."""
    nan = torch.tensor([0x7FC00000, 0, 1 << 29], dtype=torch.int32).view(torch.float32)
    shelf.write("nan", nan)
    others = ([0x7FC00001, 0, 1 << 29], [0x7FC00000, -(2**31), 1 << 29], [-4194304, 0, 1 << 29])
    same = shelf.check("nan", nan.clone())["verdict"] == "pass"
    return same and all(
        shelf.check("nan", torch.tensor(bits, dtype=torch.int32).view(torch.float32))["verdict"] == REGRESSED for bits in others
    )


def sees_tensors_that_came_or_went(shelf: Shelf) -> bool:
    """A set with one tensor less or more is seen."""
    shelf.write("set", {"a": torch.ones(1), "b": torch.ones(1)})
    one, three = {"a": torch.ones(1)}, {name: torch.ones(1) for name in "abc"}
    return all(shelf.check("set", given)["verdict"] == REGRESSED for given in (one, three))


def keeps_names_apart(shelf: Shelf) -> bool:
    """Names that differ in more than case and kind of separator have their own files; the second of any other two is refused."""
    every = ("a-b", "a/b", "a b", "A+b", "a+b", "ab")
    for number, name in enumerate(every, 1):
        shelf.write(name, torch.full((2,), float(number)))
    are_refused = all(_has_anothers_file(shelf, name) for name in ("a_b", "A-b", "A/B", "a.b", "AB"))
    return are_refused and all(
        shelf.check(name, torch.full((2,), float(number)))["verdict"] == "pass" for number, name in enumerate(every, 1)
    )


def _has_anothers_file(shelf: Shelf, name: str) -> bool:
    try:
        shelf.write(name, torch.ones(2), update="all")
    except GoldenError as error:
        return "is that of golden" in str(error)
    return False


def tells_drifted_inputs_from_regressed_outputs(shelf: Shelf) -> bool:
    """Other inputs, recipe or seed are not a regression."""
    value, inputs = torch.arange(4.0), torch.arange(5000.0)
    shelf.write("drift", value, inputs={"x": inputs}, recipe="a", seed=1)
    given = {"inputs": {"x": inputs}, "recipe": "a", "seed": 1}
    changes: tuple[dict[str, Any], ...] = ({"inputs": {"x": _flip(inputs, 2500)}}, {"inputs": {}}, {"recipe": "b"}, {"seed": 2})
    drifted = all(shelf.check("drift", value + 1, **{**given, **change})["verdict"] == "inputs drifted" for change in changes)
    return drifted and shelf.check("drift", value + 1, **given)["verdict"] == REGRESSED


def holds_every_bit_at_home_and_the_declared_tier_elsewhere(shelf: Shelf) -> bool:
    """A declared tier holds only on another platform, and says so."""
    value = torch.arange(1.0, 9.0)
    near, far = torch.nextafter(value, value + 1), value * 1.01
    shelf.write("home", value, elsewhere=T1(2))
    at_home = shelf.check("home", near, elsewhere=T1(2))["verdict"] == REGRESSED
    with mock.patch.object(golden_module, "current_platform", return_value=Platform("cpu", "riscv64", "V")):
        abroad = shelf.check("home", near, elsewhere=T1(2))
        too_far = shelf.check("home", far, elsewhere=T1(2))["verdict"] == REGRESSED
    return at_home and abroad["verdict"] == "pass" and "elsewhere" in abroad["note"] and too_far


def refuses_limits_that_measure_nothing(shelf: Shelf) -> bool:
    """A limit that a decoy passes is refused."""
    value = torch.arange(1.0, 9.0)
    limits = (T1(1 << 33), T1(1 << 23), T3(min_sqnr_db=3.0), T3(max_relative_error=0.6))
    return all(shelf.check("vacuous", value, tier=tier)["verdict"] == "limit is vacuous" for tier in limits)


def refuses_to_loosen_without_a_reason(shelf: Shelf) -> bool:
    """A looser limit than that on record fails."""
    value = torch.arange(1.0, 9.0)
    shelf.write("loose", value, tier=T1(2))
    if shelf.check("loose", value, tier=T1(3))["verdict"] != "limit loosened":
        return False
    if not _is_refused(shelf, value):
        return False
    return shelf.check("loose", value, tier=T0())["verdict"] == "pass"


def refuses_what_is_nothing(shelf: Shelf) -> bool:
    """A golden of zeros or of NaN is neither written nor passed, by itself or beside others; zero codes beside values are no nothing."""
    nothing = [
        torch.zeros(3),
        torch.full((3,), torch.nan, dtype=torch.float16),
        torch.zeros(3, dtype=torch.int8),
        -torch.zeros(3),
        torch.zeros(()),
    ]
    for number, empty in enumerate(nothing):
        if not _is_vacuous(shelf, f"alone {number}", empty):
            return False
        if empty.is_floating_point() and empty.dim() and not _is_vacuous(shelf, f"beside {number}", {"out": empty, "other": torch.ones(3)}):
            return False
    shelf.write("codes", {"out": torch.ones(3), "zero_point": torch.zeros(3, dtype=torch.int8)})
    shelf.write("loss", {"out": torch.ones(3), "loss": torch.zeros(())})
    with mock.patch.object(store_module, "_empty", return_value=None):  # written by an earlier harness
        shelf.write("old", torch.zeros(3))
    return str(shelf.check("old", torch.zeros(3))["verdict"]) == "limit is vacuous"


def _is_vacuous(shelf: Shelf, name: str, tensors: Any) -> bool:
    try:
        shelf.write(name, tensors)
    except GoldenMismatch as error:
        return "limit is vacuous" in str(error) and name not in read_manifest(shelf.root).goldens
    return False


def asks_why_a_tier_is_loose(shelf: Shelf) -> bool:
    """A tier that is not T0 has a reason when it is written and when it is compared, at home and elsewhere."""
    value = torch.arange(1.0, 9.0)
    for given in ({"tier": T1(2)}, {"elsewhere": T1(2)}, {"tier": {"*": T0(), "value": T1(2)}}):
        for why in ("", "  "):
            try:
                shelf.write("x", value, why=why, **given)
            except GoldenMismatch as error:
                if "nobody says why" not in str(error):
                    return False
            else:
                return False
    shelf.write("x", value, tier=T1(2))
    if shelf.check("x", value, tier=T1(2))["verdict"] != "pass":
        return False
    path = shelf.root / "manifest.json"
    path.write_text(path.read_text().replace("a test says why its tier is not T0", ""))
    is_asked = shelf.check("x", value, tier=T1(2))["verdict"] == "limit loosened"
    return is_asked and shelf.check("x", value, tier=T1(2), reason="sums")["verdict"] == "pass"


def _is_refused(shelf: Shelf, value: Tensor) -> bool:
    try:
        shelf.write("loose", value, tier=T1(3))
    except AssertionError as error:
        return "limit loosened" in str(error)
    return False


def forgives_ties_and_nothing_else(shelf: Shelf) -> bool:
    """A code may move by one at a tie, and nowhere else."""
    before = torch.tensor([0.5, 1.2, 2.5, 3.5, -1.5, 6.9, 9.0])
    codes = before.round().clamp(-8, 7).to(torch.int8)
    tier = {"codes": T2("before"), "*": T0()}
    shelf.write("ties", {"codes": codes, "before": before}, tier=tier)

    def verdict(moved: list[int]) -> str:
        return str(shelf.check("ties", {"codes": torch.tensor(moved, dtype=torch.int8), "before": before}, tier=tier)["verdict"])

    bad = ([0, 2, 2, 4, -2, 7, 7], [0, 1, 1, 4, -2, 7, 7], [0, 1, 4, 4, -2, 7, 7], [0, 1, 2, 4, -2, 6, 7], [0, 1, 2, 4, -2, 7, 11])
    return verdict([1, 1, 3, 3, -1, 7, 7]) == "pass" and all(verdict(moved) == REGRESSED for moved in bad)


def counts_ulp_exactly(shelf: Shelf) -> bool:
    """Two ulp pass where two are allowed, three do not."""
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
    """The files do not depend on the order of the tensors."""
    value = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.ones(2)}
    shelf.write("bytes", value)
    first = shelf.content()
    shelf.write("bytes", {name: tensor.clone() for name, tensor in reversed(value.items())}, update="all")
    return shelf.content() == first


def writes_nothing_when_it_only_checks(shelf: Shelf) -> bool:
    """A check leaves the store as it is."""
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
    refuses_what_is_nothing,
    asks_why_a_tier_is_loose,
    forgives_ties_and_nothing_else,
    counts_ulp_exactly,
    stores_the_same_bytes_for_the_same_tensors,
    writes_nothing_when_it_only_checks,
)
"""All of them, cheapest first."""
