"""Memory stays at one layer whatever the number of layers, `plan` says how much it is, and a leak or a wrong estimate would be seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compressor.distributed.ranks import Ranks
from compressor.modifiers.schemes.hessians import InputHessians, SharedInput
from harness.errors import HarnessError
from tests.bench import memory
from tests.bench.memory_job import measure_case

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the meter reads the books of glibc")


@pytest.fixture(scope="module")
def measured(reference_model: Path) -> list[dict[str, Any]]:
    """Two numbers of layers, the reference model and two others, in one fresh process."""
    return memory.run_cases([*memory.layer_cases([2, 4], 8), *memory.estimate_cases(reference_model, 8)])


@pytest.mark.nightly
def test_more_layers_need_no_more_memory_and_estimates_hold(measured: list[dict[str, Any]]) -> None:
    assert memory.judge(measured[:2], measured[2:]) == []
    few, many = measured[:2]
    assert many["model_bytes"] > 1.2 * few["model_bytes"]
    for result in measured:
        assert result["estimate"]["basis"] == "one forward followed on shapes"


@pytest.mark.nightly
def test_the_stage_that_is_said_to_be_worst_is(measured: list[dict[str, Any]]) -> None:
    for result in measured:
        stages, peaks = {one["name"]: one["peak_bytes"] for one in result["estimate"]["stages"]}, dict(result["stages"])
        names = [name for name in stages if name.startswith("model.")]
        found = {name: peaks[f"stage {number} of {len(names)}"] for number, name in enumerate(names, 1)}
        found["trace"] = peaks["before calibrate"]  # the bar that measures begins behind it
        assert found[result["estimate"]["peak_stage"]] >= 0.95 * max(found.values())
        for name in names:  # of a few MB; a bar names the next stage while the last one still lies there
            assert stages[name] == pytest.approx(found[name], rel=0.45), name


@pytest.mark.nightly
def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Any] = []
    take_all = InputHessians.take_all

    def leaking(self: InputHessians, names: Sequence[str], ranks: Ranks) -> list[SharedInput]:
        taken = take_all(self, names, ranks)
        kept.extend(array.clone() for one in taken for arrays in one.hessian.panels.nodes.values() for array in arrays)
        return taken

    monkeypatch.setattr(InputHessians, "take_all", leaking)
    results = []
    for case in memory.layer_cases([2, 6], 4):
        kept.clear()
        (tmp_path / case["name"]).mkdir()
        results.append(measure_case(case, tmp_path / case["name"], warm_up=not results))
    failures = memory.judge(results, [])
    assert failures and "6 layers need" in failures[0]


def test_judge_names_estimates_that_are_off() -> None:
    def result(name: str, peak: int, estimated: int) -> dict[str, Any]:
        return {"name": name, "peak_bytes": peak, "estimate": {"peak_bytes": estimated}, "beyond_weights_bytes": peak, "model_bytes": 1}

    assert memory.judge([], [result("a", 100, 76), result("b", 100, 124)]) == []
    assert memory.judge([], [result("a", 100, 74), result("b", 100, 126)]) == [
        "a: the estimate is 0.74 times what was measured",
        "b: the estimate is 1.26 times what was measured",
    ]


def test_the_command_shows_a_table_and_its_exit_code_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    grown = iter([10, 30, 20] * 2)

    def run_cases(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                "name": case["name"],
                "peak_bytes": 100,
                "estimate": {"peak_bytes": 100},
                "beyond_weights_bytes": next(grown),
                "model_bytes": 5,
            }
            for case in cases[:2]
        ]

    monkeypatch.setattr(memory, "run_cases", run_cases)
    assert memory.main(["--layers", "2", "4", "--model", str(tmp_path)]) == 1
    assert "4 layers need 3.00 times" in capsys.readouterr().out
    grown = iter([10, 10, 20, 20])
    assert memory.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"] == []


def test_a_process_that_fails_is_told_with_its_last_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho the last line\nexit 7\n")
    python.chmod(0o755)
    monkeypatch.setattr(memory.sys, "executable", str(python))
    with pytest.raises(HarnessError, match=r"(?s)ended with 7.*the last line"):
        memory.run_cases([])
