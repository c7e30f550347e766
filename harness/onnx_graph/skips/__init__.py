"""Forcing an optimizer to skip passes, in this process and its children."""

from __future__ import annotations
