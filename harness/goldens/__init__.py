"""Fixed data that every measurement starts from, and the scripts that made it."""

from __future__ import annotations
