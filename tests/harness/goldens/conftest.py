"""What the tests of the golden store share: a store in a temporary folder, and a short way to check and to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mutation.golden_statements import Shelf

CI_VARIABLES = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD", "CIRCLECI")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """An empty store."""
    return Shelf(tmp_path)


@pytest.fixture
def no_ci(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The environment of a machine that is no CI machine."""
    for name in CI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return lambda: None
