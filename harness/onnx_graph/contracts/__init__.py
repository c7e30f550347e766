"""What must hold of a graph against the exported one."""

from __future__ import annotations
