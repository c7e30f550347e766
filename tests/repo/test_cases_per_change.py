"""The table of costly tests names tests that are there, and what it says is what is run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "cases_per_change.txt"


def test_every_line_names_a_test_and_its_cases() -> None:
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        share, name = line.strip().rsplit(maxsplit=1)
        file, _, function = name.partition("::")
        before, found, _ = (ROOT / file).read_text(encoding="utf-8").partition(f"def {function}(")
        assert found and share.strip(","), line
        decorators = before.rpartition("\n\n")[2]
        has_cases = "parametrize" in decorators or "params=" in before  # of a fixture
        assert (share == "0" or has_cases) and "@pytest.mark.nightly\n" not in decorators, line


@pytest.mark.parametrize("share", ["2", "3 of 9,8 of 9,gone"])
def test_a_share_runs_for_a_change_all_at_night_and_one_that_is_named_always(share: str, pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text(encoding="utf-8"))
    tests = pytester.mkdir("tests")
    lines = f"# how many\n {share} tests/test_many.py::test_case\n 0 tests/test_many.py::test_long\n"
    (tests / "cases_per_change.txt").write_text(lines, encoding="utf-8")
    many = "import pytest\n@pytest.mark.parametrize('n', range(9), ids='{} of 9'.format)\ndef test_case(n): assert n >= 0\n"
    others = "def test_long(): assert True\ndef test_other(): assert True\n@pytest.mark.nightly\ndef test_night(): assert True\n"
    (tests / "test_many.py").write_text(many + others, encoding="utf-8")
    quiet = ("-p", "no:cacheprovider", "--harness-profile=pr")
    pytester.runpytest(*quiet).assert_outcomes(passed=3, deselected=9)
    pytester.runpytest(*quiet, "--all-cases").assert_outcomes(passed=11, skipped=1)
    pytester.runpytest(*quiet, "tests/test_many.py::test_case[0 of 9]", "tests/test_many.py::test_long").assert_outcomes(passed=2)
    pytester.runpytest("-p", "no:cacheprovider", "--harness-profile=nightly").assert_outcomes(passed=12)
