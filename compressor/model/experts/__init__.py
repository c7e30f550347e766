"""Fused experts: taken apart for compression, put together again in the file."""

from __future__ import annotations
