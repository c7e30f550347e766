"""Hazards of what no search finds: a factor is changed before step 6, and the audit of step 7 refuses it; others fall on 4, 5 and 11."""

from __future__ import annotations

import builtins
import ctypes
import decimal
import functools
import gc
import logging
import mmap
import operator
import sqlite3
import sys
import tempfile
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import SignatureDriftError
from harness.replay.hazards.building_blocks import (
    MODULE,
    Kept,
    Row,
    kept_in,
    nested,
    put,
    write_module,
)
from harness.replay.hazards.registry import Hazard


def _built_name() -> Kept:
    return lambda: getattr(sys.modules["harness_replay_hazards_" + "_".join(["settings", "of", "a", "run"])], "fac" + "tor"), write_module


def _singleton_cached() -> Kept:
    @functools.lru_cache
    def config() -> Any:
        return types.SimpleNamespace(factor=1.0)

    return lambda: config().factor, lambda value: setattr(config(), "factor", value)


def _attrgetter() -> Kept:
    class Config:
        factor = 1.0

    get = operator.attrgetter("factor")
    return lambda: get(Config), lambda value: setattr(Config, "factor", value)


class _Box:
    factor: Any = 1.0


def _weak() -> Kept:
    box = _Box()
    behind: Any = weakref.ref(box)
    return lambda: behind().factor, functools.partial(setattr, box, "factor")


def _weak_dict() -> Kept:
    box, table = _Box(), weakref.WeakValueDictionary[str, _Box]()
    table["box"] = box
    return lambda: table["box"].factor, functools.partial(setattr, box, "factor")


def _file() -> Kept:
    path = Path(tempfile.mkdtemp()) / "factor"
    return lambda: float(path.read_text()), lambda value: path.write_text(str(value))


def _file_there() -> Kept:
    path = Path(tempfile.mkdtemp()) / "flag"
    return lambda: 2.0 if path.exists() else 1.0, lambda value: path.touch() if value == 2.0 else None


def _mapped() -> Kept:
    mapped = mmap.mmap(-1, 8)
    return lambda: float(mapped[0]), lambda value: put(mapped, 0, int(value))


def _database() -> Kept:
    base = sqlite3.connect(":memory:")
    base.execute("create table settings (factor real)")
    base.execute("insert into settings values (1.0)")
    return lambda: base.execute("select factor from settings").fetchone()[0], lambda value: base.execute(
        "update settings set factor = ?", (value,)
    )


def _c_number() -> Kept:
    number = ctypes.c_double(1.0)
    return lambda: number.value, lambda value: setattr(number, "value", value)


def _large_array() -> Kept:
    values = np.ones(20_000)
    return lambda: float(values[9]), lambda value: put(values, 9, value)


def _array_of_objects() -> Kept:
    values = np.array([1.0, None], dtype=object)
    return lambda: values[0], lambda value: put(values, 0, value)


def _memory_view() -> Kept:
    kept = bytearray(4)
    view = memoryview(kept)
    return lambda: float(view[0]), lambda value: put(kept, 0, int(value))


def _many() -> Kept:
    lists = [[1.0] for _ in range(600)]
    return lambda: lists[-1][0], lambda value: put(lists[-1], 0, value)


def _long() -> Kept:
    values = [1.0] * 5_000
    return lambda: values[4_500], lambda value: put(values, 4_500, value)


def _dispatched() -> Kept:
    @functools.singledispatch
    def scale(value: object) -> Any:
        return 1.0

    return lambda: scale(1), lambda value: scale.register(int, lambda number: value)


def _logged() -> Kept:
    logger = logging.getLogger(MODULE)
    return lambda: 2.0 if logger.isEnabledFor(logging.DEBUG) else 1.0, lambda value: logger.setLevel(
        logging.DEBUG if value == 2.0 else logging.ERROR
    )


def _decimal_context() -> Kept:
    return lambda: float(decimal.Decimal(4) / 3), lambda value: setattr(decimal.getcontext(), "prec", 28 if value == 1.0 else 2)


def _collector() -> Kept:
    return lambda: 2.0 if gc.get_debug() else 1.0, lambda value: gc.set_debug(
        gc.DEBUG_STATS * 0 if value == 1.0 else gc.DEBUG_UNCOLLECTABLE
    )


def _builtin() -> Kept:
    name = MODULE.upper()
    return lambda: getattr(builtins, name), lambda value: setattr(builtins, name, value)


_AUDITED: tuple[Row, ...] = (
    ("built_name", "a module whose name is put together", kept_in(_built_name)),
    ("singleton_cached", "the one object that a cached function gives", kept_in(_singleton_cached)),
    ("attrgetter", "an attribute by operator.attrgetter", kept_in(_attrgetter)),
    ("weak_reference", "an object behind a weak reference", kept_in(_weak)),
    ("weak_dict", "an object in a WeakValueDictionary", kept_in(_weak_dict)),
    ("file_read", "a number in a file", kept_in(_file)),
    ("file_exists", "whether a file exists", kept_in(_file_there)),
    ("mapped_memory", "a byte of mapped memory", kept_in(_mapped)),
    ("database", "a row of a database", kept_in(_database)),
    ("c_number", "a number of ctypes", kept_in(_c_number)),
    ("large_array", "an element of a large array", kept_in(_large_array)),
    ("array_of_objects", "an array of objects", kept_in(_array_of_objects)),
    ("memory_view", "bytes behind a view of memory", kept_in(_memory_view)),
    ("nested_9", "a dict within nine", kept_in(nested(9))),
    ("many_lists", "the last of 600 lists", kept_in(_many)),
    ("long_list", "an item of a list of 5,000", kept_in(_long)),
    ("dispatched", "a function that is registered for a type", kept_in(_dispatched)),
    ("logging_level", "the level of a logger", kept_in(_logged)),
    ("decimal_context", "the precision of decimals", kept_in(_decimal_context)),
    ("collector_flags", "the flags of the garbage collector", kept_in(_collector)),
    ("builtin_name", "a name among the builtins", kept_in(_builtin)),
)
_SOURCE = "compressor/training/README.md: what the guards see"
HAZARDS: tuple[Hazard, ...] = tuple(
    Hazard(name, what, stage, SignatureDriftError, "found by the audit", _SOURCE, late=1) for name, what, stage in _AUDITED
)
