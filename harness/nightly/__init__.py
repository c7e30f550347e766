"""Regressions over nights: a history of measurements, and what tells a change from noise."""

from __future__ import annotations

from harness.nightly.history import History
from harness.nightly.judge import Judgement, judge

__all__ = ["History", "Judgement", "judge"]
