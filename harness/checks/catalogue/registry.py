"""The registry: a check is a function over a subject of one kind, with its number, its statement and the bugs that it would have caught.

A new file of checks is a line of MODULES and functions that are decorated with `register`:

    @register(5, "zero", "0 becomes 0 exactly", kind="quantizer", needs=("zero",), caught_by=("some/repo#1",))
    def zero_is_zero(subject: Quantizer, context: CheckContext) -> str:
        ...
        raise CheckFailed("what is wrong")       # a failure
        raise NothingToCheckError("why")    # a skip
        return "what was seen, in one line" # a pass

No torch is needed to read the table; the modules of the checks import it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

from compressor.errors import UserInputError
from compressor.spelling import suggest
from harness.checks.catalogue.kinds import KINDS, SideEffectError
from harness.profiles import PROFILES, Profile
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome

T = TypeVar("T")

# Contract tags: what a subject promises beyond what every subject of its kind must keep. A check runs where its tags are promised.

TAGS: Mapping[str, str] = MappingProxyType(
    {
        # quantizers and solvers
        "odd": "codes of -w are those of w, negated, away from the ends of the range",
        "zero": "0 becomes 0 exactly",
        "half_even": "what lies in the middle between two codes goes to the even one",
        "homogeneous": "2^k times the weight gives 2^k times the values",
        "local": "what shares a scale depends on nothing else",
        "covers": "the range covers every value: nothing is cut off by more than a step",
        "refuses_nonfinite": "NaN or infinity raises an error that names the tensor",
        "per_token": "each row has a scale of its own, computed from that row alone",
        # packers
        "refuses_unfit": "a code that does not fit into its bits raises an error",
        # solvers
        "act_order": "columns are rounded by falling H_ii, equal ones in their own order",
        "rows_apart": "the order of the rows decides nothing: each has scales of its own, or all have one",
        "fixed_scales": "scales come from the weight's range alone, not from a search",
        "searches_scales": "scales are searched, by the loss; `unsearched()` gives the same subject without a search",
        # checkpoints
        "trained": "was trained, too, so that its weights are no longer near the base's",
        # modifiers and transforms
        "data_free": "needs no calibration data",
        "idempotent": "applied to its own result it changes nothing",
        "invariant_fp": "the float output stays what it was",
        "online": "layers whose weight it changes go on to change what they are handed, or give, in hooks; `reload()` brings these back",
        "incoherent": "weights are turned on both sides, so that none of their entries stands out",
        # pruners
        "reads_hessian": "the sizes of inputs count in what goes; what `second_order` says, too",
        # pruners of experts
        "refits": "the last weights of experts that stay are moved so that the layer gives what it gave; nothing else changes",
        "router_weighted": "those experts go whose mean of router weight times size of output is least, in the model as it was",
    }
)

# Every file that registers checks, in the order in which they run: cheap ones first.
MODULES: tuple[str, ...] = (
    "harness.checks.suites.packer",
    "harness.checks.suites.observer",
    "harness.checks.suites.scales",
    "harness.checks.suites.codes",
    "harness.checks.suites.layer",
    "harness.checks.suites.optimality",
    "harness.checks.suites.invariances",
    "harness.checks.suites.sparsifier",
    "harness.checks.suites.transform",
    "harness.checks.suites.experts",
    "harness.checks.suites.calibration",
    "harness.checks.suites.artifact",
)


class CheckFailed(AssertionError):
    """A subject breaks the statement of a check.

    Attributes:
        findings: the single offenders, one line each.
    """

    def __init__(self, message: str, findings: Iterable[str] = ()) -> None:
        """Say what is wrong, in one line, and list the offenders."""
        super().__init__(message)
        self.findings = tuple(findings)


class NothingToCheckError(Exception):
    """The check has nothing to look at in this subject; the message says why."""


@dataclass(frozen=True)
class CheckContext:
    """How closely a check looks.

    Attributes:
        profile: what random draws it may spend.
        draws: whether it draws at all; without, only the fixed inputs are looked at, which takes milliseconds.
        seed: of inputs that are drawn once.
    """

    profile: Profile = PROFILES["pr"]
    draws: bool = True
    seed: int = 0
    _known: dict[tuple[int, str], tuple[object, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, subject: object, what: str, make: Callable[[], T]) -> T:
        """Return something about a subject that all checks of one run share; it is made when it is asked for first.

        Args:
            subject: kept as long as this look, so that no other takes its identity.
            what: names the thing.
            make: an error that it raises is not kept.

        Returns:
            What was made.
        """
        if (id(subject), what) not in self._known:
            self._known[id(subject), what] = (subject, make())
        made: T = self._known[id(subject), what][1]
        return made


CheckFunction = Callable[[Any, CheckContext], str]
"""Looks into a subject and returns what it saw, in one line; CheckFailed is a failure."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: dotted, the kind of its subjects first: `quantizer.zero`.
        title: the statement, as a sentence.
        kind: of its subjects, a key of KINDS.
        function: looks into a subject.
        number: in the catalogue; None for those that it does not list. Statements about several kinds have one check for each.
        needs: contract tags that a subject must promise, else the check is skipped.
        caught_by: public bugs that it would have caught, as repository#issue.
    """

    name: str
    title: str
    kind: str
    function: CheckFunction
    number: int | None = None
    needs: frozenset[str] = frozenset()
    caught_by: tuple[str, ...] = field(default=())

    @property
    def claim(self) -> Claim:
        """What the records are about."""
        return Claim(self.name, self.title if self.number is None else f"{self.title} (check {self.number})")

    def run(self, subject: Any, context: CheckContext) -> CheckRecord:
        """Look into a subject.

        Args:
            subject: of the kind of this check.
            context: how closely.

        Returns:
            The record; a subject that breaks the check, or breaks under it, is a failed one.
        """
        from harness.checks.catalogue.watched import watched
        from harness.lifecycle.process_state import process_kept

        try:
            if missing := sorted(self.needs - frozenset(subject.tags)):
                return self.claim.skipped(f"the subject does not promise {missing[0]!r}")
            with process_kept():
                summary = self.function(context.once(subject, "watched", partial(watched, subject)), context)
        except NothingToCheckError as reason:
            return self.claim.skipped(str(reason))
        except CheckFailed as broken:
            text = str(broken)
            return self.claim.record(Outcome.FAIL, text, findings=[text, *broken.findings])
        except SideEffectError as effect:
            return self.claim.record(Outcome.FAIL, str(effect), evidence={"causes": [effect.cause]}, findings=[str(effect)])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a subject may raise anything, SystemExit too; that it did is the finding
            text = f"the check could not be completed: {described(error)}"
            return self.claim.record(Outcome.FAIL, text, evidence={"causes": [text]}, findings=[text])
        return self.claim.record(Outcome.PASS, summary)


def described(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")


_CHECKS: dict[str, Check] = {}


def register(
    number: int | None, name: str, title: str, *, kind: str, needs: Iterable[str] = (), caught_by: Iterable[str] = ()
) -> Callable[[CheckFunction], CheckFunction]:
    """Return a decorator that puts a function into the catalogue.

    Args:
        number: in the catalogue; None for a statement that it does not list.
        name: without the kind.
        title: the statement, as a sentence.
        kind: of the subjects, a key of KINDS.
        needs: contract tags without which the check does not apply, keys of TAGS.
        caught_by: public bugs that it would have caught, as repository#issue.

    Returns:
        The decorator; it gives the function back unchanged.

    Raises:
        UserInputError: a kind or tag that does not exist, or a name that another check has.
    """
    wanted = frozenset(needs)
    if kind not in KINDS:
        raise UserInputError(f"{name}: there is no kind {kind!r} of subjects; {suggest(kind, KINDS)}")
    unknown = sorted(wanted - TAGS.keys())
    if unknown:
        raise UserInputError(f"{name}: there is no contract tag {unknown[0]!r}; {suggest(unknown[0], TAGS)}")

    def put(function: CheckFunction) -> CheckFunction:
        full = f"{kind}.{name}"
        if full in _CHECKS:
            raise UserInputError(f"{full}: another check has this name; choose another")
        _CHECKS[full] = Check(full, title, kind, function, number, wanted, tuple(caught_by))
        return function

    return put


@cache
def all_checks() -> Mapping[str, Check]:
    """Import every file of checks.

    Returns:
        The checks by name, in the order in which they run.
    """
    for module in MODULES:
        importlib.import_module(module)
    return MappingProxyType(_CHECKS)


def find_checks(wanted: Iterable[str | int] | None, kind: str | None = None) -> list[Check]:
    """Return checks by name or number.

    Args:
        wanted: names such as `quantizer.zero`, or numbers; None for all.
        kind: only those for subjects of this kind.

    Returns:
        The checks, in the order in which they run.

    Raises:
        UserInputError: a name or number that no check of this kind has.
    """
    known = [check for check in all_checks().values() if kind in (None, check.kind)]
    if wanted is None:
        return known
    keys = [str(key) for key in wanted]
    for key in keys:
        if not any(key in (check.name, str(check.number)) for check in known):
            raise UserInputError(f"check: there is no check {key!r} of a {kind or 'subject'}; {suggest(key, [one.name for one in known])}")
    return [check for check in known if check.name in keys or str(check.number) in keys]
