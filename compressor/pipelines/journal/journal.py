"""What the pipelines tell the journal, and what it does: keeps each finished stage, and gives it back to a run that goes on.

A pipeline asks `open_stage` whether an earlier run has finished a stage. Where one has, `restore_stage` puts in place what was kept; else
the pipeline lets the modifiers do their work, and `finish_stage` keeps what they made. Activations are not kept: a resumed run forwards
through the finished stages with their packed weights, which is what the first run has done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from compressor.atomic import reason
from compressor.errors import CheckpointError, LifecycleError, ResumeError
from compressor.lifecycle import FinishedStage, Session
from compressor.lifecycle.state import StageValue
from compressor.pipelines.journal.fingerprint import file_hashes
from compressor.pipelines.journal.run_folder import JOURNAL, Lines, RunFolder
from compressor.pipelines.journal.stage_files import (
    Before,
    add_report,
    copy_tensors,
    lay_on_file,
    look_before,
    read_tensors,
    report_since,
    stage_content,
    write_content,
)
from compressor.random_state import RandomState


class KeptStage(NamedTuple):
    """What an earlier run has kept of a stage.

    Attributes:
        modules: dotted names of its modules.
        memories: of each modifier.
        tensors: by module and name.
        report: for `add_report`.
        random: states of generators, by device.
    """

    modules: Sequence[str]
    memories: Sequence[Mapping[str, StageValue]]
    tensors: Mapping[str, Mapping[str, Tensor]]
    report: Mapping[str, Sequence[Any]]
    random: Mapping[str, Tensor]


def put_back(session: Session, kept: KeptStage) -> None:
    """Put in place what a stage has made.

    Args:
        session: of the run; its model and report change.
        kept: of the stage.
    """
    for modifier, memory in zip(session.modifiers, kept.memories, strict=True):
        modifier.skip_stage(session.state, FinishedStage(kept.modules, memory, kept.tensors))
    # After the modifiers, which put their layers in place: these tensors include what lies in them.
    copy_tensors(session.state.model, kept.tensors)
    add_report(session.state.report, kept.report)
    RandomState(kept.random).restore()


def _num_kept(journal: Path) -> int:
    """How many stages lie on the disk, which counts: ctrl-C may have come right behind the write."""
    return sum(entry["kind"] == "stage" for entry in Lines.read(journal).entries)


def _advice(path: Path, num_kept: int, num_stages: int) -> str:
    kept = f"{num_kept} of {num_stages} stages are finished and kept in {path}"
    return f"{kept}; the same command with --resume (resume=True) goes on from there"


def note_kept_by_another(error: BaseException, path: Path, num_stages: int) -> None:
    """Say beside an error what the run has kept, where it is another rank that keeps; where its folder is not at hand, nothing.

    Args:
        error: gets a note.
        path: of the run folder.
        num_stages: of the whole run.
    """
    with suppress(ResumeError):
        kept = _num_kept(path / JOURNAL)
        if kept:
            error.add_note(_advice(path, kept, num_stages))


class StageJournal(Protocol):
    """What a pipeline tells about its stages, and asks about those of an earlier run.

    Attributes:
        num_resumed: stages that an earlier run has finished.
        num_stages: stages of the whole run; 0 before a pipeline has said so.
        token: part of the name of the folder that the checkpoint is written to before it is whole; None for a random one.
    """

    num_resumed: int
    num_stages: int
    token: str | None

    @property
    def summary(self) -> str | None:
        """Where this run went on, in words; None where it began at the beginning."""

    def needs_no_data(self, watched: Collection[str]) -> bool:
        """Whether everything that data is needed for has been done.

        Args:
            watched: modules that still carry calibration hooks.

        Returns:
            True where `restore_all` is enough.
        """

    def restore_all(self, session: Session) -> tuple[str, ...]:
        """Put the results of all stages in place, without any forward.

        Args:
            session: of the run; its model and report change.

        Returns:
            Targets that no sample has called.
        """

    def open_stage(self, session: Session, index: int, name: str, modules: Sequence[str], num_stages: int) -> bool:
        """Begin a stage, before its calibration.

        Args:
            session: of the run.
            index: number of the stage, from 0.
            name: dotted name of the target.
            modules: dotted names of its modules.
            num_stages: how many stages the run has.

        Returns:
            True where an earlier run has finished it: it is restored, and needs no calibration.
        """

    def restore_stage(self, session: Session) -> None:
        """Put in place what an earlier run has made in the open stage.

        Args:
            session: of the run; its model and report change.
        """

    def finish_stage(self, session: Session) -> None:
        """Keep what the modifiers have made in the open stage.

        Args:
            session: of the run.
        """

    def end_stages(self, session: Session, uncalled: Sequence[str], notes: Sequence[str]) -> None:
        """Note that all samples have passed all stages.

        Args:
            session: of the run.
            uncalled: targets that no sample has called.
            notes: of the report, since the pipeline began: those of the plan belong to no stage.
        """

    def finish(self) -> None:
        """Remove what was kept: the result is where it belongs."""


class NullJournal:
    """Keeps nothing: for runs whose result stays in memory."""

    num_resumed: int = 0
    num_stages: int = 0
    token: str | None = None
    summary: str | None = None

    def needs_no_data(self, watched: Collection[str]) -> bool:
        """No stage was finished earlier."""
        return False

    def restore_all(self, session: Session) -> tuple[str, ...]:
        """There is nothing to restore."""
        return ()

    def open_stage(self, session: Session, index: int, name: str, modules: Sequence[str], num_stages: int) -> bool:
        """No stage was finished earlier."""
        return False

    def restore_stage(self, session: Session) -> None:
        """There is nothing to restore."""

    def finish_stage(self, session: Session) -> None:
        """Nothing is kept."""

    def end_stages(self, session: Session, uncalled: Sequence[str], notes: Sequence[str]) -> None:
        """Nothing is kept."""

    def finish(self) -> None:
        """Nothing was kept."""


class Journal:
    """Keeps every stage in a run folder. A context manager that holds the folder's lock; made by `open_journal`."""

    def __init__(self, folder: RunFolder, lines: Lines) -> None:
        """Take over a locked folder and its journal.

        Args:
            folder: locked.
            lines: with the line of the run, and those of finished stages.
        """
        self._folder, self._lines = folder, lines
        self._done = [entry for entry in lines.entries if entry["kind"] == "stage"]
        self._end = next((entry for entry in lines.entries if entry["kind"] == "end"), None)
        self._before: Before | None = None
        self._stage: dict[str, Any] = {}
        self._is_finished = False
        # A GPU goes on meanwhile. One stage at a time: the next one waits for it.
        self._writer = ThreadPoolExecutor(1, "journal")
        self._writing: Future[None] | None = None
        self.num_resumed = len(self._done)
        self.num_stages = self._done[-1]["total"] if self._done else 0
        self.token = lines.entries[0]["token"]

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def summary(self) -> str | None:
        """Where this run went on, in words; None where it began at the beginning."""
        if not self.num_resumed:
            return None
        return f"resumed after stage {self.num_resumed} of {self.num_stages}"

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Targets that no sample has called, once all stages are finished."""
        return tuple(self._end["uncalled"]) if self._end else ()

    @property
    def notes_behind(self) -> list[str]:
        """Notes of the report from the beginning of the pipeline on, once all stages are finished."""
        return list(self._end["notes"]) if self._end else []

    def needs_no_data(self, watched: Collection[str]) -> bool:
        """Compare the modules of finished stages with those that are still watched."""
        finished = {name for entry in self._done for name in entry["modules"]}
        return self._end is not None and finished.issuperset(watched)

    def restore_all(self, session: Session) -> tuple[str, ...]:
        """Read every stage file, and the notes and random states behind the last stage."""
        num_notes = len(session.state.report.notes)
        for index in range(self.num_resumed):
            self._put_back(session, index)
        session.state.report.notes[num_notes:] = self.notes_behind
        # Whatever draws random numbers afterwards draws those that it would have drawn.
        self.random_behind().restore()
        return self.uncalled

    def open_stage(self, session: Session, index: int, name: str, modules: Sequence[str], num_stages: int) -> bool:
        """Refuse a stage that is another one than the earlier run has finished at this place."""
        self.num_stages = num_stages
        self._stage = {"kind": "stage", "index": index, "name": name, "total": num_stages, "modules": list(modules)}
        if index >= self.num_resumed:
            self._before = look_before(session.state, modules)
            return False
        kept = self._done[index]
        different = [key for key in self._stage if kept[key] != self._stage[key]]
        if different:
            raise ResumeError(
                f"{self.path}: stage {index} was {kept['name']!r} and is {name!r} now, in {', '.join(different)}; the model runs otherwise "
                "than in the first run: remove the folder to start over"
            )
        return True

    def restore_stage(self, session: Session) -> None:
        """Read the file of the stage."""
        self._put_back(session, self._stage["index"])

    def finish_stage(self, session: Session) -> None:
        """Write the file of the stage, then its line."""
        before, modules = self._before, tuple(self._stage["modules"])
        if before is None:
            raise LifecycleError(f"{self.path}: no stage is open that could be finished; call open_stage first")
        # A stage is finished once; the next one must be opened first.
        self._before = None
        path = self._folder.stage_file(self._stage["index"])
        memories = [modifier.stage_memory(modules) or {} for modifier in session.modifiers]
        content, keys = stage_content(session.state, modules, before, memories)
        entry = {
            **self._stage,
            "file": path.name,
            "sha256": None,
            "tensors": keys,
            "report": report_since(session.state.report, before.report),
            "memories": [{key: value for key, value in memory.items() if not isinstance(value, Tensor)} for memory in memories],
        }
        if session.state.device.type == "cpu":  # which would be as busy with it, and whose memory is to lie in the file
            self._keep(path, content, entry)
            self._let_memory_go(session, -1)
        else:
            self._wait()
            self._writing = self._writer.submit(self._keep, path, content, entry)

    def _keep(self, path: Path, content: Mapping[str, Tensor], entry: Mapping[str, Any]) -> None:
        """The file before its line: a file without a line is done again, a line without a file would be an error."""
        write_content(path, content)
        whole = {**entry, "sha256": file_hashes(path.parent, [path.name])[path.name]}
        self._append(whole)
        self._done.append(whole)

    def _wait(self) -> None:
        """Let the stage that is being written be kept, or raise what kept it from that."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def end_stages(self, session: Session, uncalled: Sequence[str], notes: Sequence[str]) -> None:
        """Write the random states behind the last stage, and the closing line."""
        self._wait()
        if self._end is None:
            path = self._folder.stage_file(None)
            write_content(path, stage_content(session.state, (), look_before(session.state, ()), ())[0])
            sha256 = file_hashes(path.parent, [path.name])[path.name]
            self._append({"kind": "end", "uncalled": list(uncalled), "notes": list(notes), "sha256": sha256})

    def finish(self) -> None:
        """Remove the run folder: the result is where it belongs.

        Raises:
            CheckpointError: it cannot be removed.
        """
        self._is_finished = True
        try:
            self._lines.append({"kind": "done"})
            self._folder.remove()
        except OSError as error:
            self._folder.unlock()
            raise CheckpointError(
                f"{self.path}: the run is complete, but its folder cannot be removed ({reason(error)}); remove it"
            ) from error

    def __enter__(self) -> Self:
        """Return the journal."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let go of the folder; after an error it stays where it holds a finished stage, and the error says so."""
        self._writer.shutdown()
        self._leave(error)
        if error is None:
            self._wait()

    def _leave(self, error: BaseException | None) -> None:
        if self._is_finished or not self._folder.journal.exists():
            self._folder.unlock()
            return
        kept = _num_kept(self._folder.journal)
        if not kept:
            self._folder.clear()
            self._folder.give_up()
            return
        self._folder.unlock()
        if error is not None:
            error.add_note(_advice(self.path, kept, self.num_stages))

    def kept(self, index: int) -> KeptStage:
        """Read what an earlier run has kept of a stage.

        Args:
            index: number of the stage.

        Returns:
            All of it.
        """
        entry = self._done[index]
        tensors = read_tensors(self.path / entry["file"], entry["tensors"])
        memories = [{**memory, **tensors.memories.get(number, {})} for number, memory in enumerate(entry["memories"])]
        return KeptStage(entry["modules"], memories, tensors.modules, entry["report"], tensors.random.by_device)

    def random_behind(self) -> RandomState:
        """Read where the random generators stood behind the last stage."""
        return read_tensors(self._folder.stage_file(None), ()).random

    def place(self, index: int) -> tuple[Path, list[str]]:
        """Say where a finished stage is kept.

        Args:
            index: of the stage.

        Returns:
            The file, and the keys of the model's tensors in it.
        """
        self._wait()
        entry = self._done[index]
        return self.path / entry["file"], list(entry["tensors"])

    def _put_back(self, session: Session, index: int) -> None:
        put_back(session, self.kept(index))
        self._let_memory_go(session, index)

    def _let_memory_go(self, session: Session, index: int) -> None:
        """Of a model that the caller holds nothing shall lie in files of ours."""
        if not session.state.keep_originals:
            path, keys = self.place(index)
            lay_on_file(path, session.state.model, keys)

    def _append(self, entry: Mapping[str, Any]) -> None:
        try:
            self._lines.append(entry)
        except OSError as error:
            raise CheckpointError(f"{self._lines.path}: cannot be written ({reason(error)}); make room or repair the disk") from error
