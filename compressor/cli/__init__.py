"""The command `compressor`: a file per verb."""

from __future__ import annotations
