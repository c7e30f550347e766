"""Calibration data: any common source becomes one list of batches with masks, and a hash that names it."""

from __future__ import annotations

from compressor.data.collate import Batch, batch_to, call_model
from compressor.data.datasets import CalibrationData, load_dataset_source
from compressor.data.vocabulary import check_vocabulary

__all__ = ["Batch", "CalibrationData", "batch_to", "call_model", "check_vocabulary", "load_dataset_source"]
