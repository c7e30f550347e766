"""What every test of this repository shares; what users of the harness need too stands in harness/plugin.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub; where it cannot be reached, each name is asked for again for 20 s

# In a source tree that is not installed pytest does not find the plugin by itself; loading it twice is an error.
_INSTALLED = any(entry.value == "harness.plugin" for entry in entry_points(group="pytest11"))
pytest_plugins = ["pytester", *([] if _INSTALLED else ["harness.plugin"])]


def pytest_configure(config: pytest.Config) -> None:
    """Draw in the `dev` profile when the command line names none; collect tests without looking for garbage, of which there is none."""
    gc.disable()
    gc.set_threshold(50_000)  # most of what a test makes is gone with its last name, and each look for garbage costs a millisecond
    os.fsync = _unflushed
    if config.getoption("--harness-profile") is None:
        from harness.profiles import load_profile

        load_profile("dev")


def _unflushed(fd: object) -> None:
    """Waiting for the disk proves nothing; that a file is flushed, and when, is seen by tests that watch the call."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Whether all cases run, also those that tests/cases_per_change.txt leaves to the night, in a profile of the day."""
    parser.addoption(
        "--all-cases", action="store_true", help="run all cases of the tests in tests/cases_per_change.txt, not a share of them"
    )


def pytest_collection_finish() -> None:
    """Leave what is there by now (libraries, thirteen thousand tests) out of the collections of garbage that tests and steps ask for."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the plugin skips what the profile leaves to the night
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that a change does not need; what is asked for by its name (`tests/a.py::test_b`) always runs."""
    from harness.plugin.options import setting

    if config.getoption("--all-cases") or setting(config, "profile") in ("nightly", "release") or any("::" in arg for arg in config.args):
        return
    lines = (_ROOT / "tests" / "cases_per_change.txt").read_text(encoding="utf-8").splitlines()
    shares = {name: share for share, name in (line.strip().rsplit(maxsplit=1) for line in lines if not line.startswith("#"))}
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (name := item.nodeid.partition("[")[0]) in shares:
            cases.setdefault(name, []).append(item)
    left_out = {item for item in items if item.get_closest_marker("nightly")}
    for name, found in cases.items():
        wanted = _wanted(shares[name], [item.nodeid.partition("[")[2] for item in found])
        left_out.update(item for number, item in enumerate(found) if number not in wanted)
    config.hook.pytest_deselected(items=list(left_out))  # not skipped: to report thousands of skips takes longer than many a test
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the fixtures, some of which start processes
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """Show a GPU to the tests marked `gpu` alone: to all others, and to the processes they start, "auto" means the processor."""
    if item.get_closest_marker("gpu"):
        return (yield)
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # what processes read; this one may have looked while it collected tests
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        return (yield)


def _wanted(share: str, cases: Sequence[str]) -> set[int]:
    """The places of as many cases as a number says, spread evenly; or those of the cases that are named, and of all where none is there."""
    if share.isdigit():
        return {(2 * number + 1) * len(cases) // (2 * int(share)) for number in range(int(share))}
    named = {number for number, case in enumerate(cases) if case.removesuffix("]") in share.split(",")}
    return named or set(range(len(cases)))


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Sessions inside a test load the plugin of the harness and no other that happens to be installed, whose warnings are errors here."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "harness.plugin")
    return pytester


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return _ROOT
