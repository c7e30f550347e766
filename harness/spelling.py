"""Words of others in our lines: what a misspelt one may have meant, and what is left of a text without colours and line breaks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NEAR = 0.7
"""Share of letters that two words must have in common; `nopass` and `nop` have less."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Ask for the word that was meant.

    Args:
        word: as it was given.
        known: the words that exist.

    Returns:
        `did you mean 'X'? `, or an empty text where no word is near.
    """
    plain = {_plain(one): one for one in sorted(known)}
    near = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=_NEAR)
    return f"did you mean {plain[near[0]]!r}? " if near else ""


def _plain(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())


def plain_text(text: str) -> str:
    """Put a text of another library on one line, without the escape sequences that colour a terminal.

    Args:
        text: any.

    Returns:
        Its words.
    """
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split())
