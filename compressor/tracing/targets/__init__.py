"""What both engines know of targets: which they are, in which order, with which state of a sample."""

from __future__ import annotations
