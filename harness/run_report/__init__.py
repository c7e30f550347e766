"""What a run of the compressor did, on a page: errors, ranges, outliers, time and memory."""

from __future__ import annotations
