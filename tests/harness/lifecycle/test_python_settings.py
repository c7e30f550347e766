"""Every setting of Python and numpy that the table names can be read and set, is told when a modifier leaves it changed, and put back."""

from __future__ import annotations

import decimal
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from compressor import Event, Modifier, State
from harness import verify
from harness.lifecycle.driving.python_settings import PYTHON_SETTINGS
from harness.lifecycle.driving.snapshot import Snapshot
from harness.lifecycle.process_state import settings_kept


def _nothing(*args: Any) -> None:
    return None


_DECIMAL = (9, decimal.ROUND_UP, -99, 99, 0, 1, frozenset({decimal.Inexact}))
# What each becomes; a function of what it is, or the value itself.
OTHERS: dict[str, Any] = {
    "working directory": Path("/"),
    "module search path": lambda value: [*value, "/nowhere"],
    "garbage collection": lambda value: not value,
    "thresholds of garbage collection": (321, 7, 7),
    "recursion limit": lambda value: value + 7,
    "switch interval": lambda value: value * 2,
    "longest integers as text": 5000,
    "logging": 17,
    "logging.disable": 17,
    "logging.raiseExceptions": lambda value: not value,
    "class of loggers": lambda value: type("Logger", (value,), {}),
    "handlers of the root logger": lambda value: [*value, logging.NullHandler()],
    "umask": 0o077,
    "locale": lambda value: "C" if value != "C" else "C.UTF-8",
    "timeout of sockets": 3.0,
    "directory of temporary files": "/",
    "arithmetic of decimal": _DECIMAL,
    "numpy.errstate": lambda value: value | {"over": "ignore", "under": "call"},
    "numpy's print options": lambda value: value | {"precision": 3},
    "callbacks of garbage collection": lambda value: [*value, _nothing],
    "handlers of signals": lambda value: value | {"SIGUSR1": _nothing},
    "timer of signals": lambda value: not value,
    "processors": lambda value: {min(value)},
    "sys.dont_write_bytecode": lambda value: not value,
    "faulthandler": lambda value: not value,
}


def other(name: str, value: Any) -> Any:
    chosen = OTHERS.get(name, _nothing)
    return chosen(value) if callable(chosen) and chosen is not _nothing else chosen


@pytest.mark.parametrize("name", PYTHON_SETTINGS)
def test_a_setting_is_told_and_put_back(name: str) -> None:
    read, write = PYTHON_SETTINGS[name]
    before, whole = read(), Snapshot.of_process()
    if other(name, before) == before:
        pytest.skip("this machine has one value for it only")  # as processors where there is one
    with settings_kept():
        write(other(name, before))
        found, changed = read(), whole.differences(Snapshot.of_process())
    assert found != before and [one.where for one in changed] == [name]
    assert read() == before


def test_what_is_written_to_a_stream_or_computed_is_no_setting() -> None:
    whole = Snapshot.of_process()
    sys.stderr.write("nothing\n")
    logging.getLogger().warning("nothing")
    assert decimal.Decimal(1) / decimal.Decimal(3)
    assert tempfile.gettempdir()
    assert not whole.differences(Snapshot.of_process())


def test_a_filter_of_one_message_is_told_unless_something_was_imported_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Snapshot.of_process()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="of one library")
        assert [one.where for one in whole.differences(Snapshot.of_process())] == ["warnings"]
        monkeypatch.setitem(sys.modules, "library_of_which_nobody_knows", sys)
        assert not whole.differences(Snapshot.of_process())
        warnings.simplefilter("ignore")
        assert [one.where for one in whole.differences(Snapshot.of_process())] == ["warnings"]


def leaving(change: Callable[[], object]) -> type[Modifier]:
    class LeavesIt(Modifier):
        def on_initialize(self, state: State) -> bool:
            return True

        def on_calibration_end(self, state: State, event: Event) -> None:
            change()

    return LeavesIt


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("arithmetic of decimal", lambda: setattr(decimal.getcontext(), "prec", 9)),
        ("warnings.showwarning", lambda: setattr(warnings, "showwarning", _nothing)),
        ("warnings", lambda: warnings.filterwarnings("ignore", message="of one library")),
        ("numpy's print options", lambda: numpy.set_printoptions(precision=3)),
        ("handlers of the root logger", lambda: logging.getLogger().addHandler(logging.NullHandler())),
    ],
)
def test_a_modifier_that_leaves_one_is_told(name: str, change: Callable[[], object]) -> None:
    before = Snapshot.of_process()
    report = verify(leaving(change), checks=["lifecycle.nothing_left"])
    assert any(name in record.summary for record in report.records if record.outcome.value == "fail"), report.to_text()
    assert not before.differences(Snapshot.of_process())
