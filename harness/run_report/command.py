"""The verb `harness report`: a page of what a run of the compressor did. Nothing heavy is imported before `run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from compressor.settings.kinds import FilePath, Flag
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


class ReportSettings(Settings):
    """The choices of one report."""

    folder: Annotated[FilePath, Option(positional=True, metavar="FOLDER")]
    """Checkpoint that the compressor has written, with its compression.json."""
    times: Annotated[FilePath | None, Option(metavar="RUN.json")] = None
    """What `compressor oneshot --json` printed in that run: time and memory by phase and stage."""
    output_dir: Annotated[FilePath | None, Option(metavar="O")] = None
    """Folder for report.html and report.json, new or empty (default: ./<FOLDER>-report)."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the report as JSON on standard output as well."""
    quiet: Annotated[Flag, Option()] = False
    """Show no progress bar."""


def run(settings: ReportSettings) -> Verdict:
    """Read the run, write its page and say where it is.

    Args:
        settings: of the verb.
    Returns:
        PASS: nothing is judged.
    """
    from compressor.console import Console
    from compressor.json_text import to_json
    from compressor.progress import progress_of
    from harness.run_report.page import check_output_dir, write_report
    from harness.run_report.reading import read_run

    output_dir = settings.output_dir or Path(f"{settings.folder.resolve().name}-report")
    check_output_dir(output_dir, source=settings.folder)
    report = read_run(settings.folder, settings.times, progress_of(not settings.quiet))
    page = write_report(report, output_dir)
    if settings.as_json:
        sys.stdout.write(to_json(report.to_dict()))
    else:
        Console().print(f"report: {page}", soft_wrap=True, highlight=False)
    return Verdict.PASS


COMMAND = Command(
    "show what a run of the compressor did on one page: errors, ranges, outliers, time and memory", ReportSettings, run, exit_codes("done")
)
