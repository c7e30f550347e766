"""The contract of torch.nn.Module, checked on one module: what torch promises must hold for a layer that takes another's place.

A pipeline, a tracer and a modifier all rely on it: they hang hooks on layers, switch modes, copy them and save their state. The module is
left as it was, whatever a check finds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from compressor.console import Console
from compressor.json_text import to_json
from compressor.random_state import random_numbers_kept
from harness.lifecycle.process_state import process_kept, settings_kept
from harness.modules import copies, hooks, state, surroundings
from harness.modules.subject import ModuleCheck, NotApplicableError, Subject, untouched
from harness.reporting.record import CheckRecord, Claim, decide
from harness.reporting.text import as_text, to_table
from harness.reporting.verdict import EXIT_CODES, Outcome, Verdict

CALL = Claim("module.call", "The module takes the inputs that it is checked with")


CHECKS: tuple[ModuleCheck, ...] = (*surroundings.CHECKS, *hooks.CHECKS, *state.CHECKS, *copies.CHECKS)
"""Every check, in the order of the report."""


@dataclass(frozen=True)
class ModuleReport:
    """What `verify_module` found.

    Attributes:
        subject: class of the module.
        records: one per check.
    """

    subject: str
    records: tuple[CheckRecord, ...]

    @property
    def verdict(self) -> Verdict:
        """What the records together mean."""
        return decide(self.records)

    @property
    def passed(self) -> bool:
        """True when some check passed and none failed or could not tell."""
        return self.verdict is Verdict.PASS

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(record.name for record in self.records if record.outcome is Outcome.FAIL)

    @property
    def exit_code(self) -> int:
        """The exit code of a command line for this verdict."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types; equal for equal modules."""
        return {"subject": self.subject, "verdict": self.verdict.value, "checks": [record.to_dict() for record in self.records]}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return to_json(self.to_dict())

    def to_text(self) -> str:
        """Return the report as a table, the deviations of failed checks below it."""
        return as_text(self._show, width=140)

    def _show(self, console: Console) -> None:
        console.print(to_table(self.records))
        for record in self.records:
            if record.outcome is Outcome.FAIL:
                console.print(f"{record.name}: {record.title}", *record.findings, sep="\n  ", markup=False, highlight=False)
        console.print(f"{self.subject}: {self.verdict.value}", markup=False, highlight=False)


def verify_module(module: nn.Module, inputs: object) -> ModuleReport:
    """Check that a module keeps the contract of torch.nn.Module. The module is left as it was, gradients and graphs made before included.

    One thing nobody can put back: `to(dtype)` makes torch forget the gradient accumulators of parameters, and with them the hooks that hang
    there. DistributedDataParallel does that, so verify a module before it is wrapped.

    Args:
        module: any module that is built; not modified.
        inputs: inputs that it takes: a tuple of positional ones (a NamedTuple too), a mapping of keyword ones, or a single positional one
            (a list too); not modified.

    Returns:
        One record per check; a module that does not take the inputs fails `module.call`, and what needs a call is skipped.

    Raises:
        UserInputError: no module object, a lazy one that has not seen an input, or one of TorchScript or torch.compile; a module that
            holds sparse, nested, quantized or meta tensors; inputs that cannot be copied.
    """
    subject = Subject.of(module, inputs)
    with random_numbers_kept(devices="all"), process_kept(module.modules()):
        with process_kept(module.modules()):  # the checks meet the process as the first call has met it
            called = _call(subject)
        records = [called]
        for check in CHECKS:
            if check.calls and called.outcome is Outcome.FAIL:
                records.append(check.claim.skipped("the module does not take the inputs"))
            else:
                records.append(_run(check, subject))
    return ModuleReport(type(module).__name__, tuple(records))


def _call(subject: Subject) -> CheckRecord:
    with untouched(subject.module):
        try:
            subject.call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a module that raises is a finding, never the end of the run
            return CALL.found([_describe(error)], "")
    return CALL.found([], "it does")


def _run(check: ModuleCheck, subject: Subject) -> CheckRecord:
    with untouched(subject.module), settings_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of while it is probed is not the caller's concern
        subject.not_seen.clear()
        try:
            findings = check.run(subject)
            return check.claim.found(findings, "; ".join(["as torch promises", *subject.not_seen]), noun="deviation")
        except NotApplicableError as reason:
            return check.claim.skipped(str(reason))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a module that raises is a finding, never the end of the run
            return check.claim.found([_describe(error)], "")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
