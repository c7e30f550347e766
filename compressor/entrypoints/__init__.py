"""What the public functions do: `oneshot` and `trace_model`; read `oneshot.py` first."""

from __future__ import annotations
