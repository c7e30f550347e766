"""What a user may choose, one class a verb: its fields are the keyword arguments in Python and the options of the command line."""

from __future__ import annotations
