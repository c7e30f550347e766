"""The benchmark of replay: its arithmetic on known numbers, its structure on a small run, and its exit codes. No test looks at a time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from compressor.errors import UserInputError
from harness.replay.kernels.timing import Ratio, interleave, median_interval, ratios, repeats_for
from tests.bench import replay, replay_cases, replay_runs
from tests.bench.live_peak import live_peak_bytes, peak_of
from tests.bench.replay_runs import CaseResult, Goals, Memory, at_least, at_most, measure

CPU = torch.device("cpu")
GOALS = Goals(speed=1.5, guards=0.1, memory=3.0)


@pytest.fixture(autouse=True)
def _same_threads_afterwards(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def result(speed: float = 2.0, guards: float = 0.05, held: int = 30, differences: tuple[str, ...] = (), compiled: float | None = None):
    def ratio(value: float) -> Ratio:
        return Ratio(value, value, value, 0.95, 7)

    seconds = {"eager": 2e-3, "replay": 1e-3, "unguarded": 9e-4, "compiled": 1e-3, "ordinary": 1.4e-3}
    memory = Memory(held, 10, 10)
    return CaseResult(
        "a",
        GOALS,
        7,
        seconds,
        ratio(speed),
        ratio(1.4),
        ratio(guards),
        ratio(0.04),
        None if compiled is None else ratio(compiled),
        memory,
        differences,
        50,
    )


def met(one: CaseResult) -> dict[str, str]:
    return {row[0]: row[-1] for row in one.figures()}


def test_each_figure_is_held_against_its_own_goal():
    assert met(result()) == {
        "eager / replay": "yes",
        "loop / replay": "",
        "guards' share": "yes",
        "memory / live peak": "yes",
        "bits": "yes",
    }
    assert met(result(speed=1.49))["eager / replay"] == "no"
    assert met(result(guards=0.11))["guards' share"] == "no"
    assert met(result(held=31))["memory / live peak"] == "no"
    assert met(result(differences=("param:w",)))["bits"] == "no"
    assert met(result(compiled=0.99))["compiled / replay"] == "no" and met(result(compiled=1.0))["compiled / replay"] == "yes"
    asked = result(speed=1.49, guards=0.11, held=31).to_dict()
    assert not any(asked[key]["met"] for key in ("eager_over_replay", "guards_share", "memory"))


def test_a_goal_within_the_interval_is_marked():
    assert [at_least(Ratio(1.6, 1.4, 1.8, 0.95, 9), 1.5), at_least(Ratio(1.4, 1.3, 1.6, 0.95, 9), 1.5)] == ["yes?", "no?"]
    assert [at_least(Ratio(1.6, 1.5, 1.8, 0.95, 9), 1.5), at_least(Ratio(1.4, 1.3, 1.49, 0.95, 9), 1.5)] == ["yes", "no"]
    assert [at_most(Ratio(0.09, 0.02, 0.3, 0.95, 9), 0.1), at_most(Ratio(0.2, 0.1, 0.3, 0.95, 9), 0.1)] == ["yes?", "no?"]
    assert [at_most(Ratio(0.09, 0.02, 0.1, 0.95, 9), 0.1), at_most(Ratio(0.2, 0.11, 0.3, 0.95, 9), 0.1)] == ["yes", "no"]


def test_the_median_has_the_interval_of_order_statistics():
    found = median_interval(list(range(1, 12)))
    # Of 11 values, the 2nd and the 10th: fewer than 2 of 11 fair coins fall on one side with probability 2 * 12 / 2048.
    assert (found.median, found.low, found.high) == (6, 2, 10) and found.confidence == pytest.approx(1 - 24 / 2048)
    few = median_interval([3.0, 1.0, 2.0])
    assert (few.low, few.high, few.confidence) == (1.0, 3.0, 0.75)
    assert median_interval([4.0]).confidence == 0.0
    with pytest.raises(UserInputError, match="no values"):
        median_interval([])


def test_the_interval_covers_the_median_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 15, generator=generator, dtype=torch.float64).tolist()
    covered = sum(found.low <= 0.5 <= found.high for found in map(median_interval, draws)) / len(draws)
    assert covered == pytest.approx(median_interval(draws[0]).confidence, abs=0.01) and covered > 0.94


def test_programs_take_turns_in_every_order_and_a_slow_moment_cancels_out():
    calls: list[str] = []
    clock = itertools.count()
    programs = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = interleave(programs, 6, repeats=2, clock=lambda: float(next(clock)))
    assert {name: len(series) for name, series in seconds.items()} == {"a": 6, "b": 6, "c": 6}
    starts = {tuple(calls[k * 6 : k * 6 + 6 : 2]) for k in range(6)}
    assert len(starts) == 6  # all orders
    assert all(value == 0.5 for series in seconds.values() for value in series)
    found = ratios({"a": [1.0, 10.0, 100.0], "b": [2.0, 20.0, 200.0]}, over="a")
    assert found["b"].median == found["b"].low == found["b"].high == 2.0


def test_what_runs_before_a_measurement_is_not_measured():
    now = [0.0]

    def wait(name: str) -> None:
        now[0] += 100

    def work() -> None:
        now[0] += 1

    assert interleave({"a": work}, 3, before=wait, clock=lambda: now[0]) == {"a": [1.0, 1.0, 1.0]}
    assert repeats_for(lambda: None) > 1


def test_the_live_peak_is_the_highest_running_sum():
    assert peak_of([10, 20, -10, 5, -25, 20]) == 30
    assert peak_of([-5]) == 0 and peak_of([]) == 0
    x = torch.ones(1000)
    # Two results of 4000 bytes live at a time, of three that are made.
    assert live_peak_bytes(lambda: ((x + 1) * 2) - 1, CPU) == pytest.approx(8000, abs=200)


def test_a_small_run_has_all_figures_and_equal_bits():
    ticks = itertools.count()
    found = measure(replay_cases.mlp(), GOALS, 1, CPU, clock=lambda: float(next(ticks)))
    # A look at the clock is a second, and the guards look twice: 3 seconds a step with them, 1 without.
    assert found.seconds == {"eager": 1.0, "ordinary": 1.0, "replay": 3.0, "unguarded": 1.0}
    assert [one.median for one in (found.speed, found.ordinary, found.guards, found.unguarded)] == pytest.approx([1 / 3] * 4)
    found = measure(replay_cases.mlp(), GOALS, 1, CPU)
    assert found.differences == () and found.rounds in (1, 5)
    assert set(found.seconds) == {"eager", "ordinary", "replay", "unguarded"} and all(value > 0 for value in found.seconds.values())
    assert found.compiled is None
    assert found.memory.held >= 0.9 * found.memory.recorded_peak  # what is alive at a time cannot lie in less
    assert found.memory.live_peak == pytest.approx(found.memory.recorded_peak, rel=0.2)  # two ways of counting


def test_a_run_that_ends_in_other_bits_is_told(monkeypatch, capsys):
    make = replay_runs.make_trainers

    def sabotaged(case, device):
        trainers = make(case, device)
        with torch.no_grad():
            trainers["eager"].step.model.last.bias[0] += 1e-6
        return trainers

    monkeypatch.setattr(replay_runs, "make_trainers", sabotaged)
    found = measure(replay_cases.mlp(), GOALS, 1, CPU)
    assert any(clause.startswith("param:last.bias") for clause in found.differences)
    monkeypatch.setattr(replay.BenchPlan, "results", lambda plan: [found])
    assert replay.main(["--rounds", "1"]) == 1
    assert "NOT equal: " in capsys.readouterr().out


def test_no_time_decides_the_exit_code(monkeypatch, capsys):
    asked = {}

    def results(plan):
        asked.update(vars(plan))
        return [result(speed=0.1, guards=0.9, held=1000)]

    monkeypatch.setattr(replay.BenchPlan, "results", results)
    assert replay.main(["--rounds", "3", "--device", "cpu", "--model", "folder", "--threads", "1", "--clock", "cpu"]) == 0
    assert asked == {"rounds": 3, "device": "cpu", "model": Path("folder"), "clock": "cpu"}
    out = capsys.readouterr().out
    assert "cpu time" in out and "eager / replay" in out and "guards' share" in out and "memory / live peak" in out and " no " in out
    assert replay.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bitwise_equal"] and found["cases"][0]["eager_over_replay"]["goal"] == 1.5 and found["machine"]["threads"] >= 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rounds", "0"], "--rounds 0: this is below 1"),
        (["--threads", "-1"], "--threads -1: this is below 1"),
        (["--model", "nowhere", "--device", "cpu"], "nowhere: there is no config.json"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_3(argv, message, capsys, monkeypatch):
    assert replay.main(argv) == 3
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_cases_are_the_same_from_the_same_seed_and_fit_the_reference(tmp_path, reference_config):
    for case in (replay_cases.mlp(), replay_cases.lstm(), replay_cases.small_llama(16, 1, 2, 4)):
        first, second = (case.step(CPU).tensors() for _ in range(2))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert replay_cases.reference(reference_config).name == "reference size"
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserInputError, match="gpt2 is no Llama"):
        replay_cases.reference(tmp_path)


@pytest.fixture
def reference_config() -> Path:
    return Path(__file__).parents[2] / "golden" / "reference"
