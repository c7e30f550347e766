"""The lifecycle contract, proved: an independent model, state machines beside it, and checks of anybody's modifier and module."""

from __future__ import annotations
