"""The claims of the chapter, on a few simulated histories of each kind of noise."""

from __future__ import annotations

from harness.nightly.judging.simulation import NOISES, PLANTED, simulate


def test_noise_of_every_kind_raises_no_alarm_and_large_changes_are_seen_in_time() -> None:
    found = simulate(num_series=4, seed=1)
    assert [one.noise for one in found] == list(NOISES)
    for one in found:
        assert one.false_alarms == 0, one
        assert one.seen[PLANTED[0].name] == one.seen[PLANTED[2].name] == 1.0, one


def test_the_same_seed_gives_the_same_figures_and_another_other_noise() -> None:
    first, again, other = (simulate(num_series=1, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
