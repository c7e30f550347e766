"""The contracts by the names that the command line takes. Light: nothing of onnx is imported before a contract is made."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compressor.errors import UserInputError
from compressor.spelling import did_you_mean

if TYPE_CHECKING:
    from harness.onnx_graph.contracts.base import Contract


@dataclass(frozen=True)
class NamedContract:
    """One line of the table.

    Attributes:
        text: what it says.
        module: in this package.
        kind: class in that module.
        settings: of its constructor.
    """

    text: str
    module: str
    kind: str
    settings: Mapping[str, float | str] = field(default_factory=dict)

    def make(self) -> Contract:
        """Make the contract."""
        contract: Contract = getattr(importlib.import_module(f"harness.onnx_graph.contracts.{self.module}"), self.kind)(**self.settings)
        return contract


_ROLES, _NUMBERS, _DOMAINS = "roles", "numbers", "domains"
CONTRACTS: Mapping[str, NamedContract] = {
    "separate-qkv": NamedContract("Q, K and V of every block come from three linear layers of their own", _ROLES, "SeparateQKV"),
    "same-block-count": NamedContract("as many attention blocks after as before, kind by kind", _ROLES, "SameBlockCount"),
    "role-weights": NamedContract("every role still has its own weight, exactly", _ROLES, "RoleWeights"),
    "role-weights-quantized": NamedContract("the same within 15 dB, for weights in codes", _ROLES, "RoleWeights", {"min_sqnr_db": 15.0}),
    "allowed-domains": NamedContract("no operator of a domain that the exported graph does not use", _DOMAINS, "AllowedDomains"),
    "projection-op": NamedContract("the projections are MatMul or Gemm", _ROLES, "ProjectionOp"),
    "qdq-preserved": NamedContract(
        "layers and tables stored in codes are still stored in codes, and Q, K and V mean the same", _ROLES, "QDQPreserved"
    ),
    "numeric-equal": NamedContract(
        "the same outputs with onnxruntime's optimizations off, at least 90 dB, where a graph leaves a size open with 2 (first axis) or 7",
        _NUMBERS,
        "NumericEqual",
    ),
    "numeric-equal-deploy": NamedContract(
        "the same outputs as deployed, at least 35 dB, or as near as the exported graph itself comes so, if that is 20 dB",
        _NUMBERS,
        "NumericEqual",
        {"policy": "deploy"},
    ),
}
"""Name to contract."""


def contract_from_names(text: str) -> Contract:
    """Read a list of contracts.

    Args:
        text: names with commas between.

    Returns:
        All of them, combined.

    Raises:
        UserInputError: an unknown name, with the nearest; or none.
    """
    from harness.onnx_graph.contracts.base import AllOf

    parts = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in CONTRACTS:
            raise UserInputError(f"contract: there is no {name!r}; {did_you_mean(name, CONTRACTS)}choose from {', '.join(CONTRACTS)}")
        parts.append(CONTRACTS[name].make())
    return AllOf(parts) if len(parts) != 1 else parts[0]
