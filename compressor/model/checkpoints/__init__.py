"""Compressed model -> folder, and folder -> compressed model."""

from __future__ import annotations
