"""`assert_no_regression` keeps what a test measured, and fails the test when its nights are worse."""

from __future__ import annotations

import shlex
from datetime import date, timedelta
from pathlib import Path

import ruptures  # noqa: F401

import harness.nightly.judging.judge  # noqa: F401  # numpy cannot be loaded twice into one process, and pytester forgets what an inner run loaded
from harness import cli
from harness.nightly import History
from harness.nightly.environment import current_environment

TEST = """
def test_speed(assert_no_regression):
    assert_no_regression("speed", [{value}], better="higher")
"""


def _nights(path: Path, count: int) -> None:
    history, today = History(path), date.today()
    for night in range(count):
        label = (today - timedelta(count + 5 - night)).isoformat()
        history.add("speed", [100.0 + night % 3 / 10], environment=current_environment(), night=label, better="higher")


def test_a_measurement_is_kept_and_one_that_is_worse_for_two_nights_fails(project) -> None:
    path = project.path / "nights" / "history.sqlite"
    project.tests(test_it=TEST.format(value=90.0))
    project.run("--harness-history=nights/history.sqlite").assert_outcomes(passed=1)  # too few nights to tell
    assert History(path).series("speed")[0].values == (90.0,)
    path.unlink()
    _nights(path, 40)
    project.run("--harness-history=nights/history.sqlite").assert_outcomes(passed=1)  # one bad night is no change
    History(path).add("speed", [90.0], environment=current_environment(), night="2999-01-01", better="higher")
    found = project.run("--harness-history=nights/history.sqlite", "--junit-xml=report.xml")
    found.assert_outcomes(failed=1)
    (advised,) = {line.partition("if it is meant: harness ")[2] for line in found.stdout.lines if "if it is meant" in line}
    assert "speed: worse by 10.1" in found.stdout.str() and cli.main(shlex.split(advised)) == 0
    assert History(path).acceptances("speed")[0].reason == "..."
    assert "harness.nightly" in (project.path / "report.xml").read_text()


def test_nights_that_may_hide_what_is_worse_are_warned_of(project) -> None:
    history, today = History(project.path / "history.sqlite"), date.today()
    for night in range(58):
        speed = (100.0 + night % 5 / 10) / (1.2 if night >= 40 and night % 3 == 0 else 1.0)
        history.add("speed", [speed], environment=current_environment(), night=(today - timedelta(60 - night)).isoformat(), better="higher")
    project.tests(test_it=TEST.format(value=100.2))
    found = project.run("--harness-history=history.sqlite", "-Wdefault::pytest.PytestWarning")
    found.assert_outcomes(passed=1, warnings=1)
    assert "PytestWarning: speed is inconclusive: " in found.stdout.str() and "something comes and goes" in found.stdout.str()


WRONG = """
import pytest
from compressor.errors import UserInputError

@pytest.mark.parametrize("values", ["12", b"12", [True], None, ["a"], ["1.0"], 3.0, {1.0: 2.0}, [[1.0]], float("nan")], ids=str)
def test_speed(assert_no_regression, values):
    with pytest.raises(UserInputError, match="speed: .* was given, where a list of numbers belongs"):
        assert_no_regression("speed", values)
"""


def test_what_is_no_list_of_numbers_is_refused_before_it_is_kept(project) -> None:
    project.tests(test_it=WRONG)
    project.run("--harness-history=history.sqlite").assert_outcomes(passed=10)
    assert not (project.path / "history.sqlite").exists()
