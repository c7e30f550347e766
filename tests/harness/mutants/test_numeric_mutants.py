"""Every planted bug in quantizers, packers, observers, layers and solvers is seen by the check that it names; a survivor fails CI."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compressor.numerics import formats, packing
from harness.checks.catalogue.registry import all_checks, find_checks
from harness.mutants.family import find_family, listed_families
from harness.mutants.hunt import fate_of
from harness.mutants.patches import Edit, bug

NUMERIC = ("quantizers", "packers", "observers", "layers", "solvers", "pruners", "moved-scales", "rotations", "experts")
ALL = {f"{name}-{mutant}": (name, mutant) for name in NUMERIC for mutant in find_family(name).mutants}
SLOW = ("pruners", "moved-scales", "rotations", "experts")  # whole models, and many weights


@pytest.mark.parametrize("label", [pytest.param(one, marks=[pytest.mark.nightly] if ALL[one][0] in SLOW else []) for one in ALL])
def test_a_planted_bug_is_killed(label: str) -> None:
    name, key = ALL[label]
    family = find_family(name)
    mutant = family.mutants[key]
    only = replace(family, killers=lambda one: [killer for killer in family.killers(one) if killer.name == mutant.killer])
    assert fate_of(only, mutant).killed_by, f"{mutant.killer} does not see that {mutant.wrong}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", NUMERIC)
def test_without_a_planted_bug_nothing_is_seen(name: str) -> None:
    fate = fate_of(find_family(name), None, all_checks=True)
    assert not fate.killed_by and not fate.broken


def test_there_are_enough_and_each_is_described() -> None:
    families = [find_family(name) for name in NUMERIC]
    assert set(NUMERIC) < set(listed_families())
    assert sum(len(family.mutants) for family in families) >= 140
    said = [mutant.wrong for family in families for mutant in family.mutants.values()]
    assert len(set(said)) == len(said) and all(len(text) < 110 and text[-1] != "." for text in said)
    known = {check.name for check in all_checks().values()}
    assert {mutant.killer for family in families for mutant in family.mutants.values()} <= known


def test_planting_is_seen_by_those_who_imported_by_name_and_leaves_nothing_behind() -> None:
    from compressor.numerics.quantize import snap_

    before = snap_.__code__
    rounds_down = bug(
        "toy",
        "codes",
        "it rounds down",
        "quantizer.nearest_codes",
        Edit("compressor.numerics.formats:snap_", "values.clamp_(low, high)", "values.clamp_(low, high).floor_()"),
    )
    with pytest.raises(ZeroDivisionError), rounds_down.planted():
        assert snap_.__code__ is not before and formats.snap_ is snap_
        raise ZeroDivisionError
    assert snap_.__code__ is before


def test_every_mutant_fits_the_code_and_is_taken_out_again() -> None:
    codes = formats.encode_.__code__, packing.pack_int32.__code__
    for name, key in ALL.values():
        with find_family(name).mutants[key].planted():
            pass
    assert (formats.encode_.__code__, packing.pack_int32.__code__) == codes


@pytest.mark.nightly
@pytest.mark.parametrize("label", ALL)
def test_the_one_that_is_named_is_the_first_to_see_it(label: str) -> None:
    name, key = ALL[label]
    family = find_family(name)
    assert list(fate_of(family, family.mutants[key]).killed_by) == [family.mutants[key].killer]


def test_checks_stand_in_the_order_of_the_catalogue() -> None:
    for name in NUMERIC:
        killers = [killer.name for killer in find_family(name).killers(None)]
        assert killers == [check.name for check in find_checks(None, killers[0].split(".")[0])]
