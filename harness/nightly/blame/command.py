"""`harness nightly blame`: from a metric that became worse to the commit, and to the layer. Nothing heavy is imported before `run`."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from compressor.console import positive
from compressor.errors import UserInputError
from compressor.json_text import to_json
from compressor.settings.kinds import FilePath, Flag, Text, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command

if TYPE_CHECKING:
    from compressor.progress import Progress
    from harness.nightly.blame.answer import BlameReport


class BlameSettings(Settings):
    """What is searched for, where, and how it is measured."""

    metric: Annotated[Text, Option(positional=True, metavar="METRIC")]
    """Name of a metric, or of a cell of the matrix that no longer passes."""
    config: Annotated[FilePath | None, Option(metavar="CONFIG.yaml")] = None
    """The matrix whose cell measures it; run as it is now, with the code, recipes and models of each commit."""
    command: Annotated[Text | None, Option(metavar="C")] = None
    """Instead of a matrix: a command that writes METRIC into {history}, such as 'pytest -q t.py --harness-history {history}'."""
    history: Annotated[FilePath | None, Option(metavar="F")] = None
    """Which nights tell where to search (default: that of the matrix, else nightly.sqlite)."""
    good: Annotated[Text | None, Option(metavar="REV")] = None
    """A commit that is as it should be (default: of the nights before the change)."""
    bad: Annotated[Text | None, Option(metavar="REV")] = None
    """A commit that is worse (default: of the nights from the change on)."""
    rounds: Annotated[Whole, Option(metavar="N", read=positive)] = 8
    """Runs of a commit at most, each beside one of the good commit, until it is told apart; four are the least for the bad one. Of a
    cell, runs of each commit that the answer rests on; two are the least."""
    output_dir: Annotated[FilePath | None, Option(metavar="DIR")] = None
    """For readings, logs and checkpoints (default: blame, beside the history); a search that was interrupted goes on from it."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print data instead of text."""
    quiet: Annotated[Flag, Option()] = False
    """Show no progress bars."""


def run(settings: BlameSettings) -> Verdict:
    """Search, and print what was found.

    Args:
        settings: of the verb.

    Returns:
        REGRESSION where one commit was found, PASS where the bad one is as good here, else INCONCLUSIVE, as where a cell fails by chance.
    """
    from compressor.progress import progress_of

    report = blame(settings, progress_of(not settings.quiet))
    sys.stdout.write(to_json(report.to_dict()) if settings.as_json else report.to_text())
    return report.verdict


def blame(settings: BlameSettings, progress: Progress) -> BlameReport:
    """Search for the commit, then among the layers.

    Args:
        settings: what, where and how.
        progress: shows bars.

    Returns:
        What was found.

    Raises:
        UserInputError: the settings do not say what to measure, or where.
        HarnessError: an end cannot be measured, or git cannot search.
    """
    from harness.nightly.blame.measuring import CellMeasure, CommandMeasure, Measure, outside_of_commits
    from harness.nightly.blame.repository import Repository
    from harness.nightly.blame.search import Search, find_ends, with_layers
    from harness.nightly.config import read_config
    from harness.nightly.history import History
    from harness.nightly.judging.flaky import find_flaky

    if (settings.config is None) == (settings.command is None):
        given = "both were given" if settings.config is not None else "neither was given"
        raise UserInputError(f"harness nightly blame: --config and --command say how to measure, and {given}; give one")
    config = None if settings.config is None else read_config(settings.config)
    path = settings.history or (Path("nightly.sqlite") if config is None else config.history)
    repository = Repository(Path.cwd() if config is None else config.root)
    is_known = settings.good is not None and settings.bad is not None
    if not is_known and not path.exists():
        raise UserInputError(f"{path}: there is no history to tell where to search; name it with --history, or give --good and --bad")
    good, bad = find_ends(repository, settings.metric, None if is_known else History(path), settings.good, settings.bad)
    measured_by = [config or settings.command, *outside_of_commits(config or str(settings.command), repository)]
    folder = (settings.output_dir or path.parent / "blame").absolute() / _name(settings.metric, repr(measured_by))
    if config is None:
        measure: Measure = CommandMeasure(str(settings.command), settings.metric, repository, folder)
    else:
        measure = CellMeasure(config, settings.metric, repository, folder)
    try:
        report = Search(measure, repository, folder, good, bad, max_rounds=settings.rounds).run(progress)
    except KeyboardInterrupt as stop:
        stop.add_note(f"what was measured lies in {folder}, and the same command goes on from it")
        raise
    if measure.is_outcome and path.exists() and (evidence := find_flaky(History(path).cells()).get(settings.metric)):
        report = replace(report, quarantine=str(evidence))
    return with_layers(report, measure, progress) if isinstance(measure, CellMeasure) else report


def _name(metric: str, measured_by: str) -> str:
    """Of a folder that holds what was measured of one metric in one way."""
    digest = hashlib.sha256(f"{metric}\n{measured_by}".encode()).hexdigest()
    return re.sub(r"[^\w.-]+", "-", metric) + f"-{digest[:8]}"


COMMAND = Command(
    "find the commit that made a metric worse, and the layer that it changed",
    BlameSettings,
    run,
    exit_codes(
        "the bad commit is as good here",
        "a commit was found",
        "commits could not be told apart, or the change not from noise; or a cell fails by chance",
    ),
)
