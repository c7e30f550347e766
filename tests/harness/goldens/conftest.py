"""What the tests of the golden store share: a store in a temporary folder, and a short way to check and to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.goldens.candidates import read_candidate
from harness.goldens.golden import Golden, GoldenMismatch, GoldenSettings
from harness.goldens.writer import Acceptance, accept

CI_VARIABLES = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD", "CIRCLECI")


@dataclass
class Shelf:
    """A store below a folder, and what a test or a session does with it."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "golden"

    @property
    def cache(self) -> Path:
        """Of the candidates; the record of what was used lies beside it."""
        return self.folder / "cache" / "golden"

    def golden(self, update: Any = "", test: str = "test_it.py::test_it", reason: str = "") -> Golden:
        return Golden(GoldenSettings(self.root, self.cache, update, reason), test)

    def check(self, name: str, tensors: Any, **given: Any) -> dict[str, Any]:
        """Check as a test would; return the outcome, whatever it is."""
        golden = self.golden()
        try:
            golden.check(name, tensors, **given)
        except GoldenMismatch as error:
            golden.outcomes[-1]["message"] = str(error)
        return golden.outcomes[-1]

    def write(
        self, name: str, tensors: Any, *, reason: str = "", variant: bool = False, update: Any = "failed", **given: Any
    ) -> Acceptance:
        """Write as a session with --golden-update would."""
        golden = self.golden(update, reason=reason)
        golden.check(name, tensors, **given)
        candidates = [read_candidate(Path(outcome["candidate"])) for outcome in golden.outcomes if outcome["candidate"]]
        return accept(self.root, candidates, reason=reason, add_variant=variant)

    def content(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.root)): path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file()}


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


@pytest.fixture(autouse=True)
def _no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk proves nothing here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
