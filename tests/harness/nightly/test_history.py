"""A history loses nothing and changes nothing, whoever writes, and whatever becomes of the file."""

from __future__ import annotations

import itertools
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import date, timedelta
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet

from compressor.errors import CheckpointError, OutputError, UserInputError
from harness.errors import HistoryError
from harness.nightly import History
from harness.nightly.environment import Environment
from harness.nightly.exchange import check_target
from harness.nightly.history_file import seal
from harness.nightly.judging.judge import judge
from harness.nightly.measurement import CellRow, Measurement
from harness.reporting.verdict import Verdict

HERE, ELSEWHERE = Environment({"device": "cpu"}), Environment({"device": "cuda", "gpu": "one"})


ENDED = CellRow("1", HERE.digest, "r", "c", 1, "pass", 1.0, 1, "")


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "some folder" / "h #1?.sqlite")


def test_what_was_written_is_read_back_in_order(history: History) -> None:
    history.add("b", [2.0, 1.0], environment=HERE, night="2026-01-02", revision="r")
    history.add("b", [3.0], environment=HERE, night="2026-01-01", revision="r")
    history.add("b", [1e-60], environment=HERE, night="2026-01-02", revision="r")
    history.add("a", [5.0], environment=ELSEWHERE, night="2026-01-02", better="higher")
    again = History(history.path)
    assert again.metrics() == ["a", "b"]
    assert [(one.night, one.values) for one in again.series("b")] == [("2026-01-01", (3.0,)), ("2026-01-02", (2.0, 1.0, 1e-60))]
    assert again.nights() == [("2026-01-01", 1, 1), ("2026-01-02", 2, 4)]
    assert again.environment(again.series("a")[0].environment) == ELSEWHERE
    assert ELSEWHERE.changes(HERE) == ["device: cpu -> cuda", "gpu: unknown -> one"]


def test_nothing_is_written_before_the_first_measurement(history: History) -> None:
    assert history.metrics() == [] and history.series("a") == []
    assert not history.path.exists()


def test_a_file_that_another_writer_is_making_is_no_foreign_one(history: History) -> None:
    history.path.parent.mkdir()
    history.path.touch()  # as it is between its making and the first commit
    other = History(history.path)
    assert other.metrics() == [] == other.nights()
    other.add("a", [1.0], environment=HERE)
    assert history.metrics() == ["a"]


def test_a_file_that_was_cut_to_nothing_is_no_new_one(history: History) -> None:
    history.add("a", [1.0], environment=HERE)
    history.path.write_bytes(b"")
    os.utime(history.path, (0, time.time() - 60))
    for look in (history.metrics, lambda: history.series("a"), lambda: history.add("a", [1.0], environment=HERE)):
        with pytest.raises(HistoryError, match="is empty, and nobody is making it; take a copy from before, or delete it"):
            look()
    assert history.path.read_bytes() == b""


@pytest.mark.parametrize("statement", ["UPDATE readings SET value = 0", "DELETE FROM measurements", "DELETE FROM acceptances"])
def test_no_row_is_ever_changed(history: History, statement: str) -> None:
    history.add("a", [1.0], environment=HERE, night="n")
    history.accept("a", "n", "meant")
    with closing(sqlite3.connect(history.path)) as database, pytest.raises(sqlite3.IntegrityError, match="never changed"):
        database.execute(statement)


