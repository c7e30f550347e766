"""A captured step: its plan and guards, its proof, and the first operator that differs."""

from __future__ import annotations
