"""What is left of a text of another library without its colours and line breaks."""

from __future__ import annotations

import re


def plain_text(text: str) -> str:
    """Put a text of another library on one line, without the escape sequences that colour a terminal.

    Args:
        text: any.

    Returns:
        Its words.
    """
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split())
