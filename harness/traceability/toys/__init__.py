"""Small models made to deceive a tracer."""

from __future__ import annotations
