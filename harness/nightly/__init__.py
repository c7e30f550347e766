"""Regressions over nights: a history of measurements, and what tells a change from noise."""

from __future__ import annotations

from harness.nightly.history import History
from harness.nightly.judging.judge import judge
from harness.nightly.judging.judgement import Judgement

__all__ = ["History", "Judgement", "judge"]
