"""Markers: which tests run here, and which numbers of the catalogue a test stands for."""

from __future__ import annotations

import pytest

from harness.plugin.options import setting

MARKERS = {
    "gpu": "needs a CUDA device; skipped where there is none",
    "nightly": "runs only with --harness-profile=nightly or release: too long for every change",
    "release": "runs only with --harness-profile=release: too long for every night",
    "peer": "needs the other library's interpreter, given with --peer-python; skipped without it",
    "check(id)": "stands for this number, or these, of the catalogue of checks; --harness-check=N runs only those",
}


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with its reason, every marked test whose condition is not met; keep only the checks that were asked for.

    Args:
        config: of pytest.
        items: the collected tests; changed.

    Raises:
        pytest.UsageError: a marker `check` without a number.
    """
    for item in items:
        checks_of(item)
    reasons = _reasons(config, items)
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    wanted = set(setting(config, "check") or ())
    if wanted:
        left_out = [item for item in items if not wanted & set(checks_of(item))]
        items[:] = [item for item in items if wanted & set(checks_of(item))]
        config.hook.pytest_deselected(items=left_out)


def checks_of(item: pytest.Item) -> list[int]:
    """Return the numbers of the catalogue that a test stands for.

    Args:
        item: the test.

    Returns:
        Sorted numbers.

    Raises:
        pytest.UsageError: a marker `check` without a number.
    """
    numbers: set[int] = set()
    for marker in item.iter_markers("check"):
        if not marker.args or marker.kwargs or not all(isinstance(number, int) for number in marker.args):
            given = ", ".join(map(repr, marker.args))
            raise pytest.UsageError(f"{item.nodeid}: the marker check({given}) names no number; write pytest.mark.check(20)")
        numbers.update(marker.args)
    return sorted(numbers)


def _reasons(config: pytest.Config, items: list[pytest.Item]) -> dict[str, str]:
    reasons = {}
    if any(item.get_closest_marker("gpu") for item in items) and not _cuda_is_available():
        reasons["gpu"] = "no CUDA device on this machine"
    profile = setting(config, "profile")
    if profile not in ("nightly", "release"):
        reasons["nightly"] = "runs only with --harness-profile=nightly"
    if profile != "release":
        reasons["release"] = "runs only with --harness-profile=release"
    if not setting(config, "peer_python"):
        reasons["peer"] = "needs --peer-python=PATH, an interpreter with llmcompressor"
    return reasons


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
