"""Watching a step below autograd: operators, storages, and what cannot be repeated."""

from __future__ import annotations
