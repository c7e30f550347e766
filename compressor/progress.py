"""Progress bars for long work, behind an interface that the pipelines can call without knowing a terminal."""

from __future__ import annotations

import sys
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


class RichProgress:
    """Bars on standard error, so that `--json` on standard output stays clean."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Task]:
        """Open a bar with elapsed and remaining time; it stays on the screen when the work is done."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichBars
        from rich.table import Column

        from compressor.console import Console

        def whole(width: int) -> Column:
            """On a narrow terminal the bar gives way first, and numbers never."""
            return Column(no_wrap=True, min_width=width)

        columns = (
            TextColumn("{task.description:<12}", table_column=whole(5)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4, max_width=28)),
            MofNCompleteColumn(table_column=whole(2 * len(str(total)) + 1)),
            TimeElapsedColumn(table_column=whole(7)),
            TimeRemainingColumn(table_column=whole(7)),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=False)),
        )
        with RichBars(*columns, console=Console(file=sys.stderr)) as bars:
            task_id = bars.add_task(description, total=total, note="")

            class _RichTask:
                def advance(self, amount: int = 1, note: str | None = None) -> None:
                    if note is None:
                        bars.advance(task_id, amount)
                    else:
                        bars.update(task_id, advance=amount, note=note)

            yield _RichTask()
