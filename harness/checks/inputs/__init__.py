"""What suites show to a subject, and how they look at what it does."""

from __future__ import annotations
