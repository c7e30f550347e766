"""Proof that a compressed checkpoint is what it claims to be: files, format, weights, behaviour."""

from __future__ import annotations
