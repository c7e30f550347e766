"""What is worse stays so over chains of machines, over machines that come back, and over looks at older commits; what is mended is over."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import pytest

from harness.nightly.judging.judge import judge
from harness.nightly.judging.judgement import Judgement
from harness.nightly.measurement import Acceptance, Measurement
from harness.reporting.verdict import Verdict

FACTORS = {"A": 0.0, "B": 0.3, "C": -0.2, "D": 0.5}


def label(night: int) -> str:
    return (date(2026, 1, 1) + timedelta(night)).isoformat()


class Nights:
    """Readings of several machines, as they are written."""

    def __init__(self, seed: int, noise: float = 0.003) -> None:
        self.rng, self.noise, self.rows = np.random.default_rng(seed), noise, list[Measurement]()

    def add(self, night: int, machine: str, commit: int, level: float) -> None:
        """A night of five repetitions."""
        values = np.exp(level + FACTORS[machine] + self.rng.normal(0, self.noise) + self.rng.normal(0, self.noise / 2, 5))
        self.rows.append(Measurement(label(night), machine, f"c{commit}", "m", "lower", tuple(values)))

    def judged(self, *accepted: int) -> Judgement:
        """What is said on the day of the last night, where changes of some nights were accepted."""
        rows = sorted(self.rows, key=lambda one: one.night)
        return judge(rows, [Acceptance("m", label(night), "", "meant") for night in accepted], date.fromisoformat(rows[-1].night))


@pytest.mark.parametrize(("own", "bridge"), [(1, -1), (1, 0), (2, -1)])
def test_a_machine_of_one_night_carries_what_came_before_it(own: int, bridge: int) -> None:
    """A becomes worse; B begins behind a bridge and has a night or two, in the last of which C's bridge ran."""
    nights = Nights(0)
    for night in range(60 + own + 40):
        machine = "A" if night < 60 else "B" if night < 60 + own else "C"
        if night in (60, 60 + own):
            nights.add(night + bridge, machine, night - 1, 0.1)
        nights.add(night, machine, night, 0.1 * (night >= 35))
    found = nights.judged()
    assert found.verdict is Verdict.REGRESSION and found.changes[0].night == label(35), found.summary


@pytest.mark.parametrize("is_bridged_again", [False, True])
@pytest.mark.parametrize("begun", [60, 61])
def test_a_machine_that_comes_back_keeps_its_one_night_of_two_bridges(begun: int, is_bridged_again: bool) -> None:
    """A becomes worse; B has one night behind a bridge; C begins with the commit of that night; then B comes back."""
    nights = Nights(0)
    for night in range(60):
        nights.add(night, "A", night, 0.1 * (night >= 35))
    nights.add(60, "B", 59, 0.1)
    nights.add(60, "B", 60, 0.1)
    nights.add(begun, "C", 60, 0.1)
    for night in range(begun + 1, 122):
        nights.add(night, "C" if night < 97 else "B", night, 0.1)
    if is_bridged_again:
        nights.add(97, "B", 96, 0.1)
    found = nights.judged()
    assert found.verdict is Verdict.REGRESSION and found.changes[0].night == label(35), found.summary


@pytest.mark.parametrize("is_bridged_again", [False, True])
@pytest.mark.parametrize(("second", "third"), [(12, 12), (35, 12), (3, 20)])
def test_machines_that_take_turns_in_blocks_keep_what_came_first(second: int, third: int, is_bridged_again: bool) -> None:
    nights, begins = Nights(1), [0, 60, 60 + second, 60 + second + third]
    for night in range(begins[-1] + 40):
        block = sum(begin <= night for begin in begins) - 1
        if night == 60 or (is_bridged_again and night in begins[2:]):
            nights.add(night - 1, "AB"[block % 2], night - 1, 0.1)
        nights.add(night, "AB"[block % 2], night, 0.1 * (night >= 35))
    found = nights.judged()
    assert found.verdict is Verdict.REGRESSION and found.changes[0].night == label(35), found.summary


