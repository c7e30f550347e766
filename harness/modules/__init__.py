"""The contract of an nn.Module: copies, hooks, state, tensors."""

from __future__ import annotations
