"""The journal of a run in several processes: the first rank keeps and reads, and the others are told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from compressor.distributed.ranks import Ranks
from compressor.lifecycle import Session
from compressor.pipelines.journal.journal import Journal, KeptStage, StageJournal, note_kept_by_another, put_back
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
        for index in range(self.num_resumed):
            put_back(session, self._kept(index))
        RandomState(self._ranks.first(lambda: self._journal().random_behind().by_device)).restore()
        return tuple(self._ranks.first(lambda: self._journal().uncalled))

    def open_stage(self, session: Session, index: int, name: str, modules: Sequence[str], num_stages: int) -> bool:
        """Ask the first rank whether the stage is finished."""
        self._index, self.num_stages = index, num_stages
        found: bool = self._ranks.first(lambda: self._own.open_stage(session, index, name, modules, num_stages))
        return found

    def restore_stage(self, session: Session) -> None:
        """Put in place what the first rank reads."""
        put_back(session, self._kept(self._index))

    def finish_stage(self, session: Session) -> None:
        """Keep the stage on the first rank."""
        self._own.finish_stage(session)

    def end_stages(self, session: Session, uncalled: Sequence[str]) -> None:
        """Note the end on the first rank."""
        self._own.end_stages(session, uncalled)

    def finish(self) -> None:
        """Remove what the first rank has kept."""
        self._own.finish()

    def _kept(self, index: int) -> KeptStage:
        found: KeptStage = self._ranks.first(lambda: self._journal().kept(index), (KeptStage,))
        return found

    def _journal(self) -> Journal:
        assert isinstance(self._own, Journal), "nothing was kept that could be put back"
        return self._own
