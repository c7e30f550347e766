"""The verb `harness onnx`: a file per action."""

from __future__ import annotations
