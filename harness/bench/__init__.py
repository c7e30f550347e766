"""Ours against peers, as ratios within one run."""

from __future__ import annotations
