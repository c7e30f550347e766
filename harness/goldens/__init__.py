"""Golden outputs: what was accepted once is held against what comes out today; and the fixed data that every measurement starts from.

golden.py      what a test sees: `golden.check(...)`
store/         names, manifest, tensors as bytes, candidates of failed checks, and their acceptance
command.py     `harness golden diff | accept | prune | why | rename | list`
"""

from __future__ import annotations
