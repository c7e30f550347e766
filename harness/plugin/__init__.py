"""The pytest plugin: goldens, models to test on, and markers for tests that need a GPU, a night or another library.

Registered as an entry point, so it is there wherever the distribution is installed. It changes nothing that it is not asked for: without
its options Hypothesis keeps its own settings, and without the fixture `golden` nothing is written. torch is imported only when a test asks
for something that needs it.

options.py     every option, on the command line and in the ini file
selection.py   markers: which tests run
fixtures.py    what a test can ask for
session.py     goldens of the whole session: collected, written once, reported, and which the tests used
"""

from __future__ import annotations

import pytest

from harness.plugin.fixtures import (
    assert_no_regression,
    assert_step_equivalent,
    device,
    golden,
    peer_python,
    reference_model,
    tiny_model,
    verify,
)
from harness.plugin.options import add_options, check_options, setting
from harness.plugin.selection import MARKERS, select
from harness.plugin.session import GoldenSession
from harness.profiles import load_profile

__all__ = ["assert_no_regression", "assert_step_equivalent", "device", "golden", "peer_python", "reference_model", "tiny_model", "verify"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the harness to pytest's own."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, load the profile that was asked for, and refuse options that contradict each other or the machine."""
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    check_options(config)
    profile = setting(config, "profile")
    if profile:
        load_profile(profile)
    config.pluginmanager.register(GoldenSession(config), "harness-goldens")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with its reason, every marked test whose condition is not met; keep only the checks that were asked for."""
    select(config, items)
