"""What all modifiers that quantize by schemes share: their lifecycle, targets, statistics of inputs, KV cache."""

from __future__ import annotations
