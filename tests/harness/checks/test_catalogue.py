"""The catalogue lists every check once, refuses what cannot be checked, and reports strictly."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given

import harness
from compressor.errors import UserInputError
from compressor.numerics import QuantizationArgs
from harness.checks.catalogue.command import ELSEWHERE, listing
from harness.checks.catalogue.registry import Check, CheckContext, CheckFailed, NothingToCheckError, all_checks, find_checks
from harness.checks.strategies import weights
from harness.lifecycle import verify as _lifecycle  # registers the checks of the lifecycle
from harness.lifecycle.checks.registry import CHECKS as LIFECYCLE
from harness.reporting.verdict import Outcome
from harness.tolerance import T3

REPOSITORY = Path(harness.__file__).parents[1]
INT4 = QuantizationArgs(num_bits=4, group_size=16)
assert _lifecycle


def test_every_number_of_the_numeric_part_is_there() -> None:
    numbers = {one.number for one in all_checks().values()}
    assert {*range(1, 31), 64} <= numbers
    elsewhere = {one.number for one in ELSEWHERE}
    assert not numbers & elsewhere
    assert set(range(47, 55)) <= elsewhere


def test_names_and_numbers_are_unique_and_bugs_are_named_as_repository_and_issue() -> None:
    pairs = Counter((one.kind, one.number) for one in all_checks().values() if one.number)
    assert not [pair for pair, count in pairs.items() if count > 1]
    for one in all_checks().values():
        assert one.function.__doc__ and one.title[-1] != "."
        assert all(re.fullmatch(r"[\w.-]+#\d+", bug) for bug in one.caught_by)


def test_what_lives_elsewhere_lives_there() -> None:
    by_number: dict[int, set[str]] = {}
    for check in LIFECYCLE.values():
        if check.number:
            by_number.setdefault(check.number, set()).add(check.function.__module__.replace(".", "/") + ".py")
    for one in ELSEWHERE:
        assert (REPOSITORY / one.lives).is_file()
        if one.lives.startswith("harness/lifecycle"):
            assert one.lives in by_number[one.number], one


def test_the_listing_holds_both() -> None:
    rows = listing()
    assert [row["number"] or 1000 for row in rows] == sorted(row["number"] or 1000 for row in rows)
    assert "GPTQModel#1531" in next(row for row in rows if row["name"] == "quantizer.scales_positive")["caught_by"]
    assert {row["kind"] for row in listing("packer")} == {"packer"}


def _check(function: Any, needs: tuple[str, ...] = ()) -> Check:
    return Check("quantizer.toy", "a toy", "quantizer", function, None, frozenset(needs))


def test_a_check_never_raises() -> None:
    class Subject:
        tags = frozenset({"odd"})

    def broken(subject: Any, context: CheckContext) -> str:
        raise CheckFailed("it is wrong", ["here"])

    def empty(subject: Any, context: CheckContext) -> str:
        raise NothingToCheckError("nothing is there")

    def crashing(subject: Any, context: CheckContext) -> str:
        raise IndexError("out of range")

    outcomes = [
        _check(function).run(Subject(), CheckContext()).outcome for function in (broken, empty, crashing, lambda subject, context: "fine")
    ]
    assert outcomes == [Outcome.FAIL, Outcome.SKIP, Outcome.FAIL, Outcome.PASS]
    assert _check(broken).run(Subject(), CheckContext()).findings == ("it is wrong", "here")
    assert _check(broken, ("zero",)).run(Subject(), CheckContext()).outcome is Outcome.SKIP
    assert _check(broken, ("odd",)).run(Subject(), CheckContext()).outcome is Outcome.FAIL


def test_names_and_numbers_choose_checks() -> None:
    assert [one.name for one in find_checks([5, "quantizer.odd"], "quantizer")] == ["quantizer.zero", "quantizer.odd"]
    with pytest.raises(UserInputError, match=r"no check 'quantizer\.oddd'.*quantizer\.odd"):
        find_checks(["quantizer.oddd"], "quantizer")
    with pytest.raises(UserInputError, match="no check '10' of a quantizer"):
        find_checks([10], "quantizer")


def test_what_cannot_be_checked_is_refused_by_name() -> None:
    class Half:
        kind = "quantizer"
        name = "half"
        tags: frozenset[str] = frozenset()

    with pytest.raises(UserInputError, match="int is nothing that can be checked"):
        harness.check(3)
    with pytest.raises(UserInputError, match=r"Half is a quantizer without code_values, .*quantize, encode, dequantize"):
        harness.check(Half())
    with pytest.raises(UserInputError, match="'slow' does not exist"):
        harness.check(INT4, profile="slow")


def test_unknown_tags_are_refused() -> None:
    from harness.checks.adapters.ours import OurQuantizer

    subject = OurQuantizer(INT4)
    subject.tags = frozenset({"even"})
    with pytest.raises(UserInputError, match="'even' is no contract tag"):
        harness.check(subject, draws=False)


@pytest.mark.parametrize(
    ("kind", "declared", "said"),
    [
        ("packer", {"layout": "offset-stream"}, "layout is 'offset-stream', .*did you mean 'offset_stream'"),
        ("packer", {"ranks": ()}, "ranks is empty"),
        ("quantizer", {"scale_rule": 3}, "scale_rule is 3, which is none that is known"),
        ("quantizer", {"dtypes": []}, "dtypes is empty"),
        ("quantizer", {"code_values": torch.zeros(0)}, "code_values is empty"),
    ],
)
def test_declarations_that_say_nothing_are_refused(kind: str, declared: dict[str, object], said: str) -> None:
    from harness.checks.adapters.ours import OurPacker, OurQuantizer

    subject = OurQuantizer(INT4) if kind == "quantizer" else OurPacker(4)
    vars(subject).update(declared)
    with pytest.raises(UserInputError, match=f"check: Our{kind.title()}.{said}"):
        harness.check(subject, draws=False)


def test_expected_failures_are_strict() -> None:
    report = harness.check(INT4, checks=[5], draws=False, expected_failures={"quantizer.zero": "known"})
    assert report.exit_code == 1
    assert "was expected to fail (known), and did not" in report.records[0].summary
    with pytest.raises(UserInputError, match="there is no check"):
        harness.check(INT4, expected_failures={"quantizer.nothing": "typo"})
    report = harness.check(INT4, checks=[5], draws=False, expected_failures={5: "known"})
    assert "was expected to fail (known), and did not" in report.records[0].summary


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ({"quantizer.zero": 5}, "a str has a reason of type int; give a mapping of names or numbers of checks to texts"),
        ({5.0: "known"}, "a float has a reason of type str"),
        ({"quantizer.zero": None}, "has no reason"),
        ({"quantizer.zero": " "}, "has no reason"),
        ({5: "known", "5": "known"}, "one check is given by its number in two ways"),
        ({5: "known", "quantizer.zero": "known"}, "one check is given by its name and by its number"),
        (["quantizer.zero"], "a list was given"),
    ],
)
def test_reasons_that_are_none_are_refused(expected: Any, said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        harness.check(INT4, checks=[5], draws=False, expected_failures=expected)


def test_a_report_has_three_forms() -> None:
    report = harness.check(INT4, checks=[1, 16], draws=False)
    assert report.passed and report.to_dict()["kind"] == "quantizer"
    assert "int4-group16: pass" in report.to_text()
    suite = ElementTree.fromstring(report.to_junit())[0]
    assert (suite.get("tests"), suite.get("skipped")) == ("2", "1")


@harness.parametrize_with_catalogue([QuantizationArgs(num_bits=3, group_size=16)])
def test_a_test_per_subject_and_check(subject: Any, check: Any) -> None:
    check(subject)


@given(weights(column_multiple=16, nonfinite=True))
def test_weights_that_hurt_can_hold_what_is_not_finite(weight: torch.Tensor) -> None:
    assert weight.ndim == 2 and weight.shape[1] % 16 == 0
    assert not bool(weight.isfinite().all())


@given(weights())
def test_weights_that_hurt_are_finite_unless_asked(weight: torch.Tensor) -> None:
    assert bool(weight.isfinite().all())


def test_a_vacuous_limit_is_itself_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.checks.suites import scales

    monkeypatch.setattr(scales, "TIER", T3(max_relative_error=2.0))
    record = harness.check(INT4, checks=["quantizer.scale_rule"], draws=False).records[0]
    assert record.outcome is Outcome.FAIL and "measures nothing" in record.summary


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("mine", {"kind": "quantiser"}, "there is no kind 'quantiser' of subjects; did you mean 'quantizer'?"),
        ("mine", {"kind": "quantizer", "needs": ["no_such_tag"]}, "there is no contract tag 'no_such_tag'"),
        ("zero", {"kind": "quantizer"}, "another check has this name; choose another"),
    ],
)
def test_a_check_that_does_not_fit_the_catalogue_is_refused(name: str, settings: dict[str, Any], problem: str) -> None:
    before = dict(all_checks())
    with pytest.raises(UserInputError) as caught:
        harness.checks.register(None, name, "A statement", **settings)(lambda subject, context: "")
    assert problem in str(caught.value)
    assert all_checks() == before


def test_a_scale_that_underflows_below_a_global_one_may_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a weight of 3e5 the scale of a group up to 1.9 is one of the last fp8 numbers above 0, off by a third."""
    from harness.checks.inputs import examine
    from harness.checks.ours import QUANTIZERS

    weight = torch.full((4, 64), 0.01)
    weight[3, 63], weight[1, 3] = 3e5, 1.9
    monkeypatch.setattr(examine, "fixed_weights", lambda *given: [("a small group", weight)])
    subject = next(one for one in QUANTIZERS if one.name == "fp4-tensor_group16")
    assert harness.check(subject, checks=["quantizer.covers"], draws=False).passed
