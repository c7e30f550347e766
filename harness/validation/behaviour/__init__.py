"""What a compressed model predicts, against its base."""

from __future__ import annotations
