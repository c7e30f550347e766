"""What the public functions do: `oneshot` and `trace_model`; read `oneshot.py` first."""

from __future__ import annotations

from compressor import look_up
from compressor.entrypoints.oneshot import oneshot as oneshot  # at once: the module of its name would hide it else

__getattr__ = look_up  # where llm-compressor has them
