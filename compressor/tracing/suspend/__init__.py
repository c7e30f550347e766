"""The engine that pauses the forward at each target, one thread of control per sample."""

from __future__ import annotations
