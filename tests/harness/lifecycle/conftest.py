"""What a change looks at of modifiers that are right."""

from __future__ import annotations

import pytest

from harness.lifecycle.checks.registry import CHECKS
from harness.plugin.options import setting

_DEAR = {"nothing_left", "state_machine", "hooks_watch", "new_process"}


@pytest.fixture
def checks_of_right_ones(request: pytest.FixtureRequest) -> list[str] | None:
    """All checks at night; for a change those that take milliseconds, as the dear ones are run over a well-behaved modifier anyway."""
    if request.config.getoption("--all-cases") or setting(request.config, "profile") in ("nightly", "release"):
        return None
    return [name for name in CHECKS if name.removeprefix("lifecycle.") not in _DEAR]
