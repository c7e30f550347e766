"""What every test of this repository shares; what users of the harness need too stands in harness/plugin.py."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent

# In a source tree that is not installed pytest does not find the plugin by itself; loading it twice is an error.
_INSTALLED = any(entry.value == "harness.plugin" for entry in entry_points(group="pytest11"))
pytest_plugins = ["pytester", *([] if _INSTALLED else ["harness.plugin"])]


def pytest_configure(config: pytest.Config) -> None:
    """Draw in the `dev` profile when the command line names none."""
    if config.getoption("--harness-profile") is None:
        from harness.profiles import load_profile

        load_profile("dev")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return _ROOT
