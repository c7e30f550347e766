"""The one definition of a step, and what belongs to it: batch, optimizer, averages, ranks, state."""

from __future__ import annotations