@pytest.mark.parametrize(
    ("metric", "values", "night", "message"),
    [
        ("a", [], "n", "a: no value was given"),
        ("a", [1.0, float("nan")], "n", "a: the value nan is not finite and above 0"),
        ("a", [0.0], "n", r"a: the value 0\.0 is not finite and above 0"),
        ("a", [10**400], "n", "a: a value is too large for a number of 64 bits"),
        ("a", [Fraction(10**400, 3)], "n", "a: a value is too large for a number of 64 bits"),
        ("a", [1.0, 1.1e60], "n", "a: a value is not between 1e-60 and 1e.60"),
        ("a", [0.9e-60], "n", "a: a value is not between 1e-60 and 1e.60"),
        ("a", "12", "n", "a: '12' was given, where a list of numbers belongs"),
        ("a", [True], "n", r"a: \[True\] was given, where a list of numbers belongs"),
        ("a", torch.tensor([True, False]), "n", "where a list of numbers belongs"),
        ("a", np.ones((2, 1)), "n", "where a list of numbers belongs"),
        ("a", {1.5, 2.5}, "n", "where a list of numbers belongs"),
        (" ", [1.0], "n", "metric: ' ' is no text of one line"),
        (7, [1.0], "n", "metric: 7 is no text of one line"),
        ("a", [1.0], 20260101, "night: 20260101 is no text of one line"),
        ("a", [1.0], "n\n", r"night: 'n\\n' is no text of one line"),
    ],
)
def test_what_is_no_measurement_is_refused_and_nothing_is_kept(history: History, metric, values, night, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        history.add(metric, values, environment=HERE, night=night)
    assert history.metrics() == []


TEXTS = {
    "metric": lambda history, text: history.add(text, [1.0], environment=HERE, night="1"),
    "night": lambda history, text: history.add("m", [1.0], environment=HERE, night=text),
    "revision": lambda history, text: history.add("m", [1.0], environment=HERE, night="1", revision=text),
    "environment": lambda history, text: history.add("m", [1.0], environment=Environment({"gpu": text}), night="1"),
    "reason": lambda history, text: history.accept("m", "1", text),
    "until": lambda history, text: history.accept("m", "1", "meant", text),
    "cell": lambda history, text: history.add_cell(replace(ENDED, cell=text), [], environment=HERE),
    "summary": lambda history, text: history.add_cell(replace(ENDED, summary=text), [], environment=HERE),
}


@pytest.mark.parametrize("day", ["29991205", "2999-W08-2", "2999-12-5"])
def test_a_last_day_is_written_in_one_way(history: History, day: str) -> None:
    history.add("m", [1.0], environment=HERE, night="1")
    with pytest.raises(UserInputError, match=f"until: '{day}' is no day; write it as YYYY-MM-DD"):
        history.accept("m", "1", "meant", day)


ANY_TEXT = ["abc\r", "a\r\nb", "a\x00b", "\ud800", "\x1b[31mred", "\u2028", "\ufeffx", " x", "a,b", 'a"b', "none", "\xfc"]


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_comes_back_from_every_table_or_is_refused(history: History, tmp_path: Path, name: str) -> None:
    history.add("m", [1.0], environment=HERE, night="1")
    for text in ANY_TEXT:
        if text.isprintable() and name != "until":
            TEXTS[name](history, text)
            continue
        # lines of a reason are joined, and JSON writes control characters of a fact as escapes
        with suppress(UserInputError) if name in ("reason", "environment") else pytest.raises(UserInputError, match=f"{name}: "):
            TEXTS[name](history, text)
    for ending in ("csv", "parquet", "zip"):
        history.export(tmp_path / f"all.{ending}")
        other = History(tmp_path / f"{ending}.sqlite")
        other.read_in(tmp_path / f"all.{ending}")
        whole = slice(None if ending == "zip" else 1)
        assert _all_of(other)[whole] == _all_of(history)[whole]


def test_a_metric_has_one_better_way(history: History) -> None:
    history.add("a", [1.0], environment=HERE, night="1")
    with pytest.raises(UserInputError, match="a: better='higher' was given, and its nights so far say 'lower'"):
        history.add("a", [1.0], environment=HERE, night="2", better="higher")
    assert len(history.series("a")) == 1


@pytest.mark.parametrize(
    ("night", "reason", "until", "message"),
    [
        ("1", "r", None, "until: None is no text"),
        ("1", " ", "", "reason: it is blank"),
        ("2", "r", "", "night '2' has no measurement"),
        ("1", "r", "soon", "until: 'soon' is no day"),
    ],
)
def test_an_acceptance_needs_a_night_a_reason_and_a_day(history: History, night: str, reason: str, until: str, message: str) -> None:
    history.add("a", [1.0], environment=HERE, night="1")
    with pytest.raises(UserInputError, match=message):
        history.accept("a", night, reason, until)
    assert history.acceptances("a") == []


@pytest.mark.parametrize(
    ("night", "day", "told"),
    [("1", "2026-01-01", "2026-01-01 has passed on "), ("2999-01-05.2", "2999-01-04", "2999-01-04 has passed on 2999-01-05")],
)
def test_an_acceptance_that_would_have_ended_at_once_is_refused(history: History, night: str, day: str, told: str) -> None:
    history.add("a", [1.0], environment=HERE, night=night)
    with pytest.raises(UserInputError, match=f"until: {told}.*name that day or a later one"):
        history.accept("a", night, "meant", day)
    assert history.acceptances("a") == []
    assert history.accept("a", night, "meant", "2999-01-05").until == "2999-01-05"


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:8192] = b"\xff" * 4096
    path.write_bytes(data)


