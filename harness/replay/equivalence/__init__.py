"""One step in eager, capture and replay, compared bit for bit."""

from __future__ import annotations
