"""Every operator of a captured step broken in turn: is the right one named."""

from __future__ import annotations
