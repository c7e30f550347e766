"""The pytest plugin: what a test needs from the machine, and how long it may look.

Registered as an entry point, so it is there wherever the distribution is installed. It changes nothing that it is not asked for:
without `--harness-profile` Hypothesis keeps its own settings. torch is imported only when a test asks for a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.profiles import PROFILES, load_profile

if TYPE_CHECKING:
    import torch

MARKERS = {
    "gpu": "needs a CUDA device; skipped where there is none",
    "nightly": "runs only with --harness-profile=nightly: too long for every change",
    "peer": "needs the other library's interpreter, given with --peer-python; skipped without it",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the harness to pytest's own."""
    group = parser.getgroup("harness", "compressor-harness")
    group.addoption(
        "--harness-profile",
        choices=tuple(PROFILES),
        help="how long property tests look: dev (at random), pr (the same every time), nightly (ten times as long, and nightly tests run)",
    )
    group.addoption(
        "--peer-python", type=Path, metavar="PATH", help="interpreter of an environment with llmcompressor, for the tests marked peer"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and load the profile that was asked for."""
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    profile = config.getoption("--harness-profile")
    if profile is not None:
        load_profile(profile)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with its reason, every marked test whose condition this machine or this run does not meet."""
    reasons = {}
    if any(item.get_closest_marker("gpu") for item in items) and not _cuda_is_available():
        reasons["gpu"] = "no CUDA device on this machine"
    if config.getoption("--harness-profile") != "nightly":
        reasons["nightly"] = "runs only with --harness-profile=nightly"
    if config.getoption("--peer-python") is None:
        reasons["peer"] = "needs --peer-python=PATH, an interpreter with llmcompressor"
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device a test works on: CUDA for a test marked `gpu`, the CPU for every other."""
    import torch

    return torch.device("cuda" if request.node.get_closest_marker("gpu") else "cpu")


@pytest.fixture(scope="session")
def peer_python(pytestconfig: pytest.Config) -> Path:
    """The interpreter given with `--peer-python`; for tests marked `peer`."""
    path = pytestconfig.getoption("--peer-python")
    if path is None:
        pytest.fail("the fixture peer_python needs --peer-python=PATH; mark the test with pytest.mark.peer", pytrace=False)
    return Path(path)


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
