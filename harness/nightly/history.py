"""The history of measurements: one SQLite file, to which rows are added and in which none is changed or removed.

Several processes may write at once. What belongs together is written in one transaction, so that a kill or a full disk leaves all of it or
nothing. Triggers refuse every change of a row, also by hands other than ours.
"""

from __future__ import annotations

import json
import shlex
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from compressor.errors import UserInputError
from compressor.settings.kinds import TEXT
from harness.errors import HistoryError
from harness.nightly.environment import Environment
from harness.nightly.exchange import read_tables, write_tables
from harness.nightly.history_file import READABLE, check, is_empty, prepare, seal
from harness.nightly.measurement import (
    Acceptance,
    Better,
    CellRow,
    Kind,
    Measurement,
    begins_with_a_date,
    check_measurement,
    check_text,
    check_texts,
    in_time,
    readings,
)

_WAIT = 30.0  # seconds for other writers
_REMEDIES = {
    "SQLITE_FULL": "nothing of this was written; make room",
    "SQLITE_IOERR": "all is as before; the disk, a quota or a limit of the size of files (ulimit -f) refused",
    "SQLITE_BUSY": f"another process has held it for {_WAIT:.0f} s; try again",
    "SQLITE_CORRUPT": "it is damaged; take a copy from before, or name another file",
    "SQLITE_NOTADB": "it is damaged or no history; take a copy from before, or name another file",
    "SQLITE_READONLY_ROLLBACK": "a write was cut off here; whoever may write the file takes it back by any command",
    "SQLITE_READONLY": "nothing of this was written; make the file and its folder writable",
}
"""By the beginning of SQLite's name of an error, the longer ones first."""
_CELL = "night, digest, revision, cell, attempt, outcome, seconds, memory, summary"
_EXPORTED = {
    "readings": "SELECT night, facts, revision, metric, better, kind, measurements.made, place, value FROM measurements "
    "JOIN readings ON measurement = measurements.id JOIN environments ON environment = environments.id ORDER BY measurements.id, place",
    "acceptances": "SELECT metric, night, until, reason, made FROM acceptances ORDER BY id",
    "cells": "SELECT night, facts, revision, cell, attempt, outcome, seconds, memory, summary, made FROM cells "
    "JOIN environments ON environment = environments.id ORDER BY cells.id",
}


