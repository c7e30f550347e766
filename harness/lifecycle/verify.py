"""One line for anybody's modifier: `verify(MyModifier)` gives a report.

No base class and no test file of the harness is needed. What the contract asks of a modifier that has good reasons to differ is taken
out by contract tags (see TAGS in `template.py`); a check that fails today is listed in `expected_failures` with its reason, and must fail.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from compressor.errors import CompressorError, UserInputError
from compressor.lifecycle import Modifier, Session
from compressor.spelling import suggest
from harness.lifecycle.checks import hooks, leftovers, machine, order, recipe, watching
from harness.lifecycle.checks.registry import CHECKS, LifecycleCheck
from harness.lifecycle.driving.class_values import class_values_kept
from harness.lifecycle.driving.compare import describe
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.lifecycle.driving.time_limit import TIME_LIMIT, Stopwatch, TimeLimitError, run_limited
from harness.lifecycle.forwards import Batch, call
from harness.lifecycle.process_state import process_kept
from harness.lifecycle.report import USABLE, VerifyReport
from harness.lifecycle.subject import Subject
from harness.lifecycle.template import UnusableError, make_template, read_tags
from harness.profiles import PROFILES, active_profile
from harness.reporting.expected import Expected, expect, known_failures, reasons_for
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome

_USABLE = Claim(USABLE, "It is a modifier, and a fresh one can be made")
_REGISTERED = (order, hooks, watching, leftovers, recipe, machine)


def verify(
    modifier: object,
    model: nn.Module | None = None,
    *,
    inputs: Sequence[Batch] | None = None,
    tags: Iterable[str] = (),
    refusals: Iterable[type[Exception]] = (),
    expected_failures: Expected = None,
    checks: Collection[str | int] | None = None,
    profile: str | None = None,
    time_limit: float = TIME_LIMIT,
    session_class: type[Session] = Session,
) -> VerifyReport:
    """Hold a modifier against the lifecycle contract.

    Args:
        modifier: a fresh modifier, or a class that needs no arguments.
        model: to work on; by default a tiny language model. It is copied, never changed.
        inputs: batches for `model`: a tensor, a tuple of positional or a dict of keyword arguments each.
        tags: contract tags, on top of those in the class attribute `contract_tags`.
        refusals: exceptions with which the modifier's own code may turn down what it is asked; those of this library are always allowed.
        expected_failures: reason by name or number of a check that fails today; one that passes all the same is a failure.
        checks: names or numbers of the checks to run; by default all.
        profile: dev, change, pr or nightly; by default that of --harness-profile, else pr, which repeats exactly.
        time_limit: seconds that one call of the lifecycle may take before it counts as hanging; what other processes take of the
            processor meanwhile does not count.
        session_class: the session to drive it with.

    Returns:
        The report; a bad modifier never raises. Whatever its code raises is a finding, SystemExit too.

    Raises:
        UserInputError: a check, tag or profile that does not exist, a check that is expected to fail and does not run, or
            a model without inputs that it runs.

    Example:
        >>> from compressor import QuantizationModifier
        >>> report = verify(QuantizationModifier(scheme="W8A16"), checks=["lifecycle.completes"])
        >>> report.verdict.value
        'pass'
    """
    chosen = chosen_checks(checks)
    expected = reasons_for(expected_failures, modifier)
    chosen_checks(expected)
    reasons = known_failures(expected, chosen)
    if profile is not None and profile not in PROFILES:
        raise UserInputError(f"verify: profile={profile!r} does not exist; {suggest(profile, PROFILES)}")
    if model is not None:
        _require_batches(model, inputs)
    spent = PROFILES[profile] if profile else active_profile()
    stopwatch = Stopwatch(time_limit)
    try:
        template = _template_of(modifier, stopwatch)
        all_tags = read_tags(template, tags)
    except (UnusableError, TimeLimitError) as reason:
        return unusable_report(label_of(modifier), spent.name, reason)
    subject = Subject(
        template,
        model if model is not None else TinyModel(),
        inputs if inputs is not None else tiny_batches(),
        all_tags,
        (CompressorError, *refusals),
        session_class,
        model is None,
        spent,
        stopwatch,
        make=modifier if isinstance(modifier, type) else None,
    )
    with process_kept(subject.model.modules()):
        records = _run_all(chosen, subject)
    usable = _USABLE.record(Outcome.PASS, f"{type(template).__qualname__} of {type(template).__module__}")
    return VerifyReport(label_of(template), spent.name, (usable, *(expect(record, reasons) for record in records)))


def _require_batches(model: nn.Module, inputs: object) -> None:
    """Refuse what the model cannot run before it is taken for a fault of the modifier."""
    if inputs is None:
        raise UserInputError("verify: a model was given without inputs; give inputs=[...], one batch or more")
    if not isinstance(inputs, Sequence) or not inputs or not all(isinstance(batch, Tensor | tuple | dict) for batch in inputs):
        kind = f"{type(inputs).__name__}{' of ' + type(inputs[0]).__name__ if isinstance(inputs, Sequence) and inputs else ''}"
        raise UserInputError(f"verify: inputs is a {kind}, no list of tensors, tuples or dicts; give inputs=[...], one batch or more")
    for number, batch in enumerate(inputs):
        with process_kept(model.modules()), torch.no_grad():
            try:
                taken = copy.deepcopy(model)
            except Exception as error:  # as those of classes and tensors that say how they are copied
                text = f"verify: the model cannot be copied ({describe(error)}), and every check takes a copy of it"
                raise UserInputError(f"{text}; give one that copy.deepcopy takes") from error
            try:
                call(taken, copy.deepcopy(batch))
            except Exception as error:  # a model raises what it likes
                raise UserInputError(
                    f"verify: the model does not run inputs[{number}] ({describe(error)}); give batches that it takes"
                ) from error


def _run_all(chosen: Sequence[LifecycleCheck], subject: Subject) -> list[CheckRecord]:
    records = []
    hanging = ""
    for check in chosen:
        if hanging:
            records.append(check.claim.skipped(f"the run has ended: {hanging}"))
            continue
        try:
            records.append(run_limited(partial(_run_alone, check, subject), subject.stopwatch, subject.running))
        except TimeLimitError as reason:
            hanging = str(reason)
            records.append(check.claim.record(Outcome.FAIL, hanging, limit=f"{subject.stopwatch.limit:g} s", findings=[hanging]))
    return records


def _run_alone(check: LifecycleCheck, subject: Subject) -> CheckRecord:
    """Run a check so that the next one meets the process as this one has met it."""
    with process_kept(subject.model.modules()), class_values_kept(subject.template):
        return check.run(subject)


def _template_of(modifier: object, stopwatch: Stopwatch) -> Modifier:
    """A fresh modifier; whatever its own code raises on the way is a reason why there is none."""
    try:
        return run_limited(lambda: make_template(modifier), stopwatch)
    except (UnusableError, TimeLimitError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UnusableError(f"{label_of(modifier)} raised {describe(error)} when it was looked at", is_fault=True) from error


def unusable_report(label: str, profile: str, reason: BaseException) -> VerifyReport:
    """Return the report of a modifier that cannot be made.

    Args:
        label: its name.
        profile: name of the profile.
        reason: why it cannot.

    Returns:
        One record.
    """
    return VerifyReport(label, profile, (_unusable(reason),))


def _unusable(reason: BaseException) -> CheckRecord:
    is_fault = not isinstance(reason, UnusableError) or reason.is_fault
    text = str(reason) if isinstance(reason, UnusableError) else f"its constructor: {reason}"
    return _USABLE.record(Outcome.FAIL if is_fault else Outcome.INCONCLUSIVE, text, findings=[text])


def chosen_checks(names: Iterable[str | int] | None) -> list[LifecycleCheck]:
    """Return checks by their names or numbers, all for None, in the order in which they run.

    Args:
        names: of checks.

    Returns:
        The checks.

    Raises:
        UserInputError: a name or number that no check has.
    """
    numbers = {str(check.number) for check in CHECKS.values() if check.number is not None}
    wanted = list(CHECKS) if names is None else [str(name) for name in names]
    unknown = [name for name in wanted if name not in CHECKS and name not in numbers and name != USABLE]
    if unknown:
        raise UserInputError(f"verify: there is no check {unknown[0]!r}; {suggest(unknown[0], CHECKS)}")
    return sorted((check for name, check in CHECKS.items() if name in wanted or str(check.number) in wanted), key=lambda check: check.place)


def label_of(modifier: object) -> str:
    """Return the name of a modifier, or of a class, in reports."""
    return modifier.__qualname__ if isinstance(modifier, type) else type(modifier).__qualname__
