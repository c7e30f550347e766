"""Hypothesis machines over sessions and modifiers."""

from __future__ import annotations
