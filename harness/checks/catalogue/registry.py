"""The registry: a check is a function over a subject of one kind, with its number, its statement and the bugs that it would have caught.

A new file of checks is a line of MODULES and functions that are decorated with `register`:

    @register(5, "zero", "0 becomes 0 exactly", kind="quantizer", needs=("zero",), caught_by=("some/repo#1",))
    def zero_is_zero(subject: Quantizer, look: Look) -> str:
        ...
        raise Broken("what is wrong")       # a failure
        raise NothingToCheckError("why")    # a skip
        return "what was seen, in one line" # a pass

No torch is needed to read the table; the modules of the checks import it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from compressor.errors import UserInputError
from harness.checks import protocols
from harness.lifecycle.driving.snapshot import Difference, Snapshot, freeze
from harness.lifecycle.process_state import ModulesMayDraw
from harness.profiles import PROFILES, Profile
from harness.reporting.record import CheckRecord, Claim, Outcome

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
        "act_order": "columns are rounded in the order of their activation",
        "rows_apart": "the order of the rows decides nothing: each has scales of its own, or all have one",
        "fixed_scales": "scales come from the weight's range alone, not from a search",
        "searches_scales": "scales are searched, by the loss; `unsearched()` gives the same subject without a search",
        # checkpoints
        "trained": "was trained, too, so that its weights are no longer near the base's",
        # modifiers and transforms
        "data_free": "needs no calibration data",
        "idempotent": "applied to its own result it changes nothing",
        "invariant_fp": "the float output stays what it was",
    }
)

# A subject under watch: whatever a call changes beside its result is told, in every check and with one cause.
#
# A call may change nothing that it was given, nothing that an earlier call has returned, and nothing of the process: no random number is
# drawn but for the first weights of modules that are made, no hook is left, no setting of torch is moved. A transform changes the weights
# of its model, and nothing else of it.

# What a method may change of a module that it is given, and what it is that may; by default nothing.
_MAY_CHANGE: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("transform", "apply"): ("module", "tensor", "attribute"),
    ("layer", "weight"): ("attribute", "tensor"),  # what it has unpacked it may keep
    ("layer", "expected_input"): ("attribute", "tensor"),
}
# These run models or are run in other processes: what they change is looked at by checks of their own.
_UNWATCHED = frozenset({"calibration", "artifact"})
_MAKES_MODULES = frozenset({"build", "apply"})


def watched(subject: Any) -> Any:
    """Return the subject with its methods watched.

    Args:
        subject: of a kind of the catalogue.

    Returns:
        Something with the same members.
    """
    kind = getattr(subject, "kind", None)
    return subject if isinstance(subject, Watched) or kind not in KINDS or kind in _UNWATCHED else Watched(subject)


class Watched:
    """A subject whose methods are watched; all else is the subject's own."""

    def __init__(self, subject: Any) -> None:
        """Nothing has been called yet."""
        self._subject = subject
        self._protocol = getattr(protocols, KINDS[subject.kind])
        self._results: dict[str, tuple[object, object]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return the subject's attribute, watched where it is a method of the protocol."""
        value = getattr(self._subject, name)
        is_method = inspect.isfunction(getattr(self._protocol, name, None))
        return partial(self._call, name, value) if is_method else value

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = [key for key in inspect.signature(getattr(self._protocol, name)).parameters if key != "self"]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        before, results = _look(given), {key: freeze(value) for key, (value, _) in self._results.items()}
        around = Snapshot.of_surroundings()
        try:
            with ModulesMayDraw() if name in _MAKES_MODULES else nullcontext():
                result = method(*args, **kwargs)
        finally:
            # Whoever refuses what it was given leaves it as it was, too.
            self._refuse(name, around.differences(Snapshot.of_surroundings(), ("threads",)), before, given, results)
        if isinstance(getattr(result, "kind", None), str):
            return watched(result)
        if not isinstance(result, nn.Module):
            self._results[name] = result, None
        return result

    def _refuse(
        self,
        name: str,
        process: Sequence[Difference],
        before: Mapping[str, object],
        given: Mapping[str, Any],
        results: Mapping[str, object],
    ) -> None:
        may = _MAY_CHANGE.get((self._subject.kind, name), ())
        for key, value in _look(given).items():
            was = before[key]
            if isinstance(was, Snapshot) and isinstance(value, Snapshot):
                inside = [one for one in was.differences(value, (*may, *_AROUND)) if "appeared" not in one.text or one.kind == "hooks"]
                if inside:
                    raise SideEffectError(f"{name}() has changed the {key} that it was given: {inside[0]}", f"{key} {inside[0].kind}")
            elif was != value:
                raise SideEffectError(f"{name}() has changed the {key} that it was given", key)
        if process:
            raise SideEffectError(f"{name}() has changed something of the process: {process[0]}", str(process[0]))
        for key, value in results.items():
            if freeze(self._results[key][0]) != value:
                raise SideEffectError(f"{name}() has changed what {key}() returned before; give each call memory of its own", f"{key}()")


_AROUND = ("rng", "torch", "threads", "class")


def _look(given: Mapping[str, Any]) -> dict[str, object]:
    return {key: Snapshot(value) if isinstance(value, nn.Module) else freeze(value) for key, value in given.items() if _is_held(value)}


def _is_held(value: object) -> bool:
    """Lists, tensors and modules; other sequences may make their items as they are asked for."""
    return isinstance(value, list | tuple | Tensor | nn.Module | protocols.Quantized)


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
    "harness.checks.suites.calibration",
    "harness.checks.suites.artifact",
)

