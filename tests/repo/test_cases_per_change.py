"""The table of costly tests names tests that are there, and what it says is what is run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "cases_per_change.txt"


def test_every_line_names_a_test_with_cases() -> None:
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        share, name = line.split(maxsplit=1)
        file, _, function = name.partition("::")
        before, found, _ = (ROOT / file).read_text(encoding="utf-8").partition(f"def {function}(")
        assert found and share.strip(",") and share != "0", line
        decorators = before.rpartition("\n\n")[2]
        assert "parametrize" in decorators and "@pytest.mark.nightly\n" not in decorators, line


@pytest.mark.parametrize("share", ["2", "3,8,gone"])
def test_a_share_runs_for_a_change_all_at_night_and_one_that_is_named_always(share: str, pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text(encoding="utf-8"))
    tests = pytester.mkdir("tests")
    (tests / "cases_per_change.txt").write_text(f"# how many\n {share} tests/test_many.py::test_case\n", encoding="utf-8")
    many = "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_case(n): assert n >= 0\ndef test_other(): assert True\n"
    (tests / "test_many.py").write_text(many, encoding="utf-8")
    quiet = ("-p", "no:cacheprovider", "--harness-profile=pr")
    pytester.runpytest(*quiet).assert_outcomes(passed=3, deselected=7)
    pytester.runpytest(*quiet, "--all-cases").assert_outcomes(passed=10)
    pytester.runpytest(*quiet, "tests/test_many.py::test_case[0]").assert_outcomes(passed=1)
    pytester.runpytest("-p", "no:cacheprovider", "--harness-profile=nightly").assert_outcomes(passed=10)
