"""`harness.check(subject)`: every check of the catalogue that fits the subject's kind and tags, and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from compressor.errors import UserInputError
from compressor.object_reference import resolve
from compressor.spelling import suggest
from harness.checks.catalogue.kinds import KINDS
from harness.checks.catalogue.registry import TAGS, CheckContext, described, find_checks
from harness.profiles import PROFILES, active_profile
from harness.reporting.expected import Expected, expect, known_failures, reasons_for
from harness.reporting.record import Claim
from harness.reporting.subject_report import SubjectReport
from harness.reporting.verdict import Outcome

# The report of `harness.check`: a record per check of one subject, as text, JSON and JUnit.


@dataclass(frozen=True)
class CheckReport(SubjectReport):
    """What all checks say of one subject.

    Attributes:
        kind: of the subject.
        tags: what it promises.
    """

    kind: str = ""
    tags: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {**super().to_dict(), "kind": self.kind, "tags": list(self.tags)}


T = TypeVar("T")

USABLE = Claim("check.usable", "It can be made, and shows what its protocol asks for")
"""The record of a subject whose own code fails before any check of it could begin."""


class UnusableSubjectError(Exception):
    """The subject's own code failed before any check of it could begin; the message says where and how."""


# From the objects that people have to subjects of the catalogue.


def adapt(subject: object) -> Any:
    """Return a subject of the catalogue.

    Args:
        subject: one already, or an object of a library that we know.

    Returns:
        An object with `kind`, `name`, `tags` and what the protocol of its kind asks.

    Raises:
        UserInputError: it is neither.
        UnusableSubjectError: its constructor, or one of its properties, raised.
    """
    if isinstance(subject, type):
        return adapt(_made(subject))
    kind = _read(f"{type(subject).__qualname__}.kind", lambda: getattr(subject, "kind", None))
    if isinstance(kind, str) and kind in KINDS:
        _check_members(subject, kind)
        return subject
    for path, adapter in _ADAPTERS.items():
        if any(f"{cls.__module__}.{cls.__qualname__}" == path for cls in type(subject).__mro__):
            return resolve(adapter, "adapter").value(subject)
    known = ", ".join(f"{kind} ({protocol})" for kind, protocol in KINDS.items())
    raise UserInputError(
        f"check: {type(subject).__name__} is nothing that can be checked; give it a `kind`, one of {known}, and the members of that "
        "protocol in harness.checks.protocols"
    )


# Class -> the function or class that makes a subject of its objects.
_ADAPTERS = {
    "compressor.numerics.scheme.QuantizationArgs": "harness.checks.adapters.ours:OurQuantizer",
    "compressor.numerics.scheme.QuantizationScheme": "harness.checks.adapters.ours:OurLayer",
    "compressed_tensors.quantization.quant_args.QuantizationArgs": "harness.checks.adapters.compressed_tensors:ForeignQuantizer",
}


def _made(cls: type) -> object:
    try:
        return cls()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, TypeError) and error.__traceback__ and error.__traceback__.tb_next is None:  # of the call, not from within
            raise UserInputError(f"check: {cls.__qualname__} cannot be made without arguments ({error}); give an object of it") from error
        raise UnusableSubjectError(f"{cls.__qualname__}() raised {described(error)}") from error


def _read(what: str, read: Callable[[], T]) -> T:
    """Run code of the subject, be it a property; whatever it raises is the subject's, but for an interrupt, which ends the run."""
    try:
        return read()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UnusableSubjectError(f"{what} raised {described(error)}") from error


def _check_members(subject: object, kind: str) -> None:
    """Refuse a subject that lacks what its protocol asks."""
    from harness.checks import protocols

    wanted = protocols.members(getattr(protocols, KINDS[kind]))
    missing = [name for name in wanted if not _read(f"{type(subject).__qualname__}.{name}", partial(hasattr, subject, name))]
    if missing:
        raise UserInputError(
            f"check: {type(subject).__name__} is a {kind} without {', '.join(missing)}; see harness.checks.protocols.{KINDS[kind]}"
        )
    _check_declared(subject, wanted)


