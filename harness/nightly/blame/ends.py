"""Between which commits to search: what the history says of a metric, or of a cell."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.errors import UserInputError
from harness.nightly.blame.repository import Commit, Repository
from harness.nightly.cells import CellOutcome
from harness.nightly.history import History
from harness.nightly.judging.judge import judge
from harness.nightly.judging.shifts import LEAST_AFTER


def find_ends(
    repository: Repository, metric: str, history: History | None, good: str | None = None, bad: str | None = None
) -> tuple[Commit, Commit]:
    """Find the commits to search between.

    Args:
        repository: that has them.
        metric: its name, or that of a cell.
        history: with its nights; None where both ends are given.
        good: a commit that is as it should be, as git takes it; by default one of some nights before the change.
        bad: one that is worse; by default one of some nights after.

    Returns:
        The good commit and the bad one.

    Raises:
        UserInputError: the history shows no change, or names no commits; or a name that was given is none.
    """
    if good is None or bad is None:
        found = _of_history(metric, history) if history is not None else ("", "")
    ends = (
        repository.commit(good, "--good") if good is not None else _noted(repository, found[0], "--good"),
        repository.commit(bad, "--bad") if bad is not None else _noted(repository, found[1], "--bad"),
    )
    if ends[0] == ends[1]:
        raise UserInputError(f"{metric}: both ends are commit {ends[0].revision[:12]}; what changed is no commit, or name --good and --bad")
    return ends


def _noted(repository: Repository, revision: str, flag: str) -> Commit:
    if not revision or revision.endswith("-dirty"):
        told = f"at {revision}, with changes that no commit holds" if revision else "at an unknown commit"
        raise UserInputError(f"{flag}: that night ran {told}; name one")
    return repository.commit(revision, f"{flag}, from the history")


def _of_history(metric: str, history: History) -> tuple[str, str]:
    """Revisions on both sides of a change; a change is placed to within a night or two, so they lie that far from it."""
    outcomes = [(row.revision, CellOutcome(row.outcome) is CellOutcome.PASS) for row in history.cells() if row.cell == metric]
    series = history.series(metric)
    if outcomes:
        return _of_outcomes(metric, outcomes)
    if not series:
        raise UserInputError(f"{metric}: {history.path} knows no metric or cell of that name; name --good and --bad")
    judgement = judge(series, history.acceptances(metric))
    change = next((change for change in judgement.changes if change.acceptance is None), None)
    if change is None:
        raise UserInputError(f"{metric}: no change to blame anybody for: {judgement.summary}; name --good and --bad")
    nights = [one for one in series if one.kind == "paired" or one.environment == series[-1].environment]
    place = next(index for index, one in enumerate(nights) if one.night == change.night)
    return nights[max(0, place - LEAST_AFTER)].revision, nights[min(len(nights) - 1, place + LEAST_AFTER - 1)].revision


def _of_outcomes(metric: str, outcomes: Sequence[tuple[str, bool]]) -> tuple[str, str]:
    if outcomes[-1][1]:
        raise UserInputError(f"{metric}: passed when it last ran; name --good and --bad")
    passed = [place for place, (_, is_pass) in enumerate(outcomes) if is_pass]
    if not passed:
        raise UserInputError(f"{metric}: never passed in this history; name --good, where it did")
    return outcomes[passed[-1]][0], outcomes[passed[-1] + 1][0]
