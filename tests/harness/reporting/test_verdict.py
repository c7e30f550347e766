"""One vocabulary of verdicts, one table of exit codes: no command of the harness has a number of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness.goldens.store.store import GoldenVerdict
from harness.onnx_graph.census.census import Status
from harness.onnx_graph.contracts.base import Holding
from harness.reporting.verdict import EXIT_CODES, EXIT_FAILURE, EXIT_INTERRUPTED, Verdict, worst
from harness.traceability.verdicts import Finding

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("parts", "together"),
    [
        ((), Verdict.INCONCLUSIVE),
        ((Verdict.PASS,), Verdict.PASS),
        ((Verdict.PASS, Verdict.INCONCLUSIVE), Verdict.INCONCLUSIVE),
        ((Verdict.INCONCLUSIVE, Verdict.REGRESSION, Verdict.PASS), Verdict.REGRESSION),
    ],
)
def test_the_worst_part_decides_and_nothing_is_no_pass(parts: tuple[Verdict, ...], together: Verdict) -> None:
    assert worst(parts) is together


def test_exit_codes_are_four_different_numbers() -> None:
    assert [EXIT_CODES[verdict] for verdict in Verdict] == [0, 1, 2]
    assert (EXIT_FAILURE, EXIT_INTERRUPTED) == (3, 130)


def test_words_of_the_rooms_have_one_meaning_each() -> None:
    assert {one.value: one.verdict.value for one in Holding} == {"holds": "pass", "violated": "regression", "not analysed": "inconclusive"}
    unclear = {Status.MISSING, Status.AMBIGUOUS, Status.UNKNOWN}
    assert {one for one in Status if one.verdict is Verdict.INCONCLUSIVE} == unclear
    assert {one for one in Status if one.verdict is Verdict.PASS} == {Status.SEPARATE}
    assert {one for one in Finding if one.verdict is Verdict.REGRESSION} == {Finding.CRASH, Finding.SILENT}
    assert {one for one in GoldenVerdict if one.verdict is Verdict.PASS} == {GoldenVerdict.PASS}


def test_no_command_returns_a_number_of_its_own() -> None:
    commands = [*(ROOT / "harness").rglob("command*.py"), *(ROOT / "harness" / "onnx_graph" / "commands").glob("*.py")]
    assert len(commands) > 15
    for path in commands:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "run" and isinstance(node.returns, ast.Name) and node.returns.id == "int":
                values = [part for one in ast.walk(node) if isinstance(one, ast.Return) and one.value for part in ast.walk(one.value)]
                assert not [part.value for part in values if isinstance(part, ast.Constant) and isinstance(part.value, int)], path
