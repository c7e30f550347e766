"""How calibration data flows through a model: not at all, in whole forwards, or target by target."""

from __future__ import annotations

from compressor.pipelines.registry import NOT_BY_LAYERS, PIPELINES, choose_pipeline, pipeline_that_runs, run_pipeline
from compressor.pipelines.settings import SequentialSettings

__all__ = ["NOT_BY_LAYERS", "PIPELINES", "SequentialSettings", "choose_pipeline", "pipeline_that_runs", "run_pipeline"]
