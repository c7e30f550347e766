"""Traceability: is the data flow that the tracing engines follow the model's own, on many architectures and on toys made to deceive."""

from __future__ import annotations
