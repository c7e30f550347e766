"""Calibration and training data: any common source becomes batches with masks, or blocks of one length, and a hash that names it."""

from __future__ import annotations

from compressor.data.blocks import BlockOrder, TokenBlocks, load_blocks
from compressor.data.collate import Batch, batch_to, call_model
from compressor.data.datasets import CalibrationData, load_dataset_source
from compressor.data.encode import check_batches, max_positions
from compressor.data.media import Media
from compressor.data.rows import TEXT_COLUMN, holds_texts, input_columns
from compressor.data.source import open_source

__all__ = [
    "TEXT_COLUMN",
    "Batch",
    "BlockOrder",
    "CalibrationData",
    "Media",
    "TokenBlocks",
    "batch_to",
    "call_model",
    "check_batches",
    "holds_texts",
    "input_columns",
    "load_blocks",
    "load_dataset_source",
    "max_positions",
    "open_source",
]
