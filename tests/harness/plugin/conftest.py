"""What the tests of the plugin share: a project in a temporary folder, run in this process or in one of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import harness.goldens.golden
import harness.goldens.store.writer  # noqa: F401

# pytester forgets what an inner run has imported, and neither torch nor safetensors can be loaded twice into one process.


CI_VARIABLES = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD", "CIRCLECI")


class Project:
    """A project of somebody else, with tests that use goldens."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester, self.path = pytester, pytester.path

    def tests(self, **files: str) -> None:
        self.pytester.makepyfile(**files)

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)

    def run_apart(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    def manifest(self, folder: str = "golden") -> dict[str, Any]:
        path = self.path / folder / "manifest.json"
        return json.loads(path.read_text())["goldens"] if path.exists() else {}

    def files(self) -> dict[str, bytes]:
        root = self.path / "golden"
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, repo_root: Path) -> Project:
    """A project outside of this repository, on a machine that is no CI machine."""
    for name in CI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(repo_root))
    return Project(pytester)