class History:
    """A file of measurements. The file is made when the first row is written."""

    def __init__(self, path: str | Path) -> None:
        """Open a history.

        Args:
            path: of the file.

        Raises:
            HistoryError: it is there and is no history, is damaged, or comes from a later version.
        """
        self.path = Path(path)
        if self.path.is_dir():
            raise HistoryError(f"{self.path}: is a folder, and a history is one file; name a file such as history.sqlite")
        if self.path.exists():
            with self._open() as database:
                schema = check(database, self.path)
            if schema < READABLE:
                with self._open(write=True):  # which brings it up to date
                    pass

    def add(
        self,
        metric: str,
        values: Sequence[float],
        *,
        environment: Environment,
        night: str | None = None,
        revision: str = "",
        better: Better = "lower",
        kind: Kind = "series",
    ) -> Measurement:
        """Write what a night measured of a metric.

        Args:
            metric: its name, such as `reference/w4a16/compress_ratio`.
            values: the repetitions; numbers, finite and above 0 (of the kind `paired` also 0), at least one.
            environment: where they were measured.
            night: label that sorts by time; by default today's date in UTC.
            revision: of the code.
            better: which way is better; the same for all nights of a metric.
            kind: how it is judged; likewise.

        Returns:
            The measurement.

        Raises:
            UserInputError: a text is none of one line, or a value is no number, not finite, not above 0, or beyond every unit.
            HistoryError: the file cannot be written; nothing of it was.
        """
        check_text("environment", environment.to_json())
        night = datetime.now(UTC).date().isoformat() if night is None else night
        made = Measurement(night, environment.digest, revision, metric, better, readings(metric, values), kind)
        self._write(environment, [made])
        return made

    def add_cell(self, row: CellRow, measurements: Sequence[Measurement], *, environment: Environment) -> None:
        """Write what became of a cell, and all that it measured, whole or not at all.

        Args:
            row: the attempt.
            measurements: of it.
            environment: where it ran; rows and measurements have its digest.

        Raises:
            UserInputError: as `add`.
            HistoryError: likewise; nothing was written.
        """
        self._write(environment, measurements, row)

    def _write(self, environment: Environment, measurements: Sequence[Measurement], row: CellRow | None = None) -> None:
        for one in measurements:
            check_measurement(one)
        if row is not None:
            check_texts(row)
        with self._open(write=True) as database:
            for one in measurements:
                self._insert(database, one, environment.to_json(), _now())
            if row is not None:
                self._insert_cell(database, row, environment.to_json(), _now())

    def _check_kind(self, database: sqlite3.Connection, one: Measurement) -> None:
        """A metric is judged in one way."""
        known = database.execute("SELECT better, kind FROM measurements WHERE metric = ? LIMIT 1", (one.metric,)).fetchone()
        for name, before, now in zip(("better", "kind"), known or (), (one.better, one.kind), strict=False):
            if before != now:
                raise UserInputError(f"{one.metric}: {name}={now!r} was given, and its nights so far say {before!r}; give it another name")

    def _check_label(self, database: sqlite3.Connection, night: str) -> None:
        """Labels of nights sort by time only among their like."""
        is_date = begins_with_a_date(night)
        for (known,) in database.execute("SELECT night FROM measurements UNION SELECT night FROM cells LIMIT 1"):
            if begins_with_a_date(known) != is_date:
                raise UserInputError(f"night: {night!r} was given beside {known!r}; labels of one kind sort by time, so keep to it")

    def accept(self, metric: str, night: str, reason: str, until: str = "") -> Acceptance:
        """Write that a change is meant.

        Args:
            metric: its name; it must have a measurement in that night.
            night: the first one of the new level.
            reason: why; shown wherever the change is.
            until: last day on which this counts, YYYY-MM-DD, in UTC; empty: for good.

        Returns:
            The acceptance.

        Raises:
            UserInputError: there is no such measurement, the reason is blank, or the day is none, or has passed.
        """
        if not TEXT.holds(reason):
            raise UserInputError("reason: it is blank, and nobody would know why the change is meant; give a sentence")
        accepted = Acceptance(metric, night, until, " ".join(reason.split()))
        check_texts(accepted)
        with self._open(write=True) as database:
            if until:
                nights = [night for (night,) in database.execute("SELECT DISTINCT night FROM measurements WHERE metric = ?", (metric,))]
                _check_until(until, max(nights, key=in_time, default=""))
            found = database.execute("SELECT 1 FROM measurements WHERE metric = ? AND night = ? LIMIT 1", (metric, night)).fetchone()
            if found is None:
                show = shlex.join(["harness", "nightly", "show", "--history", str(self.path), "--", metric])
                raise UserInputError(f"{metric}: night {night!r} has no measurement of it; see {show}")
            row = (*astuple(accepted), _now())
            database.execute("INSERT INTO acceptances (metric, night, until, reason, made) VALUES (?, ?, ?, ?, ?)", row)
        return accepted

    def metrics(self) -> list[str]:
        """Return the names of all metrics, sorted."""
        return [row[0] for row in self._read("SELECT DISTINCT metric FROM measurements ORDER BY metric")]

    def nights(self) -> list[tuple[str, int, int]]:
        """Return night, number of metrics and number of readings of each night, sorted."""
        query = (
            "SELECT night, COUNT(DISTINCT metric), COUNT(*) FROM measurements JOIN readings ON measurement = measurements.id GROUP BY night"
        )
        found = [(str(night), int(metrics), int(readings)) for night, metrics, readings in self._read(query)]
        return sorted(found, key=lambda one: in_time(one[0]))

    def series(self, metric: str) -> list[Measurement]:
        """Return all measurements of a metric, by night and then in the order in which they were written.

        Args:
            metric: its name.

        Returns:
            The measurements; those of one night, environment and revision are one, with all their values.
        """
        grouped: dict[tuple[str, str, str, Better, Kind], list[float]] = {}
        rows = self._read(
            "SELECT measurements.id, night, digest, revision, better, kind FROM measurements JOIN environments "
            "ON environment = environments.id WHERE metric = ? ORDER BY measurements.id",
            (metric,),
        )
        rows.sort(key=lambda row: in_time(row[1]))
        values = {one: grouped.setdefault((night, *facts), []) for one, night, *facts in rows}
        own = "measurement IN (SELECT id FROM measurements WHERE metric = ?)"
        for one, value in self._read(f"SELECT measurement, value FROM readings WHERE {own} ORDER BY measurement, place", (metric,)):
            if one in values:  # else it was written just now
                values[one].append(value)
        return [
            Measurement(night, digest, revision, metric, better, tuple(found), kind)
            for (night, digest, revision, better, kind), found in grouped.items()
        ]

    def cells(self, night: str | None = None) -> list[CellRow]:
        """Return all attempts at cells, in the order in which they ended.

        Args:
            night: only those of this one.

        Returns:
            The rows.
        """
        query = (
            f"SELECT {_CELL} FROM cells JOIN environments ON environment = environments.id WHERE :night IS NULL OR night = :night "
            "ORDER BY made, cells.id"
        )
        return [CellRow(*row) for row in self._read(query, {"night": night})]

    def acceptances(self, metric: str) -> list[Acceptance]:
        """Return what was accepted of a metric, in the order in which it was."""
        rows = self._read("SELECT metric, night, until, reason FROM acceptances WHERE metric = ? ORDER BY made, id", (metric,))
        return [Acceptance(*row) for row in rows]

    def environment(self, digest: str) -> Environment:
        """Return the environment of a digest.

        Args:
            digest: 12 hexadecimal digits, as measurements name it.

        Returns:
            The environment.

        Raises:
            UserInputError: no measurement has it.
        """
        rows = self._read("SELECT facts FROM environments WHERE digest = ?", (digest,))
        if not rows:
            raise UserInputError(f"environment {digest}: no measurement of {self.path} has it; give one that `series` names")
        return Environment(json.loads(rows[0][0]))

    def export(self, target: Path) -> dict[str, int]:
        """Write all readings as a table, or all that there is as an archive of tables; with the facts of environments, whole or not at all.

        Args:
            target: a .csv, .parquet or .zip; one that is there is replaced.

        Returns:
            How many readings, acceptances and cells there are; only a .zip takes the latter two.
        """
        tables = {name: self._read(query) for name, query in _EXPORTED.items()}
        write_tables(target, tables)
        return {name: len(rows) for name, rows in tables.items()}

    def read_in(self, source: Path) -> dict[str, int]:
        """Add what `export` wrote, all or nothing; what is there already is passed over.

        Args:
            source: a file that `export` wrote.

        Returns:
            How many measurements, acceptances and cells were new.

        Raises:
            UserInputError: the file is none of these, a row is wrong, or contradicts what is there; it is named, and nothing was added.
        """
        found = read_tables(source)
        with self._open(write=True) as database:
            measurements = sum(self._take_in(database, source, *key, tuple(values)) for key, values in found.measured.items())
            acceptances = sum(self._take_acceptance(database, source, *one) for one in found.accepted)
            cells = sum(self._take_cell(database, source, *one) for one in found.ended)
        return {"measurements": measurements, "acceptances": acceptances, "cells": cells}

    def _take_in(
        self, database: sqlite3.Connection, source: Path, one: Measurement, facts: str, made: str, values: tuple[float, ...]
    ) -> bool:
        """Add a measurement; False where it is there already."""
        there = database.execute(
            "SELECT value FROM readings JOIN measurements ON measurement = measurements.id JOIN environments "
            "ON environment = environments.id WHERE metric = ? AND night = ? AND digest = ? AND revision = ? AND made = ? "
            "ORDER BY measurements.id, place",
            (one.metric, one.night, one.environment, one.revision, made),
        ).fetchall()
        with _named(f"{source}: {one.metric} of {one.night}, made {made}"):
            if not there:
                self._insert(database, replace(one, values=values), facts, made)
            elif (known := tuple(value for (value,) in there)) != values:
                raise UserInputError(f"is {_some(values)} there and {_some(known)} in {self.path}")
        return not there

    def _take_acceptance(self, database: sqlite3.Connection, source: Path, one: Acceptance, made: str) -> bool:
        row = (*astuple(one), made)
        there = "SELECT 1 FROM acceptances WHERE metric = ? AND night = ? AND until = ? AND reason = ? AND made = ?"
        if database.execute(there, row).fetchone():
            return False
        if not database.execute("SELECT 1 FROM measurements WHERE metric = ? AND night = ?", row[:2]).fetchone():
            raise UserInputError(f"{source}: {one.metric} was accepted since {one.night}, which has no reading of it; nothing was added")
        database.execute("INSERT INTO acceptances (metric, night, until, reason, made) VALUES (?, ?, ?, ?, ?)", row)
        return True

    def _take_cell(self, database: sqlite3.Connection, source: Path, row: CellRow, facts: str, made: str) -> bool:
        there = database.execute(
            f"SELECT {_CELL} FROM cells JOIN environments ON environment = environments.id "
            "WHERE night = ? AND digest = ? AND revision = ? AND cell = ? AND attempt = ? AND made = ?",
            (row.night, row.environment, row.revision, row.cell, row.attempt, made),
        ).fetchone()
        with _named(f"{source}: cell {row.cell} of {row.night}, made {made}"):
            if there is None:
                self._insert_cell(database, row, facts, made)
            elif CellRow(*there) != row:
                raise UserInputError(f"ended otherwise in {self.path}")
        return there is None

    def _insert(self, database: sqlite3.Connection, one: Measurement, facts: str, made: str) -> None:
        self._check_label(database, one.night)
        self._check_kind(database, one)
        database.execute("INSERT OR IGNORE INTO environments (digest, facts) VALUES (?, ?)", (one.environment, facts))
        cursor = database.execute(
            "INSERT INTO measurements (night, environment, revision, metric, better, kind, made) "
            "SELECT ?, id, ?, ?, ?, ?, ? FROM environments WHERE digest = ?",
            (one.night, one.revision, one.metric, one.better, one.kind, made, one.environment),
        )
        rows = [(cursor.lastrowid, place, value) for place, value in enumerate(one.values)]
        database.executemany("INSERT INTO readings (measurement, place, value) VALUES (?, ?, ?)", rows)

    def _insert_cell(self, database: sqlite3.Connection, row: CellRow, facts: str, made: str) -> None:
        self._check_label(database, row.night)
        database.execute("INSERT OR IGNORE INTO environments (digest, facts) VALUES (?, ?)", (row.environment, facts))
        night, digest, *rest = astuple(row)
        database.execute(
            "INSERT INTO cells (night, environment, revision, cell, attempt, outcome, seconds, memory, summary, made) "
            "SELECT ?, id, ?, ?, ?, ?, ?, ?, ?, ? FROM environments WHERE digest = ?",
            (night, *rest, made, digest),
        )

    def _read(self, query: str, values: tuple[Any, ...] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        if not self.path.exists():
            return []
        with self._open() as database:
            return [] if is_empty(database, self.path) else database.execute(query, values).fetchall()

    @contextmanager
    def _open(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """Give a connection; with `write`, one transaction that ends whole or leaves nothing."""
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            if _is_cut(self.path):
                raise HistoryError(f"{self.path}: is empty, and nobody is making it; take a copy from before, or delete it")
            # a reader may write, too: SQLite takes back what a kill cut off before it gives any row
            address = self.path.absolute().as_uri() + ("?mode=rwc" if write else "?mode=rw")
            database = sqlite3.connect(address, timeout=_WAIT, uri=True, isolation_level=None)
            try:
                database.execute("PRAGMA foreign_keys = ON" if write else "PRAGMA query_only = ON")
                if write:
                    database.execute("PRAGMA synchronous = FULL")
                database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                if write:
                    prepare(database, self.path)
                yield database
                if write:
                    seal(database)
                    database.execute("COMMIT")
            finally:
                database.close()  # what was not committed is gone
        except UnicodeDecodeError as error:  # SQLite's own text, which tells of what it has found in the file
            raise HistoryError(f"{self.path}: is damaged (its tables have no names); take a copy from before") from error
        except (sqlite3.Error, OSError) as error:
            raise HistoryError(
                f"{self.path}: the history cannot be {'written' if write else 'read'} ({error}); {_remedy(error)}"
            ) from error


def _is_cut(path: Path) -> bool:
    """Whether a file holds no byte, and not because another writer has just made it."""
    if not path.exists():
        return False
    found = path.stat()
    return found.st_size == 0 and time.time() - found.st_mtime > _WAIT


def _check_until(until: str, last_night: str) -> None:
    """Refuse a last day on which the word would count no more: before today, or before the night that is judged."""
    try:
        day = date.fromisoformat(until)
    except (TypeError, ValueError):
        day = None
    if day is None or day.isoformat() != until:  # Python reads 20260217 and 2026-W08-2, too, which do not sort with others
        raise UserInputError(f"until: {until!r} is no day; write it as YYYY-MM-DD")
    now = max(_now()[:10], last_night[:10]) if begins_with_a_date(last_night) else _now()[:10]
    if day.isoformat() < now:
        raise UserInputError(f"until: {until} has passed on {now}, and the change would count again at once; name that day or a later one")


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Say of which row of an import an error is."""
    try:
        yield
    except UserInputError as error:
        raise UserInputError(f"{where}: {error}; nothing was added") from error


def _some(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values[:3]) + (", ..." if len(values) > 3 else "")


def _remedy(error: Exception) -> str:
    of_python = "SQLITE_CORRUPT" if isinstance(error, sqlite3.Error) else ""  # which finds a text that is none
    name = getattr(error, "sqlite_errorname", of_python)
    return next((remedy for start, remedy in _REMEDIES.items() if name.startswith(start)), "look at the file and its folder")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
