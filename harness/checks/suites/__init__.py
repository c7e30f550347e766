"""The checks, a file per kind of subject."""

from __future__ import annotations
