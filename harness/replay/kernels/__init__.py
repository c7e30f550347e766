"""One operator of a captured step exchanged: error, growth of the error, time."""

from __future__ import annotations