def _damage_schema(path: Path) -> None:
    """Within the text of a table, which SQLite shows in its error as it stands there."""
    data = bytearray(path.read_bytes())
    at = data.index(b"CREATE TABLE environments")
    data[at : at + 64] = b"\xff" * 64
    path.write_bytes(data)


def _foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")


DAMAGES = {
    "text": (lambda path: path.write_text("no database at all " * 99), "damaged or no history"),
    "page": (_damage, "damaged"),
    "schema": (_damage_schema, "damaged"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:5000]), "damaged"),
    "one byte": (lambda path: path.write_bytes(b"3"), "is no history of harness nightly"),
    "foreign": (_foreign, "is no history of harness nightly"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_or_foreign_file_is_told_and_left_alone(history: History, kind: str) -> None:
    for number in range(40):
        history.add(f"metric {number}", [1.0] * 20, environment=HERE, night="1")
    damage, message = DAMAGES[kind]
    damage(history.path)
    before = history.path.read_bytes()
    with pytest.raises(HistoryError, match=message):
        History(history.path)
    with pytest.raises(HistoryError):
        history.add("a", [1.0], environment=HERE, night="2")
    assert history.path.read_bytes() == before


def _with_nights(history: History) -> bytes:
    for number in range(30):
        history.add("m", [1.5 + number, 2.5], environment=HERE, night=f"2026-01-{number + 1:02}", revision="r")
    history.accept("m", "2026-01-05", "meant")
    return history.path.read_bytes()


@pytest.mark.parametrize("written", [struct.pack(">d", 25.5), b"2026-01-24", b"meant", b"cpu"])
def test_one_bit_of_a_row_is_told_by_whatever_opens_the_file(history: History, written: bytes) -> None:
    data = bytearray(_with_nights(history))
    assert written in data
    data[data.rindex(written) + len(written) - 1] ^= 1
    history.path.write_bytes(data)
    with pytest.raises(HistoryError, match=f"{re.escape(str(history.path))}: is damaged"):
        History(history.path)
    with pytest.raises(HistoryError, match="is damaged"):
        history.add("m", [1.0], environment=HERE, night="2026-02-01")
    assert history.path.read_bytes() == data


def test_any_bit_of_the_file_is_told_or_changes_nothing_that_is_read(history: History) -> None:
    sound, rng = _with_nights(history), random.Random(0)
    before, told = _all_of(history), 0
    for _ in range(200):
        data = bytearray(sound)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        history.path.write_bytes(data)
        try:
            assert _all_of(History(history.path)) == before
        except HistoryError as error:
            told += str(history.path) in str(error)
    assert told > 20


@pytest.mark.parametrize("has_seals", [True, False])
def test_pages_that_a_disk_has_swapped_are_told(history: History, has_seals: bool) -> None:
    _with_nights(history)
    if not has_seals:
        _without_seals(history.path)
    sound = history.path.read_bytes()
    pages = [sound[start : start + 4096] for start in range(0, len(sound), 4096)]
    for first, second in itertools.combinations(range(len(pages)), 2):
        swapped = list(pages)
        swapped[first], swapped[second] = pages[second], pages[first]
        history.path.write_bytes(b"".join(swapped))
        with pytest.raises(HistoryError, match=re.escape(str(history.path))):
            _all_of(History(history.path))


def _without_seals(path: Path) -> None:
    """As before version 3."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript("DROP TABLE seals; PRAGMA user_version = 2; VACUUM")


def test_a_file_from_before_seals_is_read_as_it_is_and_sealed_by_the_next_write(history: History) -> None:
    _with_nights(history)
    before = _all_of(history)
    _without_seals(history.path)
    old = history.path.read_bytes()
    assert _all_of(History(history.path)) == before and history.path.read_bytes() == old
    history.add("m", [25.25], environment=HERE, night="2026-02-01")
    assert len(History(history.path).series("m")) == 31
    history.path.write_bytes(history.path.read_bytes().replace(struct.pack(">d", 25.25), struct.pack(">d", 25.75)))
    with pytest.raises(HistoryError, match="its rows are not those that were written"):
        History(history.path)


def test_a_file_of_version_1_is_brought_up_to_date_with_all_that_it_holds(history: History) -> None:
    history.add("a", [1.0, 2.0], environment=HERE, night="1")
    history.accept("a", "1", "meant")
    before = history.series("a"), history.acceptances("a")
    with closing(sqlite3.connect(history.path)) as database:
        database.executescript("DROP TABLE cells; DROP TABLE seals; ALTER TABLE measurements DROP COLUMN kind; PRAGMA user_version = 1")
    again = History(history.path)
    assert (again.series("a"), again.acceptances("a"), again.cells()) == (*before, [])
    again.add("b", [0.0, 3.0], environment=HERE, night="1", kind="paired")
    assert History(history.path).series("b")[0].kind == "paired"


def test_a_later_version_is_refused(history: History) -> None:
    history.add("a", [1.0], environment=HERE, night="1")
    with closing(sqlite3.connect(history.path)) as database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(HistoryError, match="has version 7, and this harness reads up to 3"):
        History(history.path)


def test_a_disk_that_is_full_leaves_what_was_there(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    history.add("a", [1.0], environment=HERE, night="1")
    connect = sqlite3.connect

    def small(*args, **kwargs):
        database = connect(*args, **kwargs)
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
        return database

    monkeypatch.setattr(sqlite3, "connect", small)
    with pytest.raises(HistoryError, match=r"full.*nothing of this was written; make room"):
        history.add("a", [2.0] * 5000, environment=HERE, night="2")
    monkeypatch.undo()
    assert [one.values for one in history.series("a")] == [(1.0,)]


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """As `ulimit -f` or a quota has it; the kernel refuses what would go beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_that_the_kernel_keeps_leaves_what_was_there(history: History, tmp_path: Path) -> None:
    history.add("a", [1.0] * 200, environment=HERE, night="1")
    with files_no_larger_than(history.path.stat().st_size), pytest.raises(HistoryError, match="all is as before; the disk, a quota"):
        history.add("a", [2.0] * 5000, environment=HERE, night="2")
    assert [one.values for one in History(history.path).series("a")] == [(1.0,) * 200]
    history.export(tmp_path / "all.csv")
    before = (tmp_path / "all.csv").read_bytes()
    for name in ("all.csv", "all.zip"):
        with files_no_larger_than(100), pytest.raises(CheckpointError, match=f"{name}: cannot be written"):
            history.export(tmp_path / name)
    assert (tmp_path / "all.csv").read_bytes() == before and sorted(path.name for path in tmp_path.iterdir()) == ["all.csv", "some folder"]


def test_what_a_kill_in_the_middle_of_a_write_left_is_taken_back_by_whoever_looks(history: History, tmp_path: Path) -> None:
    for number in range(30):
        history.add(f"metric {number}", [1.0] * 20, environment=HERE, night="1")
    killed = tmp_path / "killed.sqlite"
    with closing(sqlite3.connect(history.path, isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 2")  # rows reach the file before the end of the transaction
        database.execute("BEGIN IMMEDIATE")
        database.executemany("INSERT INTO readings VALUES (1, ?, 7.0)", [(20 + place,) for place in range(20_000)])
        for suffix in ("", "-journal"):
            shutil.copy(f"{history.path}{suffix}", f"{killed}{suffix}")
    assert killed.stat().st_size > 100_000
    assert _all_of(History(killed)) == _all_of(history)
    assert not Path(f"{killed}-journal").exists() and killed.read_bytes()[100:] == history.path.read_bytes()[100:]


WRITER = """
import sys
from harness.nightly import History
from harness.nightly.environment import Environment
from harness.nightly.measurement import CellRow, Measurement
history = History(sys.argv[1])
for number in range(int(sys.argv[2])):
    history.add(sys.argv[3], [1.0 + number] * 7, environment=Environment({"device": "cpu"}), night=f"{number:05}")
    print(number, flush=True)
"""


def test_writers_at_once_lose_nothing_and_one_that_is_killed_leaves_whole_nights(history: History) -> None:
    def writer(name: str, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(history.path), str(count), name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})

    with writer("steady", 40) as steady, writer("killed", 100_000) as killed:
        for _ in range(15):
            assert killed.stdout is not None and killed.stdout.readline()
        killed.send_signal(signal.SIGKILL)
        steady.communicate(timeout=300)
    assert steady.returncode == 0 and killed.returncode != 0
    assert [one.values for one in history.series("steady")] == [(1.0 + number,) * 7 for number in range(40)]
    left = history.series("killed")
    assert len(left) >= 15 and [one.values for one in left] == [(1.0 + number,) * 7 for number in range(len(left))]


def test_readings_come_back_from_a_table_of_columns_bit_for_bit(history: History, tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 1e-60, 1e60]
    history.add("a", values, environment=HERE, night="2026-01-01", revision='r,"x"')
    history.add("k", [0.0, 2.0], environment=ELSEWHERE, night="2026-01-02", kind="paired")
    for _ in range(2):
        assert history.export(tmp_path / "all.parquet")["readings"] == 6
    told = parquet.read_table(tmp_path / "all.parquet")
    assert told["value"].to_pylist() == [*values, 0.0, 2.0] and told["place"].to_pylist() == [0, 1, 2, 3, 0, 1]
    other = History(tmp_path / "other.sqlite")
    assert [other.read_in(tmp_path / "all.parquet")["measurements"] for _ in range(2)] == [2, 0]
    assert [other.series(name) for name in "ak"] == [history.series(name) for name in "ak"]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "all.parquet").read_bytes()[:200])
    parquet.write_table(told.drop_columns("made").replace_schema_metadata(None), tmp_path / "less.parquet")
    for name, message in (("cut", "it is no parquet"), ("less", "its first line is not night,environment")):
        with pytest.raises(UserInputError, match=message):
            other.read_in(tmp_path / f"{name}.parquet")
        with pytest.raises(OutputError, match="was not written by harness nightly export, and is kept"):
            check_target(tmp_path / f"{name}.parquet")


