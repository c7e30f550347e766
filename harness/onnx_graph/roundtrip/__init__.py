"""Exporters and optimizers, one against the other, and who broke what."""

from __future__ import annotations
