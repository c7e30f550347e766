"""Command lines that a file of the user names: words for one program, which no shell reads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

_OPERATORS = "&|;<>"


def check_command(name: str, line: str, places: Collection[str]) -> None:
    """Refuse a command line that could not do what it says.

    Args:
        name: of the command in its file.
        line: words, quoted as for a shell, with `{place}` for what is filled in.
        places: that are filled in.

    Raises:
        ValueError: it is empty or not closed, names another place, or has an operator of a shell outside of quotes, which would be an
            argument of the first program and leave the exit code to that one.
    """
    unknown = sorted(set(re.findall(r"\{(\w*)\}", line)) - set(places))
    if unknown:
        raise ValueError(f"{{{unknown[0]}}} in {name} is no place; places are {', '.join(f'{{{one}}}' for one in places)}")
    if not shlex.split(line):
        raise ValueError(f"{name} is empty")
    words = shlex.shlex(line, posix=False, punctuation_chars=_OPERATORS)
    words.whitespace_split, words.commenters = True, ""
    if operator := next((word for word in words if set(word) <= set(_OPERATORS)), None):
        raise ValueError(f"{name} has {operator}, and no shell reads a command; write bash -c '...' around it")
