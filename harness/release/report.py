"""What a sign-off found: records, what of them is required and waived, and what that means together."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from compressor.spelling import suggest
from harness.release.policy import ReleasePolicy, Waiver
from harness.reporting.record import CheckRecord, Claim, decide
from harness.reporting.verdict import EXIT_CODES, Outcome, Verdict

REQUIRED = Claim("policy.required", "Every check that the policy requires has looked")
WAIVERS = Claim("policy.waivers", "No waiver has ended, and each is of a check that there is")


@dataclass(frozen=True)
class ReleaseReport:
    """A sign-off.

    Attributes:
        records: one per check, in order.
        policy: what they were held against.
        waived: waivers that count today, by the check that did not pass.
        provenance: digests of base, checkpoint, data and policy, and versions; the same for the same inputs.
        run: when, where and how long; differs from run to run.
    """

    records: tuple[CheckRecord, ...]
    policy: ReleasePolicy
    waived: Mapping[str, Waiver]
    provenance: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        """What the records together mean, without those that are waived."""
        return decide(record for record in self.records if record.name not in self.waived)

    @property
    def exit_code(self) -> int:
        """The exit code of the command line for this verdict."""
        return EXIT_CODES[self.verdict]

    def names(self, *outcomes: Outcome, waived: bool = False) -> list[str]:
        """Return the checks with one of some outcomes.

        Args:
            *outcomes: which.
            waived: those that are waived; otherwise those that are not.

        Returns:
            Their names, in order.
        """
        return [one.name for one in self.records if one.outcome in outcomes and (one.name in self.waived) is waived]

    def for_junit(self) -> list[CheckRecord]:
        """Return the records as a CI should take them: what is waived reads as skipped, with the reason."""
        return [self._as_waived(record) for record in self.records]

    def _as_waived(self, record: CheckRecord) -> CheckRecord:
        waiver = self.waived.get(record.name)
        if waiver is None:
            return record
        return replace(record, outcome=Outcome.SKIP, summary=f"waived until {waiver.until}: {waiver.reason}; {record.summary}")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; only `run` differs between runs on the same inputs on one day."""
        return {
            "schema_version": 1,
            "verdict": self.verdict.value,
            "checks": [{**record.to_dict(), "waived": record.name in self.waived} for record in self.records],
            "waivers": {name: waiver.model_dump(mode="json") for name, waiver in self.waived.items()},
            "policy": self.policy.model_dump(mode="json"),
            "provenance": dict(self.provenance),
            "run": dict(self.run),
        }


def judged(
    records: Sequence[CheckRecord], policy: ReleasePolicy, today: date, provenance: Mapping[str, Any], run: Mapping[str, Any]
) -> ReleaseReport:
    """Hold records against what a policy requires and waives.

    Args:
        records: of all checks.
        policy: of the release.
        today: waivers until yesterday do not count.
        provenance: of the report.
        run: of the report.

    Returns:
        The report, with two records about the policy itself.
    """
    there = {record.name: record for record in records}
    open_records = {name: one for name, one in there.items() if one.outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE)}
    waived = {name: waiver for name, waiver in policy.waivers.items() if waiver.until >= today and name in there}
    missed = {name for name, one in there.items() if one.outcome is Outcome.SKIP and policy.requires(name)}
    required = [f"{name}: is required, and was skipped: {there[name].summary}{_not_by(waived, name)}" for name in there if name in missed]
    required += [f"{pattern}: is required, and is no check" for pattern in policy.required if not any(_fits(pattern, one) for one in there)]
    counted = {name: waiver for name, waiver in waived.items() if name in open_records}
    num_required = sum(policy.requires(name) for name in there)
    own = [REQUIRED.found(required, f"{num_required} of {len(there)} checks are required"), _waivers_record(policy, today, there, counted)]
    return ReleaseReport((*records, *own), policy, counted, provenance, run)


def _not_by(waived: Container[str], name: str) -> str:
    return "; a waiver lets it fail, and not be left out: have it run, or do not require it" if name in waived else ""


def _fits(pattern: str, name: str) -> bool:
    return ReleasePolicy(required=(pattern,)).requires(name)


def _waivers_record(policy: ReleasePolicy, today: date, there: Mapping[str, CheckRecord], counted: Mapping[str, Waiver]) -> CheckRecord:
    findings, idle = [], []
    for name, waiver in policy.waivers.items():
        if name not in there:
            findings.append(f"{name}: is no check; {suggest(name, there, show=str, otherwise='correct the policy')}")
        elif waiver.until < today:
            findings.append(f"{name}: ended on {waiver.until} ({waiver.reason}); repair it, or decide again")
        elif name not in counted:
            idle.append(f"{name} {'was skipped, which none covers' if there[name].outcome is Outcome.SKIP else 'passes without it'}")
    told = "; ".join([f"{len(counted)} in use", *idle]) if policy.waivers else "there are none"
    return WAIVERS.found(findings, told, noun="waiver")
