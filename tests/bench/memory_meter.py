"""What a process has allocated at most: the heap as glibc's own books have it, and the files that are mapped into memory.

Resident memory is no measure for small models: the allocator keeps freed pages, and libraries load more code on first use. The books of
the allocator count every byte that is in use, whoever asked for it (torch, numpy, safetensors), also inside an operation. A thread looks at
them every few hundred microseconds. Weights that safetensors maps from their file are no heap, so mapped files of that kind are added, and
so are pages that Python's `mmap` asks of the system, as for what waits between stages.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from weakref import WeakSet

from harness.errors import HarnessError

INTERVAL_SECONDS = 0.0002
_MAPS = Path("/proc/self/maps")
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


class _Pages(mmap.mmap):
    """Pages that are asked of the system itself, as those of activations between stages are; no book of the allocator has them."""

    live: ClassVar[WeakSet[_Pages]] = WeakSet()

    def __new__(cls, *given: Any, **keywords: Any) -> Self:
        """Map, and note it."""
        made = super().__new__(cls, *given, **keywords)
        if given[:1] == (-1,):
            cls.live.add(made)
        return made


class MemoryMeter:
    """Measures between entering and leaving; a context manager. `mark` cuts the time into stretches.

    Attributes:
        peaks: for each stretch its label and the most that was in use in it, in bytes beyond the start.
    """

    def __init__(self) -> None:
        """Find the allocator's books.

        Raises:
            HarnessError: this system has none: it is not Linux with glibc 2.33 or newer.
        """
        self.peaks: list[tuple[str, int]] = []
        library = ctypes.CDLL(None)
        if not hasattr(library, "mallinfo2") or not _MAPS.exists():
            raise HarnessError("memory: this needs Linux with glibc 2.33 or newer (mallinfo2); run it there")
        self._mallinfo2 = library.mallinfo2
        self._mallinfo2.restype = _MallocInfo
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._highest = self._start = self._mapped = 0
        self._thread = threading.Thread(target=self._look, name="memory-meter", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """The most of all stretches."""
        return max((peak for _, peak in self.peaks), default=0)

    def __enter__(self) -> Self:
        """Start."""
        self._plain_mmap, mmap.mmap = mmap.mmap, _Pages  # type: ignore[misc]
        self._mapped = _mapped_bytes()
        self._start = self._highest = self._heap_bytes() + self._mapped
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop; what came after the last mark is the stretch `end`."""
        self._stop.set()
        self._thread.join()
        mmap.mmap = self._plain_mmap  # type: ignore[misc]
        self.mark("end")

    def mark(self, label: str) -> None:
        """End a stretch.

        Args:
            label: of the stretch that ends.
        """
        with self._lock:
            self._mapped = _mapped_bytes()
            now = self._heap_bytes() + self._mapped
            self.peaks.append((label, max(self._highest, now) - self._start))
            self._highest = now

    def _heap_bytes(self) -> int:
        info = self._mallinfo2()
        return int(info.uordblks + info.hblkhd) + sum(map(len, _Pages.live))

    def _look(self) -> None:
        looks = 0
        while not self._stop.is_set():
            with self._lock:
                if looks % 200 == 0:
                    self._mapped = _mapped_bytes()
                self._highest = max(self._highest, self._heap_bytes() + self._mapped)
            looks += 1
            time.sleep(INTERVAL_SECONDS)


def _mapped_bytes() -> int:
    """Bytes of weight files that are mapped, each file once."""
    files: dict[str, int] = {}
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        if ".safetensors" in line:
            span, *_, path = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in span.split("-"))
            files[path] = max(files.get(path, 0), last - first)
    return sum(files.values())
