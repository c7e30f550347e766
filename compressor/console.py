"""The console that tables are printed on: rich's, but a closed pipe is an error as everywhere, where rich exits with 1, a verdict here."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """As rich's, but `| head` does not end it with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Let the command end as behind `print` (compressor/standard_output.py)."""
        raise BrokenPipeError
