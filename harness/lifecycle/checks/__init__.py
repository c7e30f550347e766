"""The checks of the lifecycle contract, by what they look for."""

from __future__ import annotations
