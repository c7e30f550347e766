"""Records render the same facts in every form, and together mean what the table of exit codes says."""

from __future__ import annotations

import json
import math
import os
from xml.etree import ElementTree

import pytest
from rich.console import Console

from compressor.console import visible
from compressor.json_text import to_json
from harness.reporting.junit import to_junit
from harness.reporting.pages import pairs_html, record_html
from harness.reporting.record import Claim, decide
from harness.reporting.text import to_table
from harness.reporting.verdict import EXIT_CODES, Outcome, Verdict

CLAIM = Claim("family.check", "A statement")


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([Outcome.PASS], Verdict.PASS),
        ([Outcome.PASS, Outcome.SKIP], Verdict.PASS),
        ([Outcome.PASS, Outcome.INCONCLUSIVE], Verdict.INCONCLUSIVE),
        ([Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL], Verdict.REGRESSION),
        ([Outcome.SKIP, Outcome.SKIP], Verdict.INCONCLUSIVE),
        ([], Verdict.INCONCLUSIVE),
    ],
)
def test_the_worst_outcome_decides_and_nothing_checked_is_no_pass(outcomes, verdict):
    assert decide([CLAIM.record(outcome, "x") for outcome in outcomes]) is verdict


def test_exit_codes_are_0_1_2():
    assert [EXIT_CODES[verdict] for verdict in (Verdict.PASS, Verdict.REGRESSION, Verdict.INCONCLUSIVE)] == [0, 1, 2]


def test_findings_make_a_failure_that_counts_them():
    assert CLAIM.found([], "all well").outcome == "pass"
    assert CLAIM.found(["a is bad"], "all well", noun="file").summary == "1 file; first: a is bad"
    assert CLAIM.found(["a", "b"], "all well", noun="file").summary == "2 files; first: a"


def test_json_is_sorted_and_has_no_nan():
    text = to_json({"b": math.nan, "a": [math.inf, 1.0], "c": {"z": -math.inf}})
    assert list(json.loads(text)) == ["a", "b", "c"]
    assert json.loads(text) == {"a": ["inf", 1.0], "b": "nan", "c": {"z": "-inf"}}


def test_halves_of_characters_as_in_names_that_are_no_utf8_stand_in_every_report():
    name = os.fsdecode(b"caf\xe9")
    record = CLAIM.record(Outcome.FAIL, name, findings=[name, "\ud800"])
    assert json.loads(to_json({"name": name}).encode())["name"] == name
    assert ElementTree.fromstring(to_junit([record], name).encode())[0].get("failures") == "1"
    assert visible(name) == "caf\\udce9"


def test_junit_counts_and_escapes():
    records = [
        CLAIM.record(Outcome.PASS, "fine"),
        CLAIM.record(Outcome.FAIL, 'bad <&"\x00', limit="<= 3", findings=["first", "second"]),
        CLAIM.record(Outcome.INCONCLUSIVE, "unsure"),
        CLAIM.skipped("no data"),
    ]
    root = ElementTree.fromstring(to_junit(records, "validate"))[0]
    counts = [root.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["4", "1", "1", "1"]
    failure = root[1][0]
    assert failure.tag == "failure"
    assert failure.get("message") == 'bad <&"\N{REPLACEMENT CHARACTER}'
    assert failure.text == "limit: <= 3\nfirst\nsecond"
    assert [case[0].tag for case in root[1:]] == ["failure", "error", "skipped"]
    assert root[0].get("classname") == "validate.family"


@pytest.mark.parametrize(("width", "is_wide"), [(80, False), (160, True)])
def test_the_table_shows_the_limit_where_there_is_room(width, is_wide):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(to_table([CLAIM.record(Outcome.FAIL, "found [bold]this", limit="at most 3")], width=width))
    console.file.close()
    text = console.export_text()
    assert "family.check" in text
    assert "found [bold]this" in text
    assert ("at most 3" in text) is is_wide


def test_html_escapes_everything_and_opens_what_needs_a_look():
    record = CLAIM.record(Outcome.FAIL, "<b>", evidence={"<i>": {"<u>": "<s>"}}, findings=[f"<p>{i}" for i in range(30)])
    page = record_html(record)
    assert "<details" in page
    assert " open " in page
    assert not any(tag in page for tag in ("<b>", "<i>", "<u>", "<s>", "<p>0"))
    assert "and 10 more, all of them in report.json" in page
    assert " open " not in record_html(CLAIM.record(Outcome.PASS, "x"))


def test_html_values_are_readable():
    page = pairs_html({"none": None, "yes": True, "float": 0.123456789, "int": 1234567, "list": [1, "a"]})
    for text in ("none", "yes", "0.123457", "1,234,567", "1, a"):
        assert f"<dd>{text}</dd>" in page
