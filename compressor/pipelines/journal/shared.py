"""The journal of a run in several processes: the first rank keeps and reads, and the others are told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from compressor.distributed.ranks import Ranks
from compressor.lifecycle import Session
from compressor.pipelines.journal.journal import Journal, KeptStage, StageJournal, note_kept_by_another, put_back
from compressor.pipelines.journal.stage_files import lay_on_file
from compressor.random_state import RandomState


class SharedJournal:
    """Stands for the journal of the first rank on all of them; see StageJournal."""

    def __init__(self, own: StageJournal, ranks: Ranks) -> None:
        """Take the journal of this rank, which keeps nothing on any but the first.

        Args:
            own: of this rank.
            ranks: of the run.
        """
        self._own, self._ranks = own, ranks
        self.num_resumed, self.num_stages = ranks.first(lambda: [own.num_resumed, own.num_stages])
        self.token, self.summary = ranks.first(lambda: [own.token, own.summary])
        self._path: str | None = ranks.first(lambda: str(own.path) if isinstance(own, Journal) else None)
        self._index = 0

    def __enter__(self) -> Self:
        """Return the journal."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Say what is kept on the ranks that do not keep it: it may be the first one that was killed."""
        if error is not None and self._path is not None and not self._ranks.is_first:
            note_kept_by_another(error, Path(self._path), self.num_stages)

    def needs_no_data(self, watched: Collection[str]) -> bool:
        """Ask the first rank."""
        found: bool = self._ranks.first(lambda: self._own.needs_no_data(watched))
        return found

    def restore_all(self, session: Session) -> tuple[str, ...]:
        """Put the results of all stages in place, as the first rank reads them."""
        num_notes = len(session.state.report.notes)
        for index in range(self.num_resumed):
            self._put_back(session, index)
        session.state.report.notes[num_notes:] = self._ranks.first(lambda: self._journal().notes_behind)
        RandomState(self._ranks.first(lambda: self._journal().random_behind().by_device)).restore()
        return tuple(self._ranks.first(lambda: self._journal().uncalled))

    def open_stage(self, session: Session, index: int, name: str, modules: Sequence[str], num_stages: int) -> bool:
        """Ask the first rank whether the stage is finished."""
        self._index, self.num_stages = index, num_stages
        found: bool = self._ranks.first(lambda: self._own.open_stage(session, index, name, modules, num_stages))
        return found

    def restore_stage(self, session: Session) -> None:
        """Put in place what the first rank reads."""
        self._put_back(session, self._index)

    def finish_stage(self, session: Session) -> None:
        """Keep the stage on the first rank."""
        self._own.finish_stage(session)
        self._let_memory_go(session, -1)

    def end_stages(self, session: Session, uncalled: Sequence[str], notes: Sequence[str]) -> None:
        """Note the end on the first rank."""
        self._own.end_stages(session, uncalled, notes)

    def finish(self) -> None:
        """Remove what the first rank has kept."""
        self._own.finish()

    def _put_back(self, session: Session, index: int) -> None:
        put_back(session, self._ranks.first(lambda: self._journal().kept(index), (KeptStage,)))
        self._let_memory_go(session, index)

    def _let_memory_go(self, session: Session, index: int) -> None:
        """Where a rank sees the file that the first one has written, its model too is a look at it."""
        if self._path is None or session.state.keep_originals:
            return
        name, keys, seen = self._ranks.first(lambda: self._place(index))
        path = Path(name)
        if path.exists() and _look(path) == seen:
            lay_on_file(path, session.state.model, keys)

    def _place(self, index: int) -> list[Any]:
        path, keys = self._journal().place(index)
        return [str(path), keys, _look(path)]

    def _journal(self) -> Journal:
        assert isinstance(self._own, Journal), "nothing was kept that could be put back"
        return self._own


def _look(path: Path) -> list[int]:
    """What tells one file from another of the same name, on another host."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns]
