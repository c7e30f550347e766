"""What a measurement depends on beside the code: machine, threads and versions. Series of different environments are not one series."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.reporting.text import printable

_PACKAGES = ("torch", "transformers", "compressed-tensors", "numpy")
_VARIABLES = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "CUDA_VISIBLE_DEVICES")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Environment:
    """A fingerprint.

    Attributes:
        facts: name to text, in the order of names.
    """

    facts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """12 hexadecimal digits that stand for the facts."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Return the facts as JSON that is the same for the same facts."""
        return json.dumps(dict(sorted(self.facts.items())), ensure_ascii=False)

    def changes(self, earlier: Environment) -> list[str]:
        """Say what is other than it was, a fact a line."""
        names = sorted({*self.facts, *earlier.facts})
        pairs = [(name, earlier.facts.get(name, "unknown"), self.facts.get(name, "unknown")) for name in names]
        return [f"{name}: {before} -> {now}" for name, before, now in pairs if before != now]


def current_environment(device: str = "cpu") -> Environment:
    """Return the fingerprint of this process.

    Args:
        device: that is measured: `cpu`, `cuda`, `cuda:1`. Torch is imported for a GPU only.

    Returns:
        The environment.

    Raises:
        ModelError: this machine has no such GPU.
    """
    facts = {"device": device, "machine": platform.machine(), "processor": _processor(), "cores": str(os.cpu_count())}
    facts |= {"system": f"{platform.system()} {platform.release()}", "python": platform.python_version()}
    facts |= {package: number for package in _PACKAGES if (number := _version(package))}
    facts |= {name: value for name in _VARIABLES if (value := os.environ.get(name))}
    if device.startswith("cuda"):
        import torch

        from compressor.model import resolve_device

        facts |= {"gpu": torch.cuda.get_device_name(resolve_device(device)), "cuda": str(torch.version.cuda)}
    return Environment({name: printable(fact) for name, fact in facts.items()})


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    if _CPUINFO.exists():
        names = [line.partition(":")[2].strip() for line in _CPUINFO.read_text("utf-8").splitlines() if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or "unknown"
