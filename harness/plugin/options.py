"""Every option of the plugin, as a table: on the command line, and in the ini file for what a project decides once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.goldens.store.paths import CACHE_DIR
from harness.goldens.store.provenance import ci_variable
from harness.profiles import PROFILES

GOLDEN_DIR = "golden"
HISTORY = "nightly.sqlite"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        flag: on the command line.
        help: for both places.
        ini: name in the ini file; empty for what is decided anew for each run.
        default: where neither place says anything.
        arguments: for pytest's addoption.
    """

    flag: str
    help: str
    ini: str = ""
    default: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


OPTIONS: dict[str, Option] = {
    "profile": Option(
        "--harness-profile",
        "how long property tests look: dev (at random), pr (the same every time), change (with a tenth of the runs of state machines), "
        "nightly (ten times as long as pr, and nightly tests run), release (twice that, and release tests run too)",
        ini="harness_profile",
        arguments={"choices": tuple(PROFILES)},
    ),
    "device": Option(
        "--harness-device",
        "device of the fixture `device`: auto (a GPU where there is one), cpu, cuda, cuda:1 (default: cpu; cuda for tests marked gpu)",
        ini="harness_device",
        arguments={"metavar": "DEVICE"},
    ),
    "golden_dir": Option(
        "--harness-golden-dir",
        f"folder of the goldens, relative to the root of the project (default: {GOLDEN_DIR})",
        ini="harness_golden_dir",
        default=GOLDEN_DIR,
        arguments={"metavar": "DIR"},
    ),
    "cache_dir": Option(
        "--harness-cache-dir",
        f"folder that keeps the tensors of failed checks, for `harness golden diff` and `accept` (default: {CACHE_DIR})",
        ini="harness_cache_dir",
        default=CACHE_DIR,
        arguments={"metavar": "DIR"},
    ),
    "reference_model": Option(
        "--harness-reference-model",
        "folder of the model that the fixture `reference_model` names (default: the one that comes with the harness)",
        ini="harness_reference_model",
        arguments={"metavar": "DIR"},
    ),
    "history": Option(
        "--harness-history",
        f"file of the history of `assert_no_regression`, relative to the root of the project (default: {HISTORY})",
        ini="harness_history",
        default=HISTORY,
        arguments={"metavar": "FILE"},
    ),
    "check": Option(
        "--harness-check",
        "run only tests marked check(N); may be given several times",
        arguments={"metavar": "N", "type": int, "action": "append"},
    ),
    "peer_python": Option(
        "--peer-python",
        "interpreter of an environment with llmcompressor, for the tests marked peer",
        arguments={"metavar": "PATH", "type": Path},
    ),
    "update": Option(
        "--golden-update",
        "write goldens at the end of the run: new (the missing ones), failed (and those whose check fails), all; refused on CI machines",
        arguments={"choices": ("new", "failed", "all")},
    ),
    "reason": Option(
        "--golden-reason",
        "why limits are loosened; kept in the manifest, and shown by `harness golden why`",
        arguments={"metavar": "TEXT"},
    ),
    "variant": Option(
        "--golden-variant",
        "with --golden-update: add this platform's own outputs beside the others', with new where their check passes, else in any case",
        arguments={"action": "store_true"},
    ),
}


def add_options(parser: pytest.Parser) -> None:
    """Add every option to pytest's own.

    Args:
        parser: of pytest; changed.
    """
    group = parser.getgroup("harness", "compressor-harness")
    for option in OPTIONS.values():
        group.addoption(option.flag, help=option.help, **option.arguments)
        if option.ini:
            parser.addini(option.ini, f"{option.flag}: {option.help}", default="")


def setting(config: pytest.Config, name: str) -> Any:
    """Return what the command line says, else the ini file, else the default.

    Args:
        config: of pytest.
        name: a key of OPTIONS.

    Returns:
        The value.
    """
    option = OPTIONS[name]
    given = config.getoption(option.flag)
    if given is not None and given is not False:
        return given
    return (config.getini(option.ini) if option.ini else "") or option.default


def folder_setting(config: pytest.Config, name: str) -> Path:
    """Return a folder that an option names; relative ones start at the root of the project."""
    return config.rootpath / setting(config, name)


def check_options(config: pytest.Config) -> None:
    """Refuse options that contradict each other or the machine, before any test runs.

    Args:
        config: of pytest.

    Raises:
        pytest.UsageError: the message says what to do.
    """
    update, ci = setting(config, "update"), ci_variable()
    if update and ci:
        raise pytest.UsageError(
            f"--golden-update={update}: is refused, because {ci} is set and a CI machine never writes goldens; run it locally"
        )
    for name in ("reason", "variant"):
        if setting(config, name) and not update:
            raise pytest.UsageError(f"{OPTIONS[name].flag}: does nothing without --golden-update; give both")
    if setting(config, "reason") and not setting(config, "reason").strip():
        raise pytest.UsageError("--golden-reason: is blank, and nobody would know why a limit was loosened; give a sentence")
    profile = setting(config, "profile")
    if profile and profile not in PROFILES:
        raise pytest.UsageError(f"harness_profile={profile}: does not exist; use one of {', '.join(PROFILES)}")
    peer = setting(config, "peer_python")
    if isinstance(peer, Path) and not (peer.is_file() and os.access(peer, os.X_OK)):
        raise pytest.UsageError(f"--peer-python={peer}: is no program; give the interpreter of an environment with llmcompressor")
    device = setting(config, "device")
    if device not in ("", "auto", "cpu", "cuda") and not _is_device(device):
        raise pytest.UsageError(f"--harness-device={device}: torch knows no such device; say auto, cpu, cuda or cuda:1")


def _is_device(name: str) -> bool:
    import torch  # which most runs name no device for

    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True
