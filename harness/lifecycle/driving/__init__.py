"""Driving a modifier through a run beside the oracle, and holding what it did against what it should have done."""

from __future__ import annotations
