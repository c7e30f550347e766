"""What can be found and what it means: the outcome of one check, the verdict over all of them, and the exit code of every verb.

Verbs that look at other things than checks have words of their own (a contract holds, a block is FUSED, a golden drifted). Each such
enumeration has a property `verdict`, so that what a word means for the caller of a command is said in one place: at the word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Outcome(StrEnum):
    """What one check found."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    SKIP = "skip"


class Verdict(StrEnum):
    """What all checks together say."""

    PASS = "pass"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"


EXIT_CODES: Mapping[Verdict, int] = {Verdict.PASS: 0, Verdict.REGRESSION: 1, Verdict.INCONCLUSIVE: 2}
"""Of every verb of the harness. A verb that judges nothing and did its work says PASS."""
EXIT_FAILURE = 3
"""The harness itself failed, or was given bad input: there is no verdict."""
EXIT_INTERRUPTED = 130
"""As shells say it: 128 and the number of SIGINT."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return what several verdicts mean together.

    Args:
        verdicts: of the parts.

    Returns:
        REGRESSION if any part regressed, else INCONCLUSIVE if any part could not tell or if there is none, else PASS.
    """
    found = set(verdicts)
    if Verdict.REGRESSION in found:
        return Verdict.REGRESSION
    return Verdict.PASS if found == {Verdict.PASS} else Verdict.INCONCLUSIVE