def _check_declared(subject: object, members: Iterable[str]) -> None:
    """Refuse words that nothing knows, and lists of nothing: no check could be made of them."""
    from harness.checks.oracles import LAYOUTS, RULES

    label, known = type(subject).__qualname__, {"layout": LAYOUTS, "scale_rule": RULES}
    for name in members:
        value = _read(f"{label}.{name}", partial(getattr, subject, name))
        if name in known and value is not None and value not in list(known[name]):
            raise UserInputError(f"check: {label}.{name} is {value!r}, which is none that is known; {suggest(str(value), known[name])}")
        if name == "sparsity" and not (isinstance(value, Real) and 0 < float(value) < 1):
            raise UserInputError(f"check: {label}.sparsity is {value!r}, where there is nothing to choose; give a share between 0 and 1")
        if name in ("code_values", "dtypes", "ranks", "architectures") and isinstance(value, Sized) and not len(value):
            raise UserInputError(f"check: {label}.{name} is empty; name at least one")


def check(
    subject: object,
    *,
    checks: Iterable[str | int] | None = None,
    expected_failures: Expected = None,
    profile: str | None = None,
    draws: bool = True,
    seed: int = 0,
) -> CheckReport:
    """Hold a quantizer, packer, solver, transform, layer or observer against the catalogue.

    Args:
        subject: offers one of the protocols of `harness.checks.protocols`, or is something that `harness.checks.run` knows: a
            QuantizationArgs or QuantizationScheme, ours or compressed-tensors'.
        checks: names or numbers of the checks to run; by default all that fit the kind of the subject.
        expected_failures: reason by name or number of a check that fails today; one that passes all the same is a failure.
        profile: dev, change, pr, nightly or release; by default that of --harness-profile, else pr, which repeats exactly.
        draws: False leaves the random inputs out and looks at the fixed ones only.
        seed: of inputs that are drawn once.

    Returns:
        The report; a bad subject never raises. Whatever its code raises is a finding, SystemExit too; KeyboardInterrupt ends the run.

    Raises:
        UserInputError: nothing of this kind can be checked, a check, tag or profile does not exist, or a check is
            expected to fail and does not run.

    Example:
        >>> from compressor.numerics import QuantizationArgs
        >>> check(QuantizationArgs(num_bits=4, group_size=32), checks=[1, 5], draws=False).verdict.value
        'pass'
    """
    if profile is not None and profile not in PROFILES:
        raise UserInputError(f"check: profile={profile!r} does not exist; {suggest(profile, PROFILES)}")
    context = CheckContext(PROFILES[profile] if profile else active_profile(), draws, seed)
    try:
        adapted = adapt(subject)
        name, kind, tags = labels(adapted)
    except UnusableSubjectError as error:
        return CheckReport(label_of(subject), context.profile.name, (USABLE.record(Outcome.FAIL, str(error), findings=[str(error)]),))
    chosen = find_checks(checks, kind)
    expected = reasons_for(expected_failures, subject)
    find_checks(expected, kind)
    reasons = known_failures(expected, chosen)
    records = tuple(expect(one.run(adapted, context), reasons) for one in chosen)
    return CheckReport(name, context.profile.name, records, kind, tags)


def label_of(subject: object) -> str:
    """Return the name of the class of a subject that cannot be asked for its own."""
    return subject.__qualname__ if isinstance(subject, type) else type(subject).__qualname__


def labels(adapted: Any) -> tuple[str, str, tuple[str, ...]]:
    """Read name, kind and tags of a subject.

    Args:
        adapted: what `adapt` gave.

    Returns:
        Each of them.

    Raises:
        UserInputError: the tags are none.
    """
    label = label_of(adapted)
    name = _read(f"{label}.name", lambda: str(adapted.name))
    kind = _read(f"{label}.kind", lambda: adapted.kind)
    tags = _read(f"{label}.tags", lambda: adapted.tags)
    if not isinstance(tags, set | frozenset | list | tuple) or not all(isinstance(tag, str) for tag in tags):
        raise UserInputError(f"{name}: {tags!r} is no set of contract tags; give one such as {{'zero'}}, with names of {', '.join(TAGS)}")
    if unknown := sorted(set(tags) - TAGS.keys()):
        raise UserInputError(f"{name}: {unknown[0]!r} is no contract tag; {suggest(unknown[0], list(TAGS))}")
    return name, kind, tuple(sorted(tags))
