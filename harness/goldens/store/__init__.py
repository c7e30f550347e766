"""Goldens on disk: names, manifest, tensors, candidates and their acceptance."""

from __future__ import annotations
