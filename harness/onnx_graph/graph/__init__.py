"""A graph as the rest reads it, and as onnxruntime runs it."""

from __future__ import annotations
