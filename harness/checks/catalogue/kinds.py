"""What the registry and the watch over subjects share: kinds of subjects, and the error of a call that does more than it says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Kinds of subjects, and the protocol of harness/checks/protocols.py that each offers.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "quantizer": "Quantizer",
        "packer": "Packer",
        "solver": "Solver",
        "observer": "Observer",
        "layer": "Layer",
        "sparsifier": "Sparsifier",
        "transform": "Transform",
        "expert_pruner": "ExpertPruner",
        "calibration": "Calibration",
        "artifact": "Artifact",
    }
)


class SideEffectError(BaseException):
    """A call of the subject changed something beside its result, whatever the check was about.

    It is no Exception, so that no check that waits for a refusal takes it for one.

    Attributes:
        cause: what was changed; checks that met the same are told once.
    """

    def __init__(self, message: str, cause: str) -> None:
        """Say what was changed by which call."""
        super().__init__(message)
        self.cause = f"changed: {cause}"
