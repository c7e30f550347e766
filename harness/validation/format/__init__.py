"""The folder as written: containers, config, schemes, codes, its record."""

from __future__ import annotations
