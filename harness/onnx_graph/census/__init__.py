"""Which blocks of a graph mix activations, and where their Q, K and V come from."""

from __future__ import annotations
