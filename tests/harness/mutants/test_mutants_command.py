"""`harness mutants lifecycle`: which check kills which planted bug; all of them are looked at by hand, here one of each sort."""

from __future__ import annotations

import json

import pytest

from harness.cli import main


def test_a_bug_that_the_checks_see_and_one_that_only_a_machine_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", "lifecycle", "--mutant", "starts_late", "--mutant", "hooks_after_finalize", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    by_name = {mutant["name"]: mutant for mutant in result["mutants"]}
    assert "lifecycle.start_and_end" in by_name["starts_late"]["killed_by"]
    assert by_name["hooks_after_finalize"]["only_machines"]
    assert (result["num_killed"], result["num_mutants"]) == (2, 2)


def test_an_unknown_bug_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", "lifecycle", "--mutant", "starts_lat"]) == 3
    assert "starts_late" in capsys.readouterr().err
