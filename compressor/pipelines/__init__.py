"""How calibration data flows through a model: not at all, in whole forwards, or target by target."""

from __future__ import annotations

from compressor.pipelines.choose import PIPELINES, choose_pipeline, run_pipeline

__all__ = ["PIPELINES", "choose_pipeline", "run_pipeline"]
