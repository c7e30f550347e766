"""The lifecycle of this library goes as the independent model says, however it is driven."""

from __future__ import annotations

import pytest

from compressor.lifecycle import Session
from harness.lifecycle.machines.machine_subjects import drive_modifier, drive_session, probe_stage
from harness.profiles import PROFILES, active_profile


def test_random_sessions_go_as_the_oracle_says() -> None:
    profile = active_profile()
    drive_session(probe_stage(), profile, share=0.25 if profile.name == "change" else 1.0)  # a fifth of a second a run


@pytest.mark.nightly
def test_random_single_modifiers_go_as_the_oracle_says() -> None:
    drive_modifier(active_profile())


@pytest.mark.nightly
def test_the_pr_profile_is_long_and_repeats_exactly() -> None:
    # A fifth of its runs has as many steps as the whole must have; the time it takes is nothing that a shared machine could tell.
    steps = [drive_session(probe_stage(), PROFILES["pr"], share=0.2) for _ in range(2)]
    assert steps[0] >= 2000
    assert steps[0] == steps[1]


def test_profiles_are_what_they_say() -> None:
    assert PROFILES["pr"].derandomize and PROFILES["change"].derandomize
    assert PROFILES["change"].runs * 10 == PROFILES["pr"].runs and PROFILES["change"].steps == PROFILES["pr"].steps
    assert not PROFILES["dev"].derandomize
    assert PROFILES["nightly"].runs == 10 * PROFILES["pr"].runs
    assert PROFILES["nightly"].machine_settings().database is not None
    assert PROFILES["pr"].machine_settings().database is None


@pytest.mark.nightly
def test_a_session_that_forgets_is_found_and_shrunk_to_a_few_steps() -> None:
    class Forgetful(Session):
        def abort(self) -> None:
            """Do nothing."""

    with pytest.raises(AssertionError) as found:
        drive_session(probe_stage(Forgetful), PROFILES["pr"])
    steps = [line for note in found.value.__notes__ for line in note.splitlines() if line.startswith("state.")]
    assert len(steps) <= 4
