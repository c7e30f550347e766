"""One record of a check, and the forms in which people and machines read it."""

from __future__ import annotations
