"""Libraries as subjects: ours, compressed-tensors, torchao."""

from __future__ import annotations
