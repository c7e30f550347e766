"""Proof that a compressed checkpoint is what it claims to be: files, format, weights, behaviour.

The way of one validation: command -> compare.validate -> subject (both folders, which weights are quantized) -> files, record,
acceptance (what the folder holds and who accepts it) -> inspection and weights (decoded by `decoder`) -> scoring, metrics, intervals,
quality (behaviour) -> report, page, plots. Names are imported on first use, so that the command line answers without loading torch.
"""

from __future__ import annotations

from compressor.object_reference import lazy_names

_PUBLIC = {
    "validate": "harness.validation.compare",
    "ValidationReport": "harness.validation.compare",
    "Policy": "harness.validation.policy",
    "load_policy": "harness.validation.policy",
    "write_report": "harness.validation.report.page",
}

__all__ = sorted(_PUBLIC)


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
