"""What the public functions do: `oneshot` and `trace_model`; read `oneshot.py` first."""

from __future__ import annotations

from compressor import look_up

__getattr__ = look_up  # where llm-compressor has them
