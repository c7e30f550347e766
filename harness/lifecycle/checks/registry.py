"""The table of lifecycle checks: what each states, which number it has in the catalogue, which bugs of others it would have caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compressor.errors import UserInputError
from harness.lifecycle.driving.compare import Violation, describe
from harness.lifecycle.driving.time_limit import TimeLimitError
from harness.lifecycle.driving.torch_settings import while_in_modes
from harness.lifecycle.subject import CannotTellError, NothingToCheckError, Subject
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome

MAIN_THREAD = "only works in main thread"
"""What Python says of `signal.signal` and `signal.set_wakeup_fd` in other threads."""

_FIRST = ("lifecycle.repeatable", "lifecycle.completes")
CheckFunction = Callable[[Subject], str]
"""Looks into a subject and returns what it saw, in one line; a Violation is a failure."""


@dataclass(frozen=True)
class LifecycleCheck:
    """One check.

    Attributes:
        name: dotted, family first.
        title: the statement that is checked, as a sentence.
        function: looks into a subject.
        number: in the catalogue of numeric, lifecycle and artifact checks; None for those that it does not list.
        tags: contract tags that take the check out.
        caught: public bugs that it would have caught.
        in_training: where a modifier has callbacks of a training it looks again in further ones, see `Subject.trainings`.
        in_modes: a calibration is looked at again over the model in its other mode, training or evaluation.
    """

    name: str
    title: str
    function: CheckFunction
    number: int | None = None
    tags: frozenset[str] = frozenset()
    caught: tuple[str, ...] = ()
    in_training: bool = False
    in_modes: bool = False

    @property
    def place(self) -> int:
        """Where it runs: `repeatable` first, whose runs are the first of all, then a whole run, by number, the state machine last."""
        return _FIRST.index(self.name) - len(_FIRST) if self.name in _FIRST else self.number or 99

    @property
    def claim(self) -> Claim:
        """What the records are about."""
        return Claim(self.name, self.title if self.number is None else f"{self.title} (check {self.number})")

    def run(self, subject: Subject) -> CheckRecord:
        """Look into a subject.

        Args:
            subject: what is verified.

        Returns:
            The record; a subject that breaks the check is a failed one.
        """
        excused = sorted(self.tags & subject.tags)
        if excused:
            return self.claim.skipped(f"the modifier declares {excused[0]!r}")
        try:
            summary = self._look(subject)
        except NothingToCheckError as reason:
            return self.claim.skipped(str(reason))
        except CannotTellError as reason:
            return self.claim.record(Outcome.INCONCLUSIVE, str(reason), findings=[str(reason)])
        except Violation as violation:
            return self._failed(violation)
        except TimeLimitError:
            raise
        except BaseException as error:  # noqa: BLE001 - a subject may break anything, and call sys.exit(); what it did is the finding
            if (inner := _violation_in(error)) is not None:
                return self._failed(inner)
            return self._broken(f"the check could not be completed: {describe(error)}{while_in_modes()}", [describe(error)])
        return self.claim.record(Outcome.PASS, summary)

    def _look(self, subject: Subject) -> str:
        seen = [self.function(subject)]
        others = [(str(one), subject.trained(one), one.in_calibration) for one in (subject.trainings() if self.in_training else ())]
        if self.in_modes and not subject.trains:
            others.append((f"in {'evaluation' if subject.model.training else 'training'} mode", subject.in_other_mode(), False))
        for where, while_other, may_refuse in others:
            try:
                with while_other:
                    seen.append(f"{where}: {self.function(subject)}")
            except Violation as violation:
                text = str(violation).removeprefix(f"[{violation.clause}] ")
                raise Violation(violation.clause, f"{where}, {text}", violation.causes) from violation
            except NothingToCheckError as reason:  # of this look; the others were had
                seen.append(f"{where}: {reason}")
            except CannotTellError as reason:
                if not may_refuse:
                    raise
                seen.append(f"{where}: {reason}")
        return "; ".join(seen)

    def _failed(self, violation: Violation) -> CheckRecord:
        return self._broken(str(violation), sorted(violation.causes), _example(violation))

    def _broken(self, text: str, causes: Sequence[str], example: Sequence[str] = ()) -> CheckRecord:
        """A failure, unless it is that of a thread which is not the main one: `oneshot` runs where its caller does."""
        is_of_thread = MAIN_THREAD in text
        text = f"callbacks run in a thread of their own here, to be given up if they hang: {text}" if is_of_thread else text
        outcome = Outcome.INCONCLUSIVE if is_of_thread else Outcome.FAIL
        return self.claim.record(outcome, text, evidence={"causes": list(causes)}, findings=[text, *example])


def _violation_in(error: BaseException) -> Violation | None:
    """What a state machine saw that saw something else, or nothing, when it went the same way again: the subject keeps state outside."""
    found = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((one for one in found if isinstance(one, Violation)), None)


def _example(violation: Violation) -> list[str]:
    """The shortest failing run of a state machine, as Hypothesis notes it on the error."""
    return [line for note in getattr(violation, "__notes__", ()) for line in note.splitlines() if line.startswith(("state", "Draw"))]


CHECKS: dict[str, LifecycleCheck] = {}
"""Every check by its name."""


def register(
    name: str,
    title: str,
    number: int | None = None,
    tags: tuple[str, ...] = (),
    caught: tuple[str, ...] = (),
    in_training: bool = False,
    in_modes: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Return a decorator that puts a function into the table.

    Args:
        name: without the family.
        title: the statement, as a sentence.
        number: in the catalogue.
        tags: contract tags that take the check out.
        caught: public bugs that it would have caught.
        in_training: look again in further trainings, where a modifier has callbacks of one.
        in_modes: look again over the model in its other mode, where it is a calibration.

    Returns:
        The decorator; it gives the function back unchanged.

    Raises:
        UserInputError: another check has the name.
    """

    def put(function: CheckFunction) -> CheckFunction:
        full = f"lifecycle.{name}"
        if full in CHECKS:
            raise UserInputError(f"{full}: another check has this name; choose another")
        CHECKS[full] = LifecycleCheck(full, title, function, number, frozenset(tags), caught, in_training, in_modes)
        return function

    return put
