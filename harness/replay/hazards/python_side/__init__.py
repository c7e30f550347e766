"""Hazards of Python: control flow, what the host reads and keeps, settings."""

from __future__ import annotations
