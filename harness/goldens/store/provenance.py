"""Where a golden was accepted, and which of several variants is nearest to the machine at hand.

Sums run in another order on another instruction set, and their last bits differ. A golden therefore names its platform; where none fits
exactly the nearest one is taken and the tier that was declared for elsewhere applies, which the result says.
"""

from __future__ import annotations

import datetime
import os
import platform
import platform as machine
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

_ARCHITECTURES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
_DEVICE_POINTS, _ARCHITECTURE_POINTS, _INSTRUCTIONS_POINTS = 4, 2, 1


@dataclass(frozen=True, order=True)
class Platform:
    """What decides the last bits of a result.

    Attributes:
        device: cpu, cuda, mps ...
        architecture: of the processor (x86_64, aarch64), or the compute capability of the GPU (sm_90).
        instruction_set: the one that torch's kernels use (AVX512, AVX2, NEON, DEFAULT); for a GPU the CUDA version.
    """

    device: str
    architecture: str
    instruction_set: str

    def __str__(self) -> str:
        """The platform in one word."""
        return "-".join(part for part in (self.device, self.architecture, self.instruction_set) if part)

    def to_dict(self) -> dict[str, str]:
        """Return JSON types."""
        return asdict(self)

    def score(self, other: Platform) -> int:
        """Say how near another platform is: 7 for the same, 0 for nothing in common; an instruction set counts within its architecture."""
        if self.device != other.device:
            return 0
        if self.architecture != other.architecture:
            return _DEVICE_POINTS
        same = self.instruction_set == other.instruction_set
        return _DEVICE_POINTS + _ARCHITECTURE_POINTS + (_INSTRUCTIONS_POINTS if same else 0)


def nearest(wanted: Platform, offered: Sequence[Platform]) -> int:
    """Return the place of the nearest platform; of equally near ones the first by name, whatever their order.

    Args:
        wanted: the platform at hand.
        offered: one or more platforms.

    Returns:
        An index into `offered`.
    """
    return min(range(len(offered)), key=lambda place: (-wanted.score(offered[place]), offered[place]))


def current_platform(device: str = "cpu") -> Platform:
    """Return the platform of this process.

    Args:
        device: the kind of device that the tensors were computed on.

    Returns:
        The platform.
    """
    import torch

    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return Platform("cuda", f"sm_{major}{minor}", f"cuda{torch.version.cuda}" if torch.version.cuda else f"rocm{torch.version.hip}")
    name = machine.machine().lower()
    architecture = _ARCHITECTURES.get(name, name)
    return Platform(device, architecture, torch.backends.cpu.get_cpu_capability() if device == "cpu" else "")


# What a manifest records of the moment: versions, the date, and whether this is a CI machine. No torch is imported for it.

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
