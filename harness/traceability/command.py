"""The verb `harness trace-audit`: architectures or toys in, verdicts and an exit code out. Nothing heavy is imported before `run`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Texts
from compressor.settings.options import Option, Settings
from harness.errors import HarnessError
from harness.reporting.text import plain_console, plain_table
from harness.reporting.verdict import Verdict, exit_codes, worst
from harness.verbs import Command

if TYPE_CHECKING:
    from harness.traceability.audit import Auditor
    from harness.traceability.verdicts import Row, Subject


_LEVELS = ("layer", "inferred", "linear")


class AuditSettings(Settings):
    """The choices of one audit."""

    names: Annotated[Texts, Option(positional=True, nargs="*", metavar="ARCH")] = ()
    """Architectures of the zoo, or toys (default: all that must pass)."""
    engine: Annotated[Texts | None, Option(choices=("auto", "graph", "suspend"), repeats=True)] = None
    """Which engine traces; may be given several times (auto)."""
    targets: Annotated[Texts | None, Option(choices=_LEVELS, repeats=True)] = None
    """Which modules are sequential targets; may be given several times (all three)."""
    toys: Annotated[Flag, Option()] = False
    """The toys made to deceive a tracer, instead of the architectures."""
    more: Annotated[Flag, Option()] = False
    """The architectures beyond the list, too."""
    peer: Annotated[Flag, Option()] = False
    """Trace with llmcompressor's trace_subgraphs, which must be installed."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the verdicts as JSON instead of the table."""


def run(settings: AuditSettings) -> Verdict:
    """Audit, and print the verdicts.

    Args:
        settings: of the verb.

    Returns:
        REGRESSION if a finding is SILENT or crash, else PASS.

    Raises:
        HarnessError: a name is unknown, or the choices do not go together.
    """
    if settings.peer and settings.engine:
        raise HarnessError("--engine: chooses an engine of this project, but --peer traces with another library; leave one of them out")

    with contextlib.redirect_stdout(sys.stderr):  # what models and other libraries print must not mix with the verdicts
        rows = _audit_all(_subjects(settings), list(dict.fromkeys(settings.targets or _LEVELS)), _auditors(settings))
    if settings.as_json:
        print(to_json(_summary(rows)), end="")
    else:
        _print(rows)
    return worst(row.finding.verdict for row in rows)


def _auditors(settings: AuditSettings) -> list[Auditor]:
    from harness.traceability.audit import Auditor

    if settings.peer:
        from harness.traceability.peer import PeerAuditor

        return [PeerAuditor()]
    return [Auditor(engine) for engine in dict.fromkeys(settings.engine or ("auto",))]


def _subjects(settings: AuditSettings) -> list[Subject]:
    from harness.traceability.architectures import choose
    from harness.traceability.toys.registry import TOYS

    toys = [TOYS[name] for name in settings.names if name in TOYS] if settings.names else list(TOYS.values()) if settings.toys else []
    names = [name for name in settings.names if name not in TOYS]
    architectures = choose(names, more=settings.more) if names or not toys else []
    return [*(one.subject() for one in architectures), *(one.subject() for one in toys)]


def _audit_all(subjects: Sequence[Subject], levels: Sequence[str], auditors: Sequence[Auditor]) -> list[Row]:
    from transformers.utils import logging

    from compressor.progress import progress_of

    logging.set_verbosity_error()
    rows = []
    with warnings.catch_warnings(), progress_of(True).task("audit", total=len(subjects) * len(levels) * len(auditors)) as task:
        warnings.simplefilter("ignore")
        for subject in subjects:
            for level in levels:
                for auditor in auditors:
                    rows.append(auditor.audit(subject, level))
                    task.advance(note=f"{subject.name}, {level}: {rows[-1].finding.value}")
    return rows


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    counts = Counter(row.finding.value for row in rows)
    return {"rows": [row.to_dict() for row in rows], "counts": dict(counts), "seconds": round(sum(row.seconds for row in rows), 1)}


def _print(rows: Sequence[Row]) -> None:
    console = plain_console(200)
    headings = ("subject", "targets", "engine", "verdict", "stages", "s", "first difference, or reason")
    console.print(plain_table(headings, map(_cells, rows)))
    summary = _summary(rows)
    told = ", ".join(f"{count} {finding}" for finding, count in sorted(summary["counts"].items()))
    console.print(f"{len(rows)} audits in {summary['seconds']} s: {told}")


def _cells(row: Row) -> tuple[str, ...]:
    engine = row.used if row.engine in (row.used, "") else f"{row.engine}: {row.used or 'none'}"
    return row.subject, row.level, engine, row.finding.value, str(row.num_stages), f"{row.seconds:.2f}", row.detail


COMMAND = Command(
    "hold traced models against plain ones, bit for bit: a zoo, and toys",
    AuditSettings,
    run,
    exit_codes("nothing was silently wrong and nothing crashed (refusals are shown)", "something was or did"),
)
