"""Regressions over nights: a history of measurements, and what tells a change from noise. Names are imported on first use."""

from __future__ import annotations

from compressor.object_reference import lazy_names

_PUBLIC = {
    "History": "harness.nightly.history",
    "Judgement": "harness.nightly.judging.judgement",
    "judge": "harness.nightly.judging.judge",
}

__all__ = sorted(_PUBLIC)


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