def test_what_is_exported_comes_back_once(history: History, tmp_path: Path) -> None:
    history.add("a", [0.1, 1 / 3], environment=HERE, night="1", revision='r,"x"')
    history.add("b", [2.0], environment=ELSEWHERE, night="2", better="higher")
    assert history.export(tmp_path / "all.csv")["readings"] == 3
    other = History(tmp_path / "other.sqlite")
    (tmp_path / "all.csv").write_text((tmp_path / "all.csv").read_text(), "utf-8-sig")  # as a spreadsheet writes it
    assert [other.read_in(tmp_path / "all.csv")["measurements"] for _ in range(2)] == [2, 0]
    assert [other.series(name) for name in "ab"] == [history.series(name) for name in "ab"]


def _all_of(history: History) -> tuple[object, ...]:
    return [history.series(name) for name in history.metrics()], [history.acceptances(name) for name in history.metrics()], history.cells()


def _fill(history: History) -> CellRow:
    ended = CellRow("2", HERE.digest, "r", 'a/"b"/compress', 1, "timeout", 0.1, 7, "no verdict, in an hour")
    measured = Measurement("2", HERE.digest, "r", "b", "lower", (0.1, 3.0))
    history.add("a", [0.1, 1 / 3], environment=ELSEWHERE, night="1")
    history.add_cell(ended, [measured], environment=HERE)
    history.add_cell(replace(ended, attempt=2, outcome="pass", summary=""), [], environment=HERE)
    for reason in ("first, thought", "then"):
        history.accept("a", "1", reason, "2999-01-01" if reason == "then" else "")
    return ended


