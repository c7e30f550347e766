"""Runs a night: every cell in a process of its own, every attempt a row, and what is done already is not done again."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compressor.atomic import whole_file
from compressor.errors import UserInputError
from compressor.json_text import from_json, to_json
from compressor.progress import Progress, SilentProgress
from harness.errors import HarnessError
from harness.nightly.blame.repository import Repository, files_of
from harness.nightly.cells import Cell, CellOutcome, all_cells, parts_of
from harness.nightly.config import NightlyConfig
from harness.nightly.environment import Environment, current_environment
from harness.nightly.history import History
from harness.nightly.judging.flaky import Flaky, find_flaky
from harness.nightly.judging.judge import judge
from harness.nightly.judging.judgement import Judgement
from harness.nightly.measurement import CellRow, Measurement, check_measurement, check_text, short
from harness.nightly.process import Ended, alone_in, run_limited
from harness.nightly.work import Job
from harness.reporting.text import printable
from harness.reporting.verdict import Verdict, worst

_OUTCOMES = {0: CellOutcome.PASS, 1: CellOutcome.REGRESSION, 2: CellOutcome.INCONCLUSIVE}
"""By the exit code of a command: what verbs of the harness mean by it. pytest's 1 is a failure, too."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Night:
    """What a night found.

    Attributes:
        night: its label.
        revision: of the code.
        rows: the last attempt at each cell, in the order of the matrix.
        judgements: of all metrics that were measured this night.
        flaky: cells in quarantine, which do not fail a night.
        resumed: number of cells that had been done before this run.
        anew: why cells that had been done ran again; empty where none did.
    """

    night: str
    revision: str
    rows: tuple[CellRow, ...]
    judgements: tuple[Judgement, ...]
    flaky: Mapping[str, Flaky]
    resumed: int
    anew: str = ""

    @property
    def verdict(self) -> Verdict:
        """REGRESSION where a metric is worse, or a cell fails that is not in quarantine; metrics with too few nights do not count."""
        worse = [Verdict.REGRESSION for one in self.judgements if one.verdict is Verdict.REGRESSION]
        return worst([*map(self.verdict_of, self.rows), *worse]) if self.rows or worse else worst(one.verdict for one in self.judgements)

    @property
    def commit(self) -> str:
        """The revision as it is shown."""
        return short(self.revision)

    def verdict_of(self, row: CellRow) -> Verdict:
        """Return what a cell means for the night: one in quarantine that does not pass tells nothing."""
        quarantined = row.cell in self.flaky and row.outcome != CellOutcome.PASS
        return Verdict.INCONCLUSIVE if quarantined else CellOutcome(row.outcome).verdict

    def summary_of(self, row: CellRow) -> str:
        """Return what was found of a cell, behind the evidence where it is in quarantine."""
        return f"quarantined: {self.flaky[row.cell]}; {row.summary}" if row.cell in self.flaky else row.summary

    def counts(self, judgement: Judgement) -> bool:
        """Return whether the verdict takes in what is said of a metric: too few nights do not count beside cells, or what is worse."""
        return judgement.verdict is not Verdict.INCONCLUSIVE or (not self.rows and self.verdict is Verdict.INCONCLUSIVE)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "night": self.night,
            "revision": self.revision,
            "verdict": self.verdict.value,
            "resumed": self.resumed,
            "anew": self.anew,
            "cells": [asdict(row) | {"quarantine": str(self.flaky[row.cell]) if row.cell in self.flaky else None} for row in self.rows],
            "metrics": [one.to_dict() for one in self.judgements],
        }


