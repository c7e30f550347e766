"""What is seen once before a model leaves: every check, held against a policy, on one page, with a statement that can be checked later.

The way of one sign-off: command -> signing (the order of everything) -> candidate (both models) -> files, tokenizer, generation,
invariance, outside (the checks) -> policy (what is required and waived) -> page and statement. Names are imported on first use.
"""

from __future__ import annotations

from compressor.object_reference import lazy_names

_PUBLIC = {
    "ReleasePolicy": "harness.release.policy",
    "load_release_policy": "harness.release.policy",
    "ReleaseReport": "harness.release.report",
    "sign_off": "harness.release.signing",
    "verify_statement": "harness.release.statement",
    "write_release": "harness.release.page",
}

__all__ = sorted(_PUBLIC)


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
