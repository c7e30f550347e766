"""What a call did, held against what the oracle says: the callbacks that came, and the error or answer that came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from harness.lifecycle.driving.callback_recorder import Entry
from harness.lifecycle.oracle import CallFailed, Expected, Refused, Script

Clause = Literal["accepted", "refused", "callbacks", "flags", "errors", "unchanged", "hooks", "modules", "left behind", "state"]
CLAUSES: tuple[Clause, ...] = get_args(Clause)


class Violation(AssertionError):
    """Something that the contract forbids has happened.

    Attributes:
        clause: the part of the contract; see CLAUSES.
        causes: what lies behind it, so that two checks that met the same are told once.
    """

    def __init__(self, clause: Clause, message: str, causes: Iterable[object] = ()) -> None:
        """Name the clause and say what happened; what was seen is its own cause where none is given."""
        super().__init__(f"[{clause}] {message}")
        self.clause = clause
        self.causes = frozenset(map(str, causes)) or frozenset({message.split("): ", 1)[-1]})


@dataclass(frozen=True)
class CallResult:
    """What the oracle says of a call after it was told what its callbacks did.

    Attributes:
        kind: done, refused, or failed in a callback.
        answer: of a call that was done.
        culprits: the modifiers whose callbacks failed.
        together: their errors come as a group.
        interrupted: the failure was an interrupt.
    """

    kind: Literal["done", "refused", "failed"]
    answer: bool = True
    culprits: tuple[int, ...] = ()
    together: bool = False
    interrupted: bool = False


def replay(call: str, script: Script, entries: Sequence[Entry]) -> CallResult:
    """Tell the oracle what the callbacks of a call did, and have it say what should have come.

    Args:
        call: the call in words, for messages.
        script: the oracle's side of the call.
        entries: the callbacks that came, in order.

    Returns:
        What the oracle makes of it.

    Raises:
        Violation: a callback did not come, or another one came.
    """
    left = list(entries)
    try:
        expected = next(script)
        while True:
            if not left or left[0].seen != expected:
                came = show(left[0].seen) if left else "nothing"
                raise Violation(
                    "callbacks", f"{call}: {show(expected)} should have come next, {came} came", [f"{expected.callback} is missing"]
                )
            expected = script.send(left.pop(0).deed)
    except StopIteration as stop:
        outcome = CallResult("done", answer=bool(stop.value))
    except Refused:
        outcome = CallResult("refused")
    except CallFailed as failed:
        outcome = CallResult("failed", False, failed.culprits, failed.together, failed.interrupted)
    if left:
        more = left[0].seen
        raise Violation("callbacks", f"{call}: {show(more)} came, where no callback may come any more", [f"{more.callback} is too many"])
    return outcome


def judge_error(call: str, outcome: CallResult, entries: Sequence[Entry], error: BaseException | None, answer: object) -> None:
    """Hold what came out of a call against the oracle's outcome.

    Args:
        call: the call in words, for messages.
        outcome: what the oracle says.
        entries: the callbacks that came.
        error: what the call raised.
        answer: what it returned; None where it answers nothing.

    Raises:
        Violation: the wrong error, no error, or an error that should not be.
    """
    if outcome.kind == "done":
        if error is not None:
            raise Violation("refused", f"{call} is legal, and raised {describe(error)}", [describe(error)]) from error
        if isinstance(answer, bool) and answer is not outcome.answer:
            raise Violation("errors", f"{call} returned {answer}, where {outcome.answer} is due")
    elif outcome.kind == "refused":
        if error is None:
            raise Violation("accepted", f"{call} is illegal here, and was accepted")
        if not isinstance(error, RuntimeError):
            raise Violation("errors", f"{call} is illegal here, and raised {describe(error)} in place of a RuntimeError") from error
    elif error is None:
        raise Violation("errors", f"{call} went on as if nothing had happened, after {failures(outcome, entries)}")
    elif outcome.together:
        _judge_group(call, outcome, entries, error)
    else:
        _judge_failure(call, outcome.culprits, entries, error)


def _judge_group(call: str, outcome: CallResult, entries: Sequence[Entry], error: BaseException) -> None:
    if not isinstance(error, ExceptionGroup):
        raise Violation("errors", f"{call}: {failures(outcome, entries)}, and {describe(error)} came out in place of an ExceptionGroup")
    if len(error.exceptions) != len(outcome.culprits):
        raise Violation("errors", f"{call}: {failures(outcome, entries)}, and the group holds {len(error.exceptions)} errors")
    for culprit, one in zip(outcome.culprits, error.exceptions, strict=True):
        _judge_failure(call, (culprit,), entries, one)


def _judge_failure(call: str, culprits: Sequence[int], entries: Sequence[Entry], error: BaseException) -> None:
    own = [entry for entry in entries if entry.seen.modifier in culprits]
    raised = next((entry.error for entry in own if entry.error is not None), None)
    if raised is not None:
        if error is not raised:
            raise Violation("errors", f"{call}: a callback raised {describe(raised)}, and {describe(error)} came out")
    elif not isinstance(error, RuntimeError):
        raise Violation("errors", f"{call}: {describe(error)} came out in place of a RuntimeError")


def failures(outcome: CallResult, entries: Sequence[Entry]) -> str:
    """Return which callbacks failed, and how, in words."""
    parts = []
    for entry in entries:
        if entry.seen.modifier in outcome.culprits and (entry.error is not None or entry.seen.event is None):
            end = f"raised {describe(entry.error)}" if entry.error is not None else f"returned {_answer(entry.deed.answer)}"
            parts.append(f"{show(entry.seen)} {end}")
    return " and ".join(parts) or "a failure"


def _answer(answer: object) -> str:
    return str(answer) if isinstance(answer, bool) else f"{answer!r}, where True is due, or False"


def failures_in(entries: Sequence[Entry]) -> list[str]:
    """Return what callbacks raised, or answered in place of True, in words."""
    return [
        describe(entry.error) if entry.error is not None else f"{entry.seen.callback} returned {entry.deed.answer!r}"
        for entry in entries
        if entry.error is not None or (entry.seen.event is None and entry.deed.answer is not True)
    ]


def show(expected: Expected) -> str:
    """Return a callback in words."""
    text = f"{expected.callback} of modifier {expected.modifier}"
    if expected.event is None:
        return text
    event = expected.event
    extras = " with a loss" if event.has_loss else f" of {', '.join(event.modules)}" if event.modules else ""
    return f"{text} ({event.type} at index {event.index:g}, step {event.step}{extras})"


def describe(error: BaseException | None) -> str:
    """Return an error in one line."""
    if error is None:
        return "nothing"
    text = str(error).split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
