"""Planted bugs: known-wrong variants of the core, and which checks kill them. A check that kills none proves nothing."""

from __future__ import annotations
