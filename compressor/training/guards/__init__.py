"""What the host must not change between a capture and its replay."""

from __future__ import annotations
