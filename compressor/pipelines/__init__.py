"""How calibration data flows through a model: not at all, in whole forwards, or target by target."""

from __future__ import annotations

from compressor.pipelines.registry import PIPELINES, choose_pipeline, run_pipeline
from compressor.pipelines.settings import SequentialSettings

__all__ = ["PIPELINES", "SequentialSettings", "choose_pipeline", "run_pipeline"]
