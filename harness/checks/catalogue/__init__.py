"""The registry of numbered checks, and the verb that lists them."""

from __future__ import annotations
