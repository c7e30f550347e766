"""The harness: takes a claim about a compressed model, a modifier or a numeric routine; gives a verdict with evidence.

Public names are imported on first use, so that `import harness` and the command line answer without loading torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "validate": "harness.validation.compare",
    "ValidationReport": "harness.validation.compare",
    "Policy": "harness.validation.policy",
    "load_policy": "harness.validation.policy",
    "write_report": "harness.validation.report",
    "check": "harness.checks.run",
    "CheckReport": "harness.checks.report",
    "parametrize_with_catalogue": "harness.checks.parametrize",
    "verify_module": "harness.lifecycle.module_contract",
    "ModuleReport": "harness.lifecycle.module_contract",
    "verify": "harness.lifecycle.verify",
    "VerifyReport": "harness.lifecycle.report",
    "parametrize_with_checks": "harness.lifecycle.parametrize",
    "onnx_roundtrip": "harness.onnx_graph.roundtrip",
    "forced_skips": "harness.onnx_graph.forced_skips",
    "SeparateQKV": "harness.onnx_graph.role_contracts",
    "SameBlockCount": "harness.onnx_graph.role_contracts",
    "RoleWeights": "harness.onnx_graph.role_contracts",
    "ProjectionOp": "harness.onnx_graph.role_contracts",
    "QDQPreserved": "harness.onnx_graph.role_contracts",
    "AllowedDomains": "harness.onnx_graph.node_contracts",
    "NumericEqual": "harness.onnx_graph.node_contracts",
    "ContractViolation": "compressor.errors",
    "CheckRecord": "harness.verdict",
    "Outcome": "harness.verdict",
    "Verdict": "harness.verdict",
    "HarnessError": "compressor.errors",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
