"""Progress bars for long work, behind an interface that the pipelines can call without knowing a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One running bar."""

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        """Move the bar by `amount` and show `note` (a module name, an error) beside it."""


class Progress(Protocol):
    """What the pipelines need: open a bar, close it when the work ends."""

    def task(self, description: str, total: int) -> AbstractContextManager[Task]:
        """Return a context manager that shows a bar of `total` steps."""


class _SilentTask:
    def advance(self, amount: int = 1, note: str | None = None) -> None:
        """Show nothing."""


class SilentProgress:
    """Shows nothing: for library use, tests and `--quiet`."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Task]:
        """Open a bar that is not shown."""
        del description, total
        yield _SilentTask()


def progress_of(shown: bool | Progress) -> Progress:
    """Return what shows the bars that a user asked for.

    Args:
        shown: True for standard error: bars on a terminal, a line now and then in a file. False for none. Or an object that shows them.

    Returns:
        The object.
    """
    if not isinstance(shown, bool):
        return shown
    if not shown:
        return SilentProgress()
    return RichProgress() if sys.stderr.isatty() else LineProgress()


class LineProgress:
    """For a file: a line on standard error at the end of each task, and every half a minute before that."""

    def __init__(self, every_seconds: float = 30.0) -> None:
        """Take the time between two lines."""
        self._every_seconds = every_seconds

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Task]:
        """Count steps, and say now and then how far they are."""
        task = _LineTask(description, total, self._every_seconds)
        try:
            yield task
        finally:
            task.say()


class _LineTask:
    def __init__(self, description: str, total: int, every_seconds: float) -> None:
        self._description, self._total, self._every_seconds = description, total, every_seconds
        self._done, self._note = 0, ""
        self._began = self._said = time.monotonic()

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        self._done += amount
        self._note = self._note if note is None else note
        if self._done < self._total and time.monotonic() - self._said >= self._every_seconds:  # the last line is said at the end
            self.say()

    def say(self) -> None:
        self._said = time.monotonic()
        passed = self._said - self._began
        left = f", {_clock(passed * (self._total - self._done) / self._done)} left" if 0 < self._done < self._total else ""
        note = f": {self._note}" if self._note else ""
        print(f"{self._description} {self._done}/{self._total}, {_clock(passed)}{left}{note}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class RichProgress:
    """For a terminal: a bar on standard error, so that `--json` on standard output stays clean, and what is at work in a line below it."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Task]:
        """Open a bar with elapsed and remaining time; it stays on the screen when the work is done."""
        from rich.console import Group
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichBars
        from rich.table import Column
        from rich.text import Text

        from compressor.console import Console

        class _BarAndNote(RichBars):
            def get_renderable(self) -> Group:
                notes = [Text(f"  {task.fields['note']}", no_wrap=True, overflow="ellipsis") for task in self.tasks if task.fields["note"]]
                return Group(self.make_tasks_table(self.tasks), *notes)

        def whole(width: int) -> Column:
            """On a narrow terminal the bar gives way first, and numbers never."""
            return Column(no_wrap=True, min_width=width)

        columns = (
            TextColumn("{task.description:<12}", table_column=whole(5)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4, max_width=28)),
            MofNCompleteColumn(table_column=whole(2 * len(str(total)) + 1)),
            TimeElapsedColumn(table_column=whole(7)),
            TimeRemainingColumn(table_column=whole(7)),
        )
        with _BarAndNote(*columns, console=Console(file=sys.stderr)) as bars:
            task_id = bars.add_task(description, total=total, note="")

            class _RichTask:
                def advance(self, amount: int = 1, note: str | None = None) -> None:
                    if note is None:
                        bars.advance(task_id, amount)
                    else:
                        bars.update(task_id, advance=amount, note=note)

            yield _RichTask()


class StageBar:
    """A bar of a calibration, whose steps may turn out fewer than planned."""

    def __init__(self, task: Task, total: int, prefix: str | None, num_tokens: int) -> None:
        """Begin.

        Args:
            task: the bar.
            total: planned steps.
            prefix: of every note.
            num_tokens: of the data, for whoever reports speeds.
        """
        self._task = task
        self.num_tokens = num_tokens
        self._prefix = "" if prefix is None else f"{prefix}; "
        self._left = total

    def advance(self) -> None:
        """Go on by a step."""
        self._left -= 1
        self._task.advance()

    def skip(self, amount: int, note: str) -> None:
        """Go on by steps that need not be taken, and say which."""
        self._left -= amount
        self._task.advance(amount, note=self._prefix + note)

    def note(self, text: str) -> None:
        """Say something and stay."""
        self._task.advance(0, note=self._prefix + text)

    def finish(self) -> None:
        """Go to the end: samples that were ended early have skipped steps that were counted."""
        self._task.advance(self._left)