# Kinds of subjects, and the protocol of harness/checks/protocols.py that each offers.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "quantizer": "Quantizer",
        "packer": "Packer",
        "solver": "Solver",
        "observer": "Observer",
        "layer": "Layer",
        "sparsifier": "Sparsifier",
        "transform": "Transform",
        "calibration": "Calibration",
        "artifact": "Artifact",
    }
)


class Broken(AssertionError):
    """A subject breaks the statement of a check.

    Attributes:
        findings: the single offenders, one line each.
    """

    def __init__(self, message: str, findings: Iterable[str] = ()) -> None:
        """Say what is wrong, in one line, and list the offenders."""
        super().__init__(message)
        self.findings = tuple(findings)


class SideEffectError(AssertionError):
    """A call of the subject changed something beside its result, whatever the check was about.

    Attributes:
        cause: what was changed; checks that met the same are told once.
    """

    def __init__(self, message: str, cause: str) -> None:
        """Say what was changed by which call."""
        super().__init__(message)
        self.cause = f"changed: {cause}"


class NothingToCheckError(Exception):
    """The check has nothing to look at in this subject; the message says why."""


@dataclass(frozen=True)
class Look:
    """How closely a check looks.

    Attributes:
        profile: what random draws it may spend.
        draws: whether it draws at all; without, only the fixed inputs are looked at, which takes milliseconds.
        seed: of inputs that are drawn once.
    """

    profile: Profile = PROFILES["pr"]
    draws: bool = True
    seed: int = 0


CheckFunction = Callable[[Any, Look], str]
"""Looks into a subject and returns what it saw, in one line; Broken is a failure."""


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

    def run(self, subject: Any, look: Look) -> CheckRecord:
        """Look into a subject.

        Args:
            subject: of the kind of this check.
            look: how closely.

        Returns:
            The record; a subject that breaks the check, or breaks under it, is a failed one.
        """
        missing = sorted(self.needs - frozenset(subject.tags))
        if missing:
            return self.claim.skipped(f"the subject does not promise {missing[0]!r}")
        from harness.lifecycle.process_state import process_kept

        try:
            with process_kept():
                summary = self.function(watched(subject), look)
        except NothingToCheckError as reason:
            return self.claim.skipped(str(reason))
        except Broken as broken:
            text = str(broken)
            return self.claim.record(Outcome.FAIL, text, findings=[text, *broken.findings])
        except SideEffectError as effect:
            return self.claim.record(Outcome.FAIL, str(effect), evidence={"causes": [effect.cause]}, findings=[str(effect)])
        except Exception as error:  # noqa: BLE001 - a subject may raise anything; that it did is the finding
            text = f"the check could not be completed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return self.claim.record(Outcome.FAIL, text, evidence={"causes": [text]}, findings=[text])
        return self.claim.record(Outcome.PASS, summary)


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
    """
    wanted = frozenset(needs)
    assert kind in KINDS, f"{name}: there is no kind {kind}"
    assert wanted <= TAGS.keys(), f"{name}: {wanted - TAGS.keys()} are no tags"

    def put(function: CheckFunction) -> CheckFunction:
        full = f"{kind}.{name}"
        assert full not in _CHECKS, f"two checks are called {full}"
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
    from compressor.arguments import suggest

    known = [check for check in all_checks().values() if kind in (None, check.kind)]
    if wanted is None:
        return known
    keys = [str(key) for key in wanted]
    for key in keys:
        if not any(key in (check.name, str(check.number)) for check in known):
            raise UserInputError(f"check: there is no check {key!r} of a {kind or 'subject'}; {suggest(key, [one.name for one in known])}")
    return [check for check in known if check.name in keys or str(check.number) in keys]
