"""One decorator gives a pytest test per modifier and check; what is expected to fail must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compressor.errors import UserInputError
from compressor.numerics import QuantizationArgs
from harness import check, parametrize_with_catalogue, parametrize_with_checks, verify
from harness.checks.catalogue.registry import find_checks
from harness.lifecycle.checks.registry import CHECKS
from harness.lifecycle.driving.probes import CalibratingWorker, TinyModel, TrainingWorker, tiny_batches


@parametrize_with_checks([CalibratingWorker(), TrainingWorker(start=1.0, end=3.0)], TinyModel(8), inputs=tiny_batches(1))
def test_well_behaved_modifiers(modifier, check):  # type: ignore[no-untyped-def]
    check(modifier)


_FILE = """
from compressor.lifecycle import Modifier
from harness import parametrize_with_checks

class Good(Modifier):
    def on_initialize(self, state):
        return True

class Late(Good):
    def should_end(self, index):
        return self.end is not None and index > self.end

class Mute(Modifier):
    def on_initialize(self, state):
        pass

REASON = "the end fires one batch late"

@parametrize_with_checks([Good(), Late()], expected_failures=lambda one: {"lifecycle.start_and_end": REASON} if type(one) is Late else {})
def test_with_a_reason(modifier, check):
    check(modifier)

@parametrize_with_checks([Mute])
def test_without(modifier, check):
    check(modifier)

@parametrize_with_checks([Good], expected_failures={"lifecycle.start_and_end": REASON})
def test_that_passes_all_the_same(modifier, check):
    check(modifier)

@parametrize_with_checks([int])
def test_no_modifier(modifier, check):
    check(modifier)
"""


@pytest.fixture
def run_file(pytester: pytest.Pytester, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.RunResult:
    monkeypatch.setenv("PYTHONPATH", str(repo_root))
    pytester.makepyfile(test_mine=_FILE)
    picked = "usable or completes or start_and_end or nested_contexts"
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rA", "-k", picked, "--harness-profile=pr", "-W", "ignore")


def test_reasons_are_strict_and_failures_say_what_is_wrong(run_file: pytest.RunResult) -> None:
    outcomes = run_file.parseoutcomes()
    # Good 0: 3 pass, contexts are skipped; Late: start_and_end is expected to fail.
    run_file.stdout.fnmatch_lines(["XFAIL *test_with_a_reason?Late1-start_and_end* - the end fires one batch late*"])
    run_file.stdout.fnmatch_lines(["FAILED *test_without?Mute-completes*"])
    run_file.stdout.fnmatch_lines(["*on_initialize of modifier 0 returned None*"])
    run_file.stdout.fnmatch_lines(["FAILED *test_that_passes_all_the_same?Good-start_and_end*"])
    run_file.stdout.fnmatch_lines(["*XPASS(strict)*"])
    run_file.stdout.fnmatch_lines(["FAILED *test_no_modifier?int-usable*"])
    assert outcomes["xfailed"] == 1
    assert outcomes["skipped"] >= 3


def test_an_expected_failure_must_name_a_check() -> None:
    with pytest.raises(UserInputError, match=r"lifecycle\.completes"):
        parametrize_with_checks([CalibratingWorker()], expected_failures={"lifecycle.complete": "x"})


@pytest.mark.parametrize("make", [parametrize_with_checks, parametrize_with_catalogue])
@pytest.mark.parametrize(
    "given", [[], (), "one", CalibratingWorker(), QuantizationArgs(), None, iter([1])], ids=lambda one: type(one).__name__
)
def test_subjects_come_in_a_list(make: Any, given: Any) -> None:
    with pytest.raises(UserInputError, match="a list with something in it belongs"):
        make(given)


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_an_expected_failure_has_a_reason(reason: Any) -> None:
    for make, subject, number in ((parametrize_with_checks, CalibratingWorker(), 47), (parametrize_with_catalogue, QuantizationArgs(), 5)):
        with pytest.raises(UserInputError, match=f"expected failure '{number}': has no reason; say why it fails today"):
            make([subject], expected_failures={str(number): reason})
        name = next(one.name for one in (*CHECKS.values(), *find_checks(None)) if one.number == number)
        with pytest.raises(UserInputError, match="by its name and by its number"):
            make([subject], expected_failures={str(number): "one", name: "another"})


def test_reasons_come_by_subject_and_are_a_mapping() -> None:
    given = (QuantizationArgs(num_bits=4), QuantizationArgs())
    made = parametrize_with_catalogue(given, expected_failures=lambda one: {"5": "known"} if one.num_bits == 4 else {}).args[1]
    assert [parameter.values[0].args.num_bits for parameter in made if parameter.marks] == [4]
    for call in (
        lambda: parametrize_with_catalogue(given, expected_failures=["5"]),
        lambda: parametrize_with_checks([CalibratingWorker()], expected_failures={"47"}),
        lambda: check(QuantizationArgs(), checks=[5], draws=False, expected_failures=lambda one: ["5"]),
        lambda: verify(CalibratingWorker(), checks=[47], expected_failures=["47"]),
    ):
        with pytest.raises(UserInputError, match=r"expected_failures: a (list|set) was given.*; give a mapping"):
            call()


@pytest.mark.parametrize(("mark", "number"), [
    (parametrize_with_checks([CalibratingWorker()], expected_failures={"47": "x"}), 47),
    (parametrize_with_catalogue([QuantizationArgs()], expected_failures={"5": "x"}), 5),
])  # fmt: skip
def test_a_check_is_expected_to_fail_by_its_number_too(mark: Any, number: int) -> None:
    marked = {parameter.values[1].name for parameter in mark.args[1] if parameter.marks}
    numbers = {**{name: one.number for name, one in CHECKS.items()}, **{one.name: one.number for one in find_checks(None)}}
    assert marked and {numbers[name] for name in marked} == {number}


def test_there_is_a_test_for_every_check() -> None:
    mark = parametrize_with_checks([CalibratingWorker()])
    names = [parameter.values[1].name for parameter in mark.args[1]]
    assert names == ["lifecycle.usable", *CHECKS]