def test_an_archive_takes_acceptances_and_cells_along_and_adds_nothing_twice(history: History, tmp_path: Path) -> None:
    _fill(history)
    counts = {"readings": 4, "acceptances": 2, "cells": 2}
    assert history.export(tmp_path / "all.zip") == history.export(tmp_path / "again.zip") == counts
    assert (tmp_path / "all.zip").read_bytes() == (tmp_path / "again.zip").read_bytes()
    other = History(tmp_path / "other.sqlite")
    assert other.read_in(tmp_path / "all.zip") == {"measurements": 2, "acceptances": 2, "cells": 2}
    assert not any(other.read_in(tmp_path / "all.zip").values()) and _all_of(other) == _all_of(history)
    other.export(tmp_path / "back.zip")
    assert (tmp_path / "back.zip").read_bytes() == (tmp_path / "all.zip").read_bytes()


def test_what_was_accepted_last_counts_wherever_it_was_written(history: History, tmp_path: Path) -> None:
    history.add("a", [1.0], environment=HERE, night="1")
    history.export(tmp_path / "start.zip")
    other = History(tmp_path / "other.sqlite")
    other.read_in(tmp_path / "start.zip")
    history.accept("a", "1", "before")
    other.accept("a", "1", "later")
    history.export(tmp_path / "all.zip")
    other.read_in(tmp_path / "all.zip")
    assert [one.reason for one in other.acceptances("a")] == ["before", "later"]


