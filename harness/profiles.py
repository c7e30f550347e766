"""How long the harness may look, in one place: the profiles that pytest's --harness-profile and `harness verify --profile` choose from.

`dev` looks at something new every time, `pr` must not fail by chance and repeats exactly, `change` is `pr` with a tenth of the runs of
state machines, for a suite that runs many of them, `nightly` looks ten times as long as `pr`, and `release` twenty times. (Hypothesis has
a profile of its own for CI, which never looks for anything new.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hypothesis import settings


ProfileName = Literal["dev", "change", "pr", "nightly", "release"]


@dataclass(frozen=True)
class Profile:
    """What a profile spends.

    Attributes:
        name: dev, change, pr, nightly or release.
        examples: random examples of a property test.
        runs: random runs of a state machine.
        steps: steps of one run of a state machine.
        derandomize: draw the same every time.
    """

    name: ProfileName
    examples: int
    runs: int
    steps: int
    derandomize: bool = False

    def example_settings(self) -> settings:
        """Return Hypothesis settings for property tests; an example has no deadline, because the first pays for imports and caches."""
        return self._settings(self.examples)

    def machine_settings(self, share: float = 1.0) -> settings:
        """Return Hypothesis settings for state machines.

        Args:
            share: of the runs; a machine over a slow modifier takes less than all.

        Returns:
            The settings.
        """
        return self._settings(max(2, round(self.runs * share)))

    def _settings(self, examples: int) -> settings:
        from hypothesis import HealthCheck, settings
        from hypothesis.database import DirectoryBasedExampleDatabase

        slow = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
        drawn = settings(max_examples=examples, stateful_step_count=self.steps, deadline=None, print_blob=True, suppress_health_check=slow)
        if self.derandomize:
            return settings(drawn, derandomize=True, database=None)
        # Said outright: where the variable CI is set, Hypothesis would keep no database, and what a night found would be lost.
        return settings(drawn, derandomize=False, database=DirectoryBasedExampleDatabase(".hypothesis/examples"))


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("dev", examples=25, runs=40, steps=25),
        Profile("change", examples=25, runs=24, steps=30, derandomize=True),
        Profile("pr", examples=25, runs=240, steps=30, derandomize=True),
        Profile("nightly", examples=250, runs=2400, steps=30),
        Profile("release", examples=500, runs=4800, steps=30),
    )
}
_PREFIX = "harness-"


def load_profile(name: str) -> None:
    """Make a profile the settings of every Hypothesis test of this process.

    Args:
        name: dev, change, pr, nightly or release.
    """
    from hypothesis import settings

    settings.register_profile(_PREFIX + name, PROFILES[name].example_settings())
    settings.load_profile(_PREFIX + name)


def active_profile() -> Profile:
    """Return the profile that pytest's --harness-profile has loaded; `pr`, which repeats exactly, where none was."""
    from hypothesis import settings
    from hypothesis.errors import InvalidArgument

    for name, profile in PROFILES.items():
        try:
            if settings.get_profile(_PREFIX + name) is settings.default:
                return profile
        except InvalidArgument:  # not loaded in this process
            continue
    return PROFILES["pr"]
