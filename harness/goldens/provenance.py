"""What a manifest records of the moment: versions, the date, and whether this is a CI machine. No torch is imported for it."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "numpy", "transformers", "compressed-tensors")
_CI_VARIABLES = (
    "CI",
    "BUILD_NUMBER",
    "GITHUB_ACTIONS",
    "GITLAB_CI",
    "BUILDKITE",
    "JENKINS_URL",
    "TEAMCITY_VERSION",
    "TF_BUILD",
    "CIRCLECI",
)
_OFF = ("", "0", "false", "no", "off")


def versions() -> dict[str, str]:
    """Return the versions of Python, of this distribution and of the libraries that this process has loaded."""
    found = {"python": platform.python_version(), "compressor-harness": _version("compressor-harness") or "source tree"}
    for package in _PACKAGES:
        if package.replace("-", "_") in sys.modules and (number := _version(package)):
            found[package] = number
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def today() -> str:
    """Return the date, or that of SOURCE_DATE_EPOCH where it is set, so that a build can be repeated byte for byte."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdecimal():
        return datetime.datetime.fromtimestamp(int(epoch), datetime.UTC).date().isoformat()
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def ci_variable() -> str:
    """Return the environment variable that says this is a CI machine; empty on any other."""
    return next((name for name in _CI_VARIABLES if os.environ.get(name, "").lower() not in _OFF), "")