@pytest.mark.parametrize(
    ("table", "old", "new", "told"),
    [
        ("acceptances", "first, thought", " ", "acceptances.csv:2: is no acceptance (its reason is blank)"),
        ("acceptances", "2999-01-01", "soon", "acceptances.csv:3: is no acceptance (until 'soon' is not"),
        ("acceptances", "a,1,", "a,7,", "a was accepted since 7, which has no reading of it"),
        ("cells", "timeout", "tired", "cells.csv:2: is no cell (outcome 'tired' is not"),
        ("cells", ",1,timeout", ",0,timeout", "cells.csv:2: is no cell (a name is blank, or a number below"),
        ("cells", "0.1,7", "0.1,seven", "cells.csv:2: is no cell (memory 'seven' is not"),
        ("cells", "night,", "nights,", "cells.csv: its first line is not night,environment"),
        ("cells", "", None, "cannot be read"),
    ],
)
def test_a_wrong_row_of_an_archive_is_named_and_nothing_is_added(
    history: History, tmp_path: Path, table: str, old: str, new: str | None, told: str
) -> None:
    _fill(history)
    history.export(tmp_path / "all.zip")
    with zipfile.ZipFile(tmp_path / "all.zip") as packed:
        texts = {name: packed.read(name).decode() for name in packed.namelist()}
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as packed:
        for name, text in texts.items():
            if new is not None or not name.startswith(table):
                packed.writestr(name, text.replace(old, new or "") if name.startswith(table) else text)
    other = History(tmp_path / "other.sqlite")
    with pytest.raises(UserInputError, match=re.escape(told)):
        other.read_in(tmp_path / "all.zip")
    assert _all_of(other) == ([], [], [])


