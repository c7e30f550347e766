"""The harness: takes a claim about a compressed model, a modifier or a numeric routine; gives a verdict with evidence.

Public names are imported on first use, so that `import harness` and the command line answer without loading torch.
"""

from __future__ import annotations

from compressor.object_reference import lazy_names

_PUBLIC = {
    "validate": "harness.validation.compare",
    "ValidationReport": "harness.validation.compare",
    "Policy": "harness.validation.policy",
    "load_policy": "harness.validation.policy",
    "write_report": "harness.validation.report.page",
    "check": "harness.checks.run",
    "CheckReport": "harness.checks.run",
    "parametrize_with_catalogue": "harness.checks.parametrize",
    "verify_module": "harness.modules.contract",
    "ModuleReport": "harness.modules.contract",
    "verify": "harness.lifecycle.verify",
    "VerifyReport": "harness.lifecycle.report",
    "parametrize_with_checks": "harness.lifecycle.parametrize",
    "onnx_roundtrip": "harness.onnx_graph.roundtrip.matrix",
    "forced_skips": "harness.onnx_graph.skips.context",
    "SeparateQKV": "harness.onnx_graph.contracts.roles",
    "SameBlockCount": "harness.onnx_graph.contracts.roles",
    "RoleWeights": "harness.onnx_graph.contracts.roles",
    "ProjectionOp": "harness.onnx_graph.contracts.roles",
    "QDQPreserved": "harness.onnx_graph.contracts.roles",
    "AllowedDomains": "harness.onnx_graph.contracts.domains",
    "NumericEqual": "harness.onnx_graph.contracts.numbers",
    "ContractViolation": "harness.errors",
    "CheckRecord": "harness.reporting.record",
    "Outcome": "harness.reporting.record",
    "Verdict": "harness.reporting.record",
    "HarnessError": "harness.errors",
}

__all__ = sorted(_PUBLIC)


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
