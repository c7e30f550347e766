"""Which word may have been meant by a misspelt one: every `did you mean` of both packages is asked here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

_READ_AT_A_GLANCE = 8  # words whose own order tells more than their likeness


def nearest(given: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return the words that are most like a given one, whatever their case.

    Args:
        given: the word.
        known: the words that exist.
        count: how many at most.

    Returns:
        Words of `known`, the nearest first; none where none shares enough letters.
    """
    by_lower: dict[str, list[str]] = {}
    for word in known:
        by_lower.setdefault(word.lower(), []).append(word)
    found = difflib.get_close_matches(given.lower(), by_lower, n=count)
    return [word for lower in found for word in by_lower[lower]][:count]


def suggest(given: str, choices: Iterable[str], otherwise: str | None = None, show: Callable[[str], str] = repr) -> str:
    """Return advice for a word that is not among the choices.

    Args:
        given: the word.
        choices: what would be valid.
        otherwise: said where none is near; None for the list of choices, or for leaving the word out where there is no choice.
        show: writes the word.

    Returns:
        `did you mean 'x'?`, or that; a long list with the words first that are most like it.
    """
    choices = list(choices)
    near = nearest(given, choices)
    if near:
        return f"did you mean {show(near[0])}?"
    if otherwise is not None:
        return otherwise
    if len(choices) > _READ_AT_A_GLANCE:
        choices.sort(key=lambda word: _likeness(given.lower(), word.lower()), reverse=True)
    return f"choose from {', '.join(choices)}" if choices else "leave it out"


def _likeness(given: str, word: str) -> tuple[bool, float]:
    """Whether one holds the other, as a shortened name does; then the share of letters that they have in common."""
    return given in word or word in given, difflib.SequenceMatcher(None, given, word).ratio()


def did_you_mean(given: str, choices: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """Return the question alone, for a message that goes on after it.

    Args:
        given: the word that is not among the choices.
        choices: what would be valid.
        show: writes the word.

    Returns:
        `did you mean 'x'? `, or an empty text where none is near.
    """
    question = suggest(given, choices, otherwise="", show=show)
    return f"{question} " if question else ""
