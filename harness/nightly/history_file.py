"""The file of a history: its tables, which versions there are, and whether what it holds is what was written.

Every transaction ends with a seal, a digest of all rows and of the text of the tables. SQLite's own check sees pages, not the bits of a
value: of 1500 files with one flipped bit 6 gave another verdict.
"""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from itertools import starmap
from pathlib import Path
from typing import Any

from harness.errors import HistoryError

SCHEMA = 3
"""Of the file, in its `user_version`: 2 has cells and kinds of metrics, 3 seals."""
READABLE = 2
"""Files from this version on are read as they are; one without a seal gets it when it is next written to."""
_MARK = 0x636E6967  # application_id, so that another program's database is not taken for a history
_TABLES = {
    "environments": "(id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, facts TEXT NOT NULL)",
    "measurements": "(id INTEGER PRIMARY KEY, night TEXT NOT NULL, environment INTEGER NOT NULL REFERENCES environments, "
    "revision TEXT NOT NULL, metric TEXT NOT NULL, better TEXT NOT NULL, made TEXT NOT NULL, kind TEXT NOT NULL DEFAULT 'series')",
    "readings": "(measurement INTEGER NOT NULL REFERENCES measurements, place INTEGER NOT NULL, value REAL NOT NULL, "
    "PRIMARY KEY (measurement, place)) WITHOUT ROWID",
    "acceptances": "(id INTEGER PRIMARY KEY, metric TEXT NOT NULL, night TEXT NOT NULL, until TEXT NOT NULL, reason TEXT NOT NULL, "
    "made TEXT NOT NULL)",
    "cells": "(id INTEGER PRIMARY KEY, night TEXT NOT NULL, environment INTEGER NOT NULL REFERENCES environments, revision TEXT NOT NULL, "
    "cell TEXT NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL, seconds REAL NOT NULL, memory INTEGER NOT NULL, "
    "summary TEXT NOT NULL, made TEXT NOT NULL)",
    "seals": "(id INTEGER PRIMARY KEY, digest TEXT NOT NULL)",
}
_ALL = "SELECT * FROM {} NOT INDEXED ORDER BY 1, 2"
_APART = ("readings", "seals")
_READING = struct.Struct("<qqd")
_INDEX = "CREATE INDEX measurements_by_metric ON measurements (metric, environment, night)"


def is_empty(database: sqlite3.Connection, path: Path) -> bool:
    """Whether nothing was written to a database; one that bears our mark has lost its tables, one of one byte is none, to SQLite empty."""
    return path.stat().st_size != 1 and not (
        _pragma(database, "application_id") or database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    )


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


def prepare(database: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new file; look at those of one that is there, and bring an older one up to date.

    Args:
        database: within a transaction; changed.
        path: of it, for errors.

    Raises:
        HistoryError: as `check`.
    """
    if not is_empty(database, path):
        check(database, path)
    else:
        for name in ("environments", "measurements", "readings", "acceptances"):
            _make(database, name)
        database.execute(_INDEX)
        database.execute(f"PRAGMA application_id = {_MARK}")
    if "kind" not in [column[1] for column in _columns(database, "measurements")]:
        database.execute("ALTER TABLE measurements ADD COLUMN kind TEXT NOT NULL DEFAULT 'series'")
    for name in ("cells", "seals"):
        if not _columns(database, name):
            _make(database, name)
    database.execute(f"PRAGMA user_version = {SCHEMA}")


def _columns(database: sqlite3.Connection, name: str) -> list[tuple[Any, ...]]:
    return database.execute(f"PRAGMA table_info({name})").fetchall()


def _make(database: sqlite3.Connection, name: str) -> None:
    database.execute(f"CREATE TABLE {name} {_TABLES[name]}")
    for event in ("UPDATE", "DELETE"):
        database.execute(
            f"CREATE TRIGGER {name}_{event.lower()} BEFORE {event} ON {name} "
            "BEGIN SELECT RAISE(ABORT, 'rows of a history are never changed'); END"
        )


def seal(database: sqlite3.Connection) -> None:
    """Write down what all rows are, at the end of a transaction that has changed them."""
    digest = _digest(database)
    if _sealed(database) != digest:
        database.execute("INSERT INTO seals (digest) VALUES (?)", (digest,))


def _sealed(database: sqlite3.Connection) -> str:
    last = database.execute("SELECT digest FROM seals ORDER BY id DESC LIMIT 1").fetchone()
    return str(last[0]) if last else ""


def check(database: sqlite3.Connection, path: Path) -> int:
    """Look at a whole file.

    Args:
        database: within a transaction, lest another writer comes between two looks.
        path: of it, for errors.

    Returns:
        The version of the file; one that nothing was written to, or that another writer is making just now, has ours.

    Raises:
        HistoryError: it is no history, comes from a later version, or is damaged.
    """
    if is_empty(database, path):
        return SCHEMA
    mark, schema = _pragma(database, "application_id"), _pragma(database, "user_version")
    if mark != _MARK:
        raise HistoryError(f"{path}: is no history of harness nightly; name another file")
    if schema > SCHEMA:
        raise HistoryError(f"{path}: has version {schema}, and this harness reads up to {SCHEMA}; use a newer harness")
    if damage := _damage(database, schema):
        raise HistoryError(f"{path}: is damaged ({damage}); take a copy from before, or name another file")
    return schema


def _damage(database: sqlite3.Connection, schema: int) -> str:
    """What is wrong with a file, in words; empty where nothing is."""
    state = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if state != "ok":
        return " ".join(state.split())
    if schema < SCHEMA and not _columns(database, "seals"):
        return _wrong_kind(database)
    try:
        return "" if _sealed(database) == _digest(database) else "its rows are not those that were written"
    except struct.error:
        return "a reading is no number"


def _digest(database: sqlite3.Connection) -> str:
    """Of the rows themselves: an index holds some of them, too. Readings are by far the most, and packed in half the time."""
    digest = hashlib.sha256()
    for query in (
        "SELECT type, name, sql FROM sqlite_master ORDER BY name",
        *(_ALL.format(name) for name in _TABLES if name not in _APART),
    ):
        for row in database.execute(query):
            digest.update(repr(row).encode())
    digest.update(b"".join(starmap(_READING.pack, database.execute(_ALL.format("readings")))))
    return digest.hexdigest()


def _wrong_kind(database: sqlite3.Connection) -> str:
    """What a file without seals holds that none of our writers has written, as a number for a text, or a measurement without readings."""
    for name in _TABLES:
        for _, column, kind, *_ in _columns(database, name):
            if database.execute(f"SELECT 1 FROM {name} WHERE typeof({column}) != ? LIMIT 1", (kind.lower(),)).fetchone():
                return f"{name}.{column} is not {kind} everywhere"
    if database.execute("PRAGMA foreign_key_check").fetchone():
        return "a row belongs to none that is there"
    without = "SELECT 1 FROM measurements WHERE id NOT IN (SELECT measurement FROM readings) LIMIT 1"
    return "a measurement has no readings" if database.execute(without).fetchone() else ""
