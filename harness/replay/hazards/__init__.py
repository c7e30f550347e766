"""Training steps that break replay elsewhere: a table, run in every mode."""

from __future__ import annotations
