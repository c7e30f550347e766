"""The command `compressor`: a file per verb."""

from __future__ import annotations


def resumed_lines(asked: bool | None, resumed: str | None) -> list[str]:
    """Say where a run began, for `--resume` in scripts that always give it.

    Args:
        asked: whether `--resume` was given.
        resumed: where the run went on; None where it began at the beginning.

    Returns:
        A line, or none where nobody asked.
    """
    if resumed is not None:
        return [resumed]
    return ["nothing of an earlier run was there to resume: begun at the beginning"] if asked else []