class Runner:
    """One night of one config."""

    def __init__(
        self,
        config: NightlyConfig,
        night: str | None = None,
        progress: Progress | None = None,
        *,
        cells: Sequence[Cell] | None = None,
        revision: str | None = None,
        variables: Mapping[str, str] | None = None,
        lacks: Callable[[Sequence[str]], str] | None = None,
    ) -> None:
        """Look at what is there.

        Args:
            config: the matrix.
            night: label that sorts by time; by default today's date in UTC.
            progress: shows a bar.
            cells: that run; by default all.
            revision: of the code; by default the commit that `config.root` is at.
            variables: of the environment of the processes; by default those of this one.
            lacks: says what a command that has failed cannot have found where it ran, as `blame.measuring.lacking`; by default nothing.

        Raises:
            UserInputError: the label is no text of one line.
        """
        self.config, self.progress = config, progress or SilentProgress()
        self.cells, self.variables = all_cells(config) if cells is None else cells, variables
        self.night = datetime.now(UTC).date().isoformat() if night is None else night
        check_text("night", self.night)
        self.revision = current_revision(config.root) if revision is None else revision
        self._is_own_tree, self._lacks = revision is None, lacks
        self.history = History(config.history)
        self.environments = {device: current_environment(device) for device in config.devices}

    def run(self) -> Night:
        """Run what is not done yet, and judge what was measured.

        Returns:
            The night.

        Raises:
            HistoryError: the history cannot be written; the cell that had run is run again the next time.
            HarnessError: the folder of the night cannot be made, or another run works there.
            CheckpointError: the disk is full; likewise.
        """
        with alone_in(self.config.folder / self.night, "name another folder"):
            rows, resumed, anew = self._run_cells()
        cells = self.cells
        prefixes = tuple(f"{cell.name}/" for cell in cells)
        measured = [name for name in self.history.metrics() if name.startswith(prefixes)]
        series = {name: self.history.series(name) for name in measured}
        judgements = tuple(judge(found, self.history.acceptances(name)) for name, found in series.items() if found[-1].night == self.night)
        last = tuple(rows[cell.name] for cell in cells)
        return Night(self.night, self.revision, last, judgements, find_flaky(self.history.cells()), resumed, anew)

    def _run_cells(self) -> tuple[dict[str, CellRow], int, str]:
        """Run what is not done: the last row of each cell, how many had been done, and why others of those ran again."""
        rows, anew = self._done()
        resumed = len(rows)
        try:
            with self.progress.task("cells", len(self.cells)) as bar:
                for cell in self.cells:
                    bar.advance(0, note=cell.name)
                    if cell.name not in rows:
                        rows[cell.name] = self._run_cell(cell, rows)
                    bar.advance(note=f"{cell.name}: {rows[cell.name].outcome}")
        except KeyboardInterrupt as stop:
            stop.add_note(f"{len(rows)} of {len(self.cells)} cells are in {self.config.history}, and the same command goes on behind them")
            raise
        return rows, resumed, anew

    def _done(self) -> tuple[dict[str, CellRow], str]:
        """The cells of this night, revision and environment that came to an end and would run as they did; and why others run again.

        One that ended without a verdict is tried again.
        """
        digests = {environment.digest for environment in self.environments.values()}
        rows = [row for row in self.history.cells(self.night) if row.revision == self.revision and row.environment in digests]
        ended = {row.cell: row for row in rows if CellOutcome(row.outcome).is_final}
        cells, before = {cell.name: cell for cell in self.cells}, self._made_of()
        own = {name: row for name, row in ended.items() if name not in cells or before.get(_key(row), {}).get("row") == asdict(row)}
        done = {name: row for name, row in own.items() if name not in cells or before[_key(row)]["digest"] == self._digest(cells[name])}
        if not ended or (self._uncommitted is None and len(done) == len(ended)):
            return done, ""
        if self._uncommitted is not None:
            return {}, f"{self._uncommitted} is not as in the commit, or in none"
        other = next(name for name in ended if name not in done)
        if other not in own:
            return done, f"{other} ran last from another folder, or by another config, and {self.config.history} holds that result"
        return done, f"{other} is another command, or looks at other files"

    @functools.cached_property
    def _uncommitted(self) -> str | None:
        """A file by which the tree is not that of its commit; None where there is none, or no commit is known."""
        if not self._is_own_tree or not self.revision:
            return None
        history = self.config.history
        own = [self.config.folder, *(history.with_name(history.name + end) for end in ("", "-journal", "-wal", "-shm"))]
        return Repository(self.config.root).first_uncommitted(own) or None

    def _made_of(self) -> dict[str, dict[str, Any]]:
        """Of the cells that ran from here this night: a digest of what each was, and the row that it left."""
        path = self._cells_file
        found: dict[str, dict[str, Any]] = from_json(path.read_text("utf-8")) if path.exists() else {}
        return found

    @property
    def _cells_file(self) -> Path:
        return self.config.folder / self.night / "cells.json"

    def _digest(self, cell: Cell) -> str:
        """Hash what a cell runs, and, where that is the user's own tree, the files that it names and that no commit holds."""
        values, data, files = self._values(cell), self.config.data, list[tuple[str, int, str]]()
        words = cell.arguments(values) if cell.command else [*values.values(), *((data.calibration, data.held_out) if data else ())]
        if self._is_own_tree:
            repository = Repository(self.config.root) if self.revision else None
            named = (self.config.root / part for part in parts_of(words))
            files = files_of(path for path in named if os.access(path, os.R_OK) and not (repository and repository.holds(path)))
        place = os.path.relpath(self.config.root, self.config.folder if self._is_own_tree else Repository(self.config.root).top)
        told = to_json([words, data and data.model_dump(), self.config.repetitions, files]).replace(str(self.config.root), "") + place
        return hashlib.sha256(told.encode()).hexdigest()

    def _run_cell(self, cell: Cell, rows: Mapping[str, CellRow]) -> CellRow:
        needed = rows.get(cell.needs) if cell.needs else None
        if needed is not None and needed.outcome != CellOutcome.PASS:
            return self._write(cell, 1, CellOutcome.SKIPPED, f"{needed.cell}: {needed.outcome}, so there is no checkpoint", None, {})
        for attempt in range(1, self.config.retries + 2):
            row = self._try(cell, attempt)
            if CellOutcome(row.outcome).is_final:
                break
        return row

    def _try(self, cell: Cell, attempt: int) -> CellRow:
        stem = self.config.folder / self.night / f"{cell.name.replace('/', '-').replace(':', '')}.{attempt}"
        log, result = stem.with_name(stem.name + ".log"), stem.with_name(stem.name + ".json")
        result.unlink(missing_ok=True)
        memory, words = self.config.limits.memory_gib, self._command(cell, stem, result)
        try:
            ended = run_limited(
                words,
                log,
                seconds=self.config.limits.minutes * 60,
                memory=None if memory is None else memory * _GIB,
                cwd=self.config.root,
                environment=self.variables,
            )
        except HarnessError as error:
            return self._write(cell, attempt, CellOutcome.ERROR, str(error), None, {})
        outcome, summary, metrics = self._read(cell, ended, log, result)
        if outcome is not CellOutcome.PASS and self._lacks is not None and (lack := self._lacks(words)):
            outcome, summary, metrics = CellOutcome.ERROR, f"{lack}{summary}", {}
        if moved := self._moved():
            return self._write(cell, attempt, CellOutcome.ERROR, f"{moved}; {summary}", ended, {})
        if ended.strays:
            summary = f"{summary}; processes that had detached themselves from it were ended: {ended.strays}"
        return self._write(cell, attempt, outcome, summary, ended, metrics)

    def _moved(self) -> str:
        """Whether the tree is at another commit than when the night began: what was measured is then that of none, or of another."""
        now = current_revision(self.config.root).removesuffix("-dirty") if self._is_own_tree else ""
        was = self.revision.removesuffix("-dirty")
        return f"the commit moved from {was[:12] or 'none'} to {now[:12]}, and nothing is filed" if now not in ("", was) else ""

    def _values(self, cell: Cell) -> dict[str, str]:
        return {
            "model": self.config.models.get(cell.model or "", ""),
            "recipe": str(self.config.recipes.get(cell.recipe or "", "")),
            "device": cell.device or "",
            "compressed": str(cell.checkpoint(self.config.folder)),
        }

    def _command(self, cell: Cell, stem: Path, result: Path) -> list[str]:
        values = self._values(cell)
        if cell.command:
            return cell.arguments(values)
        assert self.config.data is not None  # read_config saw to it
        job = Job(cell.check, **values, data=self.config.data.model_dump(), repetitions=self.config.repetitions)
        job_file = stem.with_name(stem.name + ".job.json")
        with whole_file(job_file) as path:
            path.write_text(to_json(asdict(job)), "utf-8")
        return [sys.executable, "-m", "harness.nightly.work", str(job_file), str(result)]

    def _read(self, cell: Cell, ended: Ended, log: Path, result: Path) -> tuple[CellOutcome, str, dict[str, Any]]:
        """What the process left: outcome, summary, metrics."""
        if ended.beyond:
            limit = f"{self.config.limits.minutes:g} minutes" if ended.beyond == "timeout" else f"{self.config.limits.memory_gib:g} GiB"
            return CellOutcome(ended.beyond), f"ended after {limit}; {last_line(log)}", {}
        if ended.code < 0:
            return CellOutcome.KILLED, f"ended by signal {-ended.code}; {last_line(log)}", {}
        if cell.command:
            outcome = _OUTCOMES.get(ended.code, CellOutcome.ERROR)
            took = {"seconds": ([ended.seconds], "lower", "series")} if outcome is CellOutcome.PASS else {}  # who fails, fails early
            return outcome, f"exit code {ended.code}; {last_line(log)}", took
        if ended.code or not result.exists():
            return CellOutcome.ERROR, f"exit code {ended.code}; {last_line(log)}", {}
        found = from_json(result.read_text("utf-8"))
        return CellOutcome(found["outcome"]), found["summary"], found["metrics"]

    def _write(
        self, cell: Cell, attempt: int, outcome: CellOutcome, summary: str, ended: Ended | None, metrics: Mapping[str, Any]
    ) -> CellRow:
        environment: Environment = self.environments[cell.device or self.config.devices[0]]
        seconds, memory = (ended.seconds, ended.memory) if ended else (0.0, 0)
        place = (self.night, environment.digest, self.revision)
        measured, refused = judgeable(
            Measurement(*place, f"{cell.name}/{name}", better, tuple(map(float, values)), kind)  # JSON has nan and inf as texts
            for name, (values, better, kind) in metrics.items()
        )
        told = printable(" ".join("; not judged: ".join([summary, *refused]).split()))
        row = CellRow(*place, cell.name, attempt, outcome.value, seconds, memory, told)
        with whole_file(self._cells_file) as path:  # before the row: one that is kept without what it was made of runs again
            path.write_text(to_json({**self._made_of(), _key(row): {"digest": self._digest(cell), "row": asdict(row)}}), "utf-8")
        self.history.add_cell(row, measured, environment=environment)
        return row


def _key(row: CellRow) -> str:
    return f"{row.environment} {row.revision} {row.cell}"


def judgeable(found: Iterable[Measurement]) -> tuple[list[Measurement], list[str]]:
    """Return what a history takes of some measurements, and why it does not take the others, which ends no night."""
    measured, refused = list[Measurement](), list[str]()
    for one in found:
        try:
            check_measurement(one)
        except UserInputError as error:
            refused.append(str(error))
        else:
            measured.append(one)
    return measured, refused


def current_revision(folder: Path) -> str:
    """Return the commit that a folder is at, with `-dirty` where files differ from it; empty where that is unknown."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def last_line(log: Path) -> str:
    """Return the last line of a log that says anything, in words for a summary."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return f"{log.name} ends with: {lines[-1][:200]}" if lines else f"{log.name} is empty"
