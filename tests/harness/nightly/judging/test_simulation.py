"""The claims of the chapter, on a few simulated histories of each kind of noise."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from compressor.errors import UserInputError
from harness.nightly.environment import Environment
from harness.nightly.history import History
from harness.nightly.judging.simulation import NOISES, PLANTED, poisson_interval, recorded, simulate


@pytest.mark.parametrize(("count", "low", "high"), [(0, 0.0, 3.6889), (3, 0.6187, 8.7673), (14, 7.6539, 23.4896)])  # scipy.stats.chi2
def test_few_alarms_say_little_of_their_mean(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == (pytest.approx(low, rel=0.03), pytest.approx(high, rel=0.03))


@pytest.mark.nightly
def test_noise_of_every_kind_raises_no_alarm_and_large_changes_are_seen_in_time() -> None:
    found = simulate(num_series=4, seed=1)
    assert [one.noise for one in found] == list(NOISES)
    for one in found:
        assert one.false_alarms == 0, one
        assert one.seen[PLANTED[0].name] == one.seen[PLANTED[2].name] == 1.0, one


def test_the_same_seed_gives_the_same_figures_and_another_other_noise() -> None:
    few = {"white": NOISES["white"]}
    first, again, other = (simulate(num_series=1, seed=seed, noises=few) for seed in (3, 3, 4))
    assert first == again != other


def test_a_history_gives_its_own_noise(tmp_path: Path) -> None:
    history, rng = History(tmp_path / "h.sqlite"), np.random.default_rng(0)
    readings = {f"2026-01-{night:02d}": np.exp(rng.normal(0, 0.01, 4)) for night in range(1, 31)}
    for night, values in readings.items():
        history.add("tokens/second", list(1 / values), environment=Environment({"machine": "one"}), night=night, better="higher")
        history.add("bytes", [5.0], environment=Environment({"machine": "one"}), night=night)
    logs = np.log(np.array(list(readings.values())))
    drawn = recorded(history)(15, np.random.default_rng(1))
    (start,) = (at for at in range(21) if np.allclose(drawn[:10], logs[at : at + 10]))  # a stretch stays together, more is worse
    (found,) = simulate(4, 0, noises={"recorded": recorded(history)})
    assert 0 <= start <= 20 and drawn.shape == (15, 4)
    assert (found.noise, found.false_alarms, found.seen[PLANTED[0].name]) == ("recorded", 0, 1.0)


def test_a_history_that_says_too_little_of_its_noise_is_refused(tmp_path: Path) -> None:
    history = History(tmp_path / "h.sqlite")
    for night in range(1, 31):
        history.add("bytes", [5.0], environment=Environment({}), night=f"2026-01-{night:02d}")
    with pytest.raises(UserInputError, match="no metric has 30 nights of one environment that differ"):
        recorded(history)


def test_timings_of_this_project_on_a_shared_machine_raise_few_alarms(tmp_path: Path) -> None:
    """35 nights of `compress` and `speed` on the reference model, minutes apart, of one commit."""
    shutil.copy(Path(__file__).with_name("shared_machine.sqlite"), tmp_path / "h.sqlite")
    (found,) = simulate(8, 0, noises={"recorded": recorded(History(tmp_path / "h.sqlite"))})
    assert found.false_alarms <= 6.25  # one in eight series
