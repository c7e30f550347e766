"""The report as a page with plots."""

from __future__ import annotations