def test_a_cell_that_ended_otherwise_contradicts(history: History, tmp_path: Path) -> None:
    ended = _fill(history)
    history.export(tmp_path / "all.zip")
    other = History(tmp_path / "other.sqlite")
    other.read_in(tmp_path / "all.zip")
    with zipfile.ZipFile(tmp_path / "all.zip") as packed:
        texts = {name: packed.read(name).decode().replace("timeout", "killed") for name in packed.namelist()}
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as packed:
        for name, text in texts.items():
            packed.writestr(name, text)
    with pytest.raises(UserInputError, match=re.escape(f"cell {ended.cell} of 2") + r", made .*: ended otherwise in .*; nothing was added"):
        other.read_in(tmp_path / "all.zip")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1,{},r,a,lower,series,2026-01-01,0,x", "value 'x' is not what export writes there"),
        ("1,{},r,a,lower,series,2026-01-01,0,", "value '' is not what export writes there"),
        ("1,{},r,a,lower,series,2026-01-01,0,1_0.0", "value '1_0.0' is not what export writes there"),
        ("1,{},r,a,lower,series,2026-01-01,0,\u0661", "value '\u0661' is not what export writes there"),
        ("1,{},r,a,lower,series,2026-01-01,0, 1.0", "value ' 1.0' is not what export writes there"),
        ("1,{},r,a,lower,series,2026-01-01,0,-1.0", "the value -1.0 is not finite and above 0"),
        ("1,{},r,a,best,series,2026-01-01,0,1.0", "better='best' is neither"),
        ("1,{},r,a,lower,series,now,0,1.0", "made 'now' is not what export writes there"),
        ("1,2", "it has 2 fields, and there are 9"),
        ("", "it has 0 fields, and there are 9"),
        ("1,[],r,a,lower,series,2026-01-01,0,1", "environment is no object of facts"),
        ("1,{,r,a,lower,series,2026-01-01,0,1", "environment '{' is not what export writes there"),
    ],
)
def test_a_wrong_row_is_named_and_nothing_is_added(history: History, tmp_path: Path, line: str, told: str) -> None:
    history.add("a", [1.0], environment=HERE, night="1")
    history.export(tmp_path / "all.csv")
    with (tmp_path / "all.csv").open("a") as file:
        file.write(line + "\n")
    other = History(tmp_path / "other.sqlite")
    with pytest.raises(UserInputError, match=rf"all\.csv:3: is no reading \(.*{re.escape(told)}.*nothing was added"):
        other.read_in(tmp_path / "all.csv")
    assert other.metrics() == []


def test_a_year_of_fifty_metrics_answers_in_two_seconds(history: History) -> None:
    history.add("metric 0", [1.0], environment=HERE, night="2000-01-01")
    nights = [(date(2026, 1, 1) + timedelta(night)).isoformat() for night in range(365)]
    with closing(sqlite3.connect(history.path)) as database, database:
        rows = [(night, 1, "", f"metric {metric}", "lower", "now") for night in nights for metric in range(50)]
        database.executemany(
            "INSERT INTO measurements (night, environment, revision, metric, better, made) VALUES (?, ?, ?, ?, ?, ?)", rows
        )
        places = "WITH RECURSIVE p(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM p WHERE n < 19) "
        database.execute(f"{places} INSERT INTO readings SELECT id, n, 1.0 + n FROM measurements, p WHERE id > 1")
        seal(database)
    judge([Measurement("2026-01-01", "e", "", "m", "lower", (1.0,))] * 40)  # imports what it needs
    start = time.process_time()
    again = History(history.path)
    found = judge(again.series("metric 7"))
    assert (found.num_nights, found.verdict, len(again.nights())) == (365, Verdict.PASS, 366)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("night", ["2026-2-5", "2026-13-45", "2026-01-45.2"])
def test_a_label_that_is_nearly_a_date_is_refused(history: History, night: str) -> None:
    with pytest.raises(UserInputError, match="is no day, and would not sort by time; write it as YYYY-MM-DD"):
        history.add("a", [1.0], environment=HERE, night=night)
    assert not history.metrics()


@pytest.mark.parametrize("night", ["2026-02-17T23:00:00-05:00", "2026-02-17 23:00+0100"])
def test_a_label_that_tells_its_offset_is_refused(history: History, night: str) -> None:
    with pytest.raises(UserInputError, match="has an offset from UTC, and would not sort by time; write it in UTC"):
        history.add("a", [1.0], environment=HERE, night=night)
    history.add("a", [1.0], environment=HERE, night="2026-02-17T23:00:00Z")


@pytest.mark.parametrize("label", ["2026-02-17.{}", "{}", "run {}"])
def test_numbers_in_labels_sort_as_numbers(history: History, label: str) -> None:
    """The tenth run of a day follows the ninth, not the first; so the level of the last three is seen."""
    noise = np.random.default_rng(0).normal(0, 0.003, (45, 5))
    for number in range(1, 46):
        values = np.exp(noise[number - 1]) * (1.3 if number > 42 else 1.0)
        history.add("time", values.tolist(), environment=HERE, night=label.format(number))
    labels = [label.format(number) for number in range(1, 46)]
    assert [one.night for one in history.series("time")] == labels == [night for night, *_ in history.nights()]
    found = judge(history.series("time"), [])
    assert found.verdict is Verdict.REGRESSION and found.changes[-1].night == label.format(43)


