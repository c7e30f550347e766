"""What can be found and what it means: the outcome of one check, the verdict over all of them, and the exit code of every verb.

Verbs that look at other things than checks have words of their own (a contract holds, a block is FUSED, a golden drifted). Each such
enumeration has a property `verdict`, so that what a word means for the caller of a command is said in one place: at the word. A verb
returns a verdict; the command line makes a number of it, by the one table below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Verdict(StrEnum):
    """What all checks together say."""

    PASS = "pass"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"

    @property
    def outcome(self) -> Outcome:
        """The same about one check."""
        return {Verdict.PASS: Outcome.PASS, Verdict.REGRESSION: Outcome.FAIL, Verdict.INCONCLUSIVE: Outcome.INCONCLUSIVE}[self]


class Outcome(StrEnum):
    """What one check found."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    SKIP = "skip"


EXIT_CODES: Mapping[Verdict, int] = {Verdict.PASS: 0, Verdict.REGRESSION: 1, Verdict.INCONCLUSIVE: 2}
"""Of every verb of the harness. A verb that judges nothing and did its work says PASS."""
EXIT_FAILURE = 3
"""The harness itself failed, or was given bad input: there is no verdict."""


def exit_codes(passed: str, regression: str = "", inconclusive: str = "") -> str:
    """Return the sentence of a verb's help that says what its exit codes mean.

    Args:
        passed: what it found or did where the verdict is PASS.
        regression: likewise; empty where the verb never says so.
        inconclusive: likewise.

    Returns:
        The sentence, with the numbers of EXIT_CODES.
    """
    meanings = {Verdict.PASS: passed, Verdict.REGRESSION: regression, Verdict.INCONCLUSIVE: inconclusive}
    told = [f"{EXIT_CODES[verdict]} {meaning}" for verdict, meaning in meanings.items() if meaning]
    return "exit codes: " + "; ".join([*told, f"{EXIT_FAILURE} no verdict: bad input, or a failure of the harness itself"])


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
