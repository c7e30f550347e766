"""The shortest runs in which a library breaks the contract: `python -m harness.lifecycle.counterexamples`."""

from __future__ import annotations
