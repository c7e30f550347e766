"""From a folder, or from a config alone, to a model that runs, and inputs for it."""

from __future__ import annotations
