"""Repeating what was captured: a tape of operators, or CUDA graphs."""

from __future__ import annotations
