"""The length of a run is checked when it is given: a slip of the keyboard is no run that never ends."""

from __future__ import annotations

import pytest

from compressor.errors import UserInputError
from compressor.settings.verbs import StepSettings


@pytest.mark.parametrize("epochs", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_number_of_epochs_that_no_run_has_is_refused(epochs: float) -> None:
    with pytest.raises(UserInputError, match=r"epochs: .* must be above 0, and at most 1,000,000"):
        StepSettings(epochs=epochs)


def test_epochs_may_be_fractions_and_make_one_step_at_least() -> None:
    assert StepSettings(epochs=2.5).num_steps(8) == 20
    assert StepSettings(epochs=0.001).num_steps(8) == 1
    assert [StepSettings(epochs=share).num_steps(5) for share in (0.5, 0.7, 0.9, 2.5)] == [3, 4, 5, 13]