@pytest.mark.parametrize(("first", "second"), [("2026-01-02", "zzz"), ("17", "2026-01-02")])
def test_labels_of_two_kinds_are_no_order_of_time(history: History, first: str, second: str) -> None:
    history.add("a", [1.0], environment=HERE, night=first)
    with pytest.raises(UserInputError, match="labels of one kind sort by time, so keep to it"):
        history.add("a", [1.0], environment=HERE, night=second)
    history.add("a", [1.0], environment=HERE, night=f"{first}.2")


@pytest.mark.parametrize(("field", "value"), [("better", "higher"), ("kind", "paired")])
@pytest.mark.parametrize("where", ["in the file", "against what is there"])
def test_an_import_judges_a_metric_in_one_way(history: History, tmp_path: Path, field: str, value: str, where: str) -> None:
    history.add("a", [1.0], environment=HERE, night="1")
    other = History(tmp_path / "other.sqlite")
    other.add("a", [1.0], environment=HERE, night="2", **{field: value})  # type: ignore[arg-type]
    for one, name in ((history, "one"), (other, "two")):
        one.export(tmp_path / f"{name}.csv")
    rows = (tmp_path / "two.csv").read_text().splitlines(keepends=True)[where == "in the file" :]
    (tmp_path / "two.csv").write_text(((tmp_path / "one.csv").read_text() if where == "in the file" else "") + "".join(rows))
    into = History(tmp_path / "new.sqlite") if where == "in the file" else history
    row = re.escape(f"{tmp_path / 'two.csv'}: a of 2, made ")
    with pytest.raises(UserInputError, match=f"{row}.*: a: {field}='{value}' was given, and its nights so far say .*; nothing was added"):
        into.read_in(tmp_path / "two.csv")
    text = (tmp_path / "one.csv").read_text()
    for night in ("2026-1-1", "2026-01-01"):  # no day, and another kind of label than what is there
        (tmp_path / "night.csv").write_text(text.replace("\n1,", f"\n{night},"))
        with pytest.raises(UserInputError, match=re.escape(f"{tmp_path / 'night.csv'}: a of {night}, made ") + f".*: night: '{night}' "):
            history.read_in(tmp_path / "night.csv")
    assert into.series("a") == (history.series("a") if into is history else [])


def test_a_text_that_an_older_version_took_is_exported_so_that_it_can_be_read(history: History, tmp_path: Path) -> None:
    history.add_cell(ENDED, [], environment=HERE)
    with closing(sqlite3.connect(history.path)) as database, database:
        database.execute("INSERT INTO cells SELECT 2, night, environment, revision, cell, 2, outcome, 1, 1, ?, made FROM cells", ("a\r",))
    history.export(tmp_path / "all.zip")
    other = History(tmp_path / "other.sqlite")
    other.read_in(tmp_path / "all.zip")
    assert [row.summary for row in other.cells()] == ["", "a\r"]


def test_an_import_that_contradicts_what_is_there_adds_nothing(history: History, tmp_path: Path) -> None:
    history.add("a", [1.0, 2.0], environment=HERE, night="2026-01-01")
    history.export(tmp_path / "all.csv")
    text = (tmp_path / "all.csv").read_text()
    (tmp_path / "edited.csv").write_text(text.replace(",2.0\n", ",2.5\n"))
    with pytest.raises(UserInputError, match=r"is 1, 2\.5 there and 1, 2 in .*; nothing was added"):
        history.read_in(tmp_path / "edited.csv")
    (tmp_path / "twice.csv").write_text(text + text.splitlines()[1] + "\n")
    with pytest.raises(UserInputError, match="4: is reading 0 where 2 should be; nothing was added"):
        History(tmp_path / "new.sqlite").read_in(tmp_path / "twice.csv")