@pytest.mark.parametrize("further", [0.0, 0.3])
@pytest.mark.parametrize("then", ["A", "C"])
def test_what_was_accepted_elsewhere_in_a_pause_is_not_what_came_behind_it(then: str, further: float) -> None:
    """On B 5 % are accepted and more is told; then A comes back, or C begins with a commit of A's."""
    nights = Nights(2)
    for night in range(135):
        level = 0.05 * (night >= 80) + further * (night >= 90)
        machine = "A" if night < 60 else "B" if night < 100 else then
        if night == 100 and then == "C":
            nights.add(night, "C", 50, 0.0)
        nights.add(night, machine, night, level)
    assert nights.judged(80).verdict is (Verdict.REGRESSION if further else Verdict.PASS)
    assert nights.judged(80, 100).verdict is Verdict.PASS


@pytest.mark.parametrize("bridges", [1, 3])
def test_what_is_mended_stays_so_behind_bridges(bridges: int) -> None:
    verdicts = set()
    for seed in range(8):
        nights = Nights(seed, 0.01)
        for night in range(75 + 20 * bridges):
            hop = max(0, (night - 55) // 20)
            if night >= 75 and (night - 55) % 20 == 0:
                nights.add(night, "ABCD"[hop], night - 1, 0.0)
            nights.add(night, "ABCD"[hop], night, 0.1 * (35 <= night < 50))
        verdicts.add(nights.judged().verdict)
    assert verdicts == {Verdict.PASS}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("looks", [2, 5, 8])
def test_looks_at_older_commits_are_no_nights_of_the_code_of_now(looks: int, is_first: bool) -> None:
    nights = Nights(3)
    for night in range(70):
        if night == 60 and not is_first:
            nights.add(60, "A", 60, 0.1)
        for commit in range(10, 10 + looks) if night == 60 else ():
            nights.add(60, "A", commit, 0.0)
        if night != 60 or is_first:
            nights.add(night, "A", night, 0.1 * (night >= 35))
    assert nights.judged(35).verdict is Verdict.PASS
    assert nights.judged().verdict is Verdict.REGRESSION and nights.judged().changes[-1].night == label(35)
    nights.rows = [one for one in nights.rows if one.night <= label(60)]
    assert nights.judged().verdict is Verdict.REGRESSION


def test_commits_of_one_night_that_are_new_both_count() -> None:
    nights = Nights(4)
    for night in range(60):
        nights.add(night, "A", 2 * night, 0.0)
        nights.add(night, "A", 2 * night + 1, 0.0)
    assert nights.judged().num_nights == 120


def test_a_machine_that_begins_while_the_code_stands_still_carries_what_came_before() -> None:
    """A became worse; B runs A's last commit, every night, and nothing else."""
    nights = Nights(5)
    for night in range(60):
        nights.add(night, "A", night, 0.1 * (night >= 35))
    for night in range(60, 100):
        nights.add(night, "B", 59, 0.1)
        if night in (62, 99):
            found = nights.judged()
            assert found.verdict is Verdict.REGRESSION and found.changes[0].night == label(35), found.summary


@pytest.mark.parametrize("machines", ["A", "AB"])
@pytest.mark.parametrize(("better", "back_to"), [(True, 30), (False, 59)])
def test_code_that_goes_back_to_an_older_commit_is_the_code_of_now(machines: str, better: bool, back_to: int) -> None:
    """Of what was better the level is lost, or of what was worse it is mended; on a machine that had not run that commit, too."""
    level = {commit: 0.1 * ((commit >= 80) != better) for commit in range(120)}
    nights = Nights(6)
    for night in range(120):
        machine = "A" if night < 60 else machines[-1]
        commit = night if night < 100 else back_to
        if night == 60 and machine == "B":
            nights.add(59, "B", 59, level[59])
        nights.add(night, machine, commit, level[commit])
    assert nights.judged().verdict is (Verdict.REGRESSION if better else Verdict.PASS), nights.judged().summary


@pytest.mark.parametrize("look", [105, 110])
def test_a_night_at_an_older_commit_alone_is_no_night_of_the_code_of_now(look: int) -> None:
    """What was accepted while A paused is accepted there, although A looked at a commit of before first."""
    nights = Nights(7)
    for night in range(100):
        nights.add(night, "A" if night < 60 else "B", night, 0.1 * (night >= 80))
    nights.add(look, "A", 40, 0.0)
    for night in range(look + 1, look + 20):
        nights.add(night, "A", night, 0.1)
    assert nights.judged(80).verdict is Verdict.PASS and nights.judged().verdict is Verdict.REGRESSION


@pytest.mark.parametrize("stays", [1, 4, 12])
def test_commits_that_bridge_count_each_by_itself(stays: int) -> None:
    """A became better at night 40; B begins behind a look at a commit of before, and stays at one of after for some nights."""
    nights = Nights(8)
    for night in range(60):
        nights.add(night, "A", night, 0.1 * (night < 40))
    nights.add(60, "B", 30, 0.1)
    for night in range(61, 61 + stays):
        nights.add(night, "B", 59, 0.0)
    for night in range(61 + stays, 90):
        nights.add(night, "B", night, 0.0)
    found = nights.judged()
    assert found.verdict is Verdict.PASS and f"since {label(40)}, when it became better by" in found.summary, found.summary


def test_a_night_with_uncommitted_changes_makes_no_commit_an_older_one() -> None:
    nights = Nights(9)
    for night in range(41):
        nights.add(night, "A", 7, 0.0)
    nights.add(41, "A", 7, 0.0)
    nights.rows[-1] = replace(nights.rows[-1], revision="c7-dirty")
    nights.add(42, "A", 7, 0.0)
    assert nights.judged().num_nights == 43


@pytest.mark.parametrize(("off", "verdict"), [(0.0145, Verdict.PASS), (0.04, Verdict.REGRESSION)])
def test_what_is_mended_behind_a_bridge_that_is_off_by_chance_is_over(off: float, verdict: Verdict) -> None:
    """B is bridged by one commit, and ran it by some percent faster than the nights behind it will say; then 11 % come and go there."""
    nights = Nights(5)
    for night in range(60):
        nights.add(night, "A", night, 0.0)
    nights.add(60, "B", 59, -off)
    for night in range(60, 100):
        nights.add(night, "B", night, 0.11 * (63 <= night < 75))
    assert nights.judged().verdict is verdict, nights.judged().summary


@pytest.mark.parametrize(("stays", "verdict"), [(0.0, Verdict.PASS), (0.03, Verdict.REGRESSION)])
@pytest.mark.parametrize("accepted", [0.0, 0.1])
@pytest.mark.parametrize("machines", ["B", "BCD"])
def test_what_is_mended_in_part_is_held_against_nights_of_its_own_machine(
    machines: str, accepted: float, stays: float, verdict: Verdict
) -> None:
    """Bridges of one commit are unsure of 3 %; the last machine has good nights of its own, then 12 % that are mended in part."""
    for seed in range(4):
        nights = Nights(seed, 0.006)
        begins = [60 + 6 * number for number in range(len(machines))]
        good = begins[-1] + 14
        for night in range(good + 30):
            hop = sum(begin <= night for begin in begins)
            machine = "A" if not hop else machines[hop - 1]
            level = accepted * (night >= 30) + (0.0 if night < good else 0.12 if night < good + 8 else stays)
            if night in begins:
                nights.add(night, machine, night - 1, accepted)
            nights.add(night, machine, night, level)
        assert nights.judged(*[30] if accepted else []).verdict is verdict, nights.judged().summary


def test_what_was_mended_in_part_stays_open_as_machines_go_on() -> None:
    """A tells 12 % of which 4 % stay; then C and D come, each behind one commit."""
    nights = Nights(3, 0.006)
    for night in range(100):
        level = 0.12 if 40 <= night < 48 else 0.04 * (night >= 48)
        machine = "A" if night < 54 else "C" if night < 60 else "D"
        if night in (54, 60):
            nights.add(night, machine, night - 1, level)
        nights.add(night, machine, night, level)
    assert nights.judged().verdict is Verdict.REGRESSION, nights.judged().summary


@pytest.mark.parametrize(
    ("off", "commits", "verdict"),
    [(0.0, 1, Verdict.PASS), (0.0145, 1, Verdict.INCONCLUSIVE), (0.0145, 6, Verdict.PASS), (0.04, 1, Verdict.REGRESSION)],
)
def test_what_only_a_bridge_could_tell_of_what_stays_is_said(off: float, commits: int, verdict: Verdict) -> None:
    """B is slow from its first night on and mended later, so that no good night of its own says how far it is back."""
    nights = Nights(5)
    for night in range(60):
        nights.add(night, "A", night, 0.0)
    for commit in range(60 - commits, 60):
        nights.add(60, "B", commit, -off if commit == 59 else 0.0)
    for night in range(60, 100):
        nights.add(night, "B", night, 0.11 * (night < 75))
    found = nights.judged()
    assert found.verdict is verdict, found.summary
    assert ("of what was worse may stay, which the bridge is too unsure to tell; run up to five" in found.summary) == (
        verdict is Verdict.INCONCLUSIVE
    )
    assert nights.judged(60).verdict is Verdict.PASS


def test_a_better_level_of_a_bridged_machine_is_not_forgotten_behind_what_was_worse() -> None:
    """On B, bridged by one commit, 4 % are won; then come 12 %, and of these what was won stays lost."""
    for seed in range(6):
        nights = Nights(seed, 0.006)
        for night in range(112):
            level = 0.0 if night < 72 else -0.04 if night < 84 else 0.12 if night < 92 else 0.0
            if night == 60:
                nights.add(60, "B", 59, 0.0)
            nights.add(night, "A" if night < 60 else "B", night, level)
        assert nights.judged().verdict is Verdict.REGRESSION, nights.judged().summary


def test_what_was_told_on_two_machines_stays_behind_what_was_worse_still() -> None:
    """A tells 2.5 %, and B, bridged by one commit; then come 12 % on B, of which the 2.5 % stay."""
    for seed in range(12):
        nights = Nights(seed, 0.006)
        for night in range(110):
            level = 0.0 if night < 40 else 0.12 if 80 <= night < 88 else 0.025
            if night == 60:
                nights.add(60, "B", 59, 0.025)
            nights.add(night, "A" if night < 60 else "B", night, level)
        before = [one for one in nights.rows if one.night < label(80)]
        told = judge(before, (), date.fromisoformat(label(79))).verdict
        assert told is not Verdict.REGRESSION or nights.judged().verdict is Verdict.REGRESSION, nights.judged().summary


def test_first_nights_that_were_told_as_worse_are_no_good_ones() -> None:
    """B, bridged by five commits, begins 3 % worse, which is told; then come 12 %, of which 3 % stay."""
    for seed in (1, 13, 21, 47):
        nights = Nights(seed, 0.006)
        for night in range(60):
            nights.add(night, "A", night, 0.0)
        for commit in range(55, 60):
            nights.add(60, "B", commit, 0.0)
        for night in range(60, 105):
            nights.add(night, "B", night, 0.12 if 65 <= night < 81 else 0.03)
        before = [one for one in nights.rows if one.night < label(65)]
        told = judge(before, (), date.fromisoformat(label(64))).verdict
        assert told is not Verdict.REGRESSION or nights.judged().verdict is Verdict.REGRESSION, nights.judged().summary


@pytest.mark.parametrize("seed", range(8))
def test_what_is_mended_two_bridges_later_is_judged(seed: int) -> None:
    """Between the nights that count and those of now lie both bridges, at one place: A becomes worse, B and C go on, C is mended."""
    nights = Nights(seed, 0.0008)
    for night in range(116):
        machine = "A" if night < 60 else "B" if night < 68 else "C"
        if night in (60, 68):
            nights.add(night, machine, night - 1, 0.04)
        nights.add(night, machine, night, 0.04 * (50 <= night < 76))
    assert nights.judged().verdict is Verdict.PASS
