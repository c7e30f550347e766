"""Opening a run folder: a new run begins in it, or an old one goes on once everything has been found as it was left."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from compressor.atomic import check_output_dir, default_run_dir, partial_path, real_path
from compressor.errors import AlreadyDoneError, OutputError, ResumeError
from compressor.json_text import from_json
from compressor.lifecycle import Modifier
from compressor.model.checkpoints.audit import check_written
from compressor.pipelines.journal.fingerprint import Fingerprint, changes, digest, file_hashes
from compressor.pipelines.journal.journal import Journal, NullJournal, StageJournal
from compressor.pipelines.journal.run_folder import (
    Lines,
    RunFolder,
    check_names,
    check_run_dir,
    header,
    read_journal,
    refuse_to_overwrite,
    remove_unfinished_checkpoint,
)


def open_journal(
    path: Path | None,
    *,
    resume: bool,
    required: bool,
    fingerprint: Fingerprint,
    modifiers: Sequence[Modifier],
    output_dir: str | Path | None,
) -> Journal | None:
    """Open the run folder of a run that is about to start, or to go on.

    Args:
        path: what `check_run_dir` returned; None where the run keeps nothing.
        resume: go on where an earlier run stopped; where there is none, begin at the beginning.
        required: the user asked for it, so a modifier that cannot resume is an error.
        fingerprint: what the result depends on.
        modifiers: of the run.
        output_dir: where the checkpoint will be.

    Returns:
        The journal, to be used as a context manager; None where nothing is kept.

    Raises:
        ResumeError: another run works in the folder, it is damaged, it holds a run that is not to be resumed or that is another one, or
            a modifier cannot resume.
        CheckpointError: the folder cannot be written.
    """
    unable = [modifier.label for modifier in modifiers if modifier.stage_memory(()) is None]
    if unable and required:
        raise ResumeError(f"{unable[0]}: cannot resume (it has no stage_memory); leave --resume and --run-dir out")
    if path is None or unable:
        return None
    folder = RunFolder(path)
    folder.create()
    try:
        check_names(path)
        found = read_journal(path)
        if found is not None:
            if not resume:
                refuse_to_overwrite(path, found)
            else:
                _check_same_run(path, found, fingerprint)
            # Its name holds the token of that run, so it is nobody else's.
            remove_unfinished_checkpoint(found.entries[0], partial_path)
        if found is not None and resume:
            _check_stages(folder, found)
            return Journal(folder, found)
        folder.clear()
        token = secrets.token_hex(4)
        return Journal(folder, Lines.create(folder.journal, header(fingerprint, token, output_dir)))
    except BaseException:
        folder.give_up()
        raise


def discard_finished(path: Path, run: Fingerprint) -> None:
    """Remove the run folder of a run whose checkpoint is complete; nothing happens where there is none, or that of another run.

    Args:
        path: of the folder.
        run: what the result depends on.

    Raises:
        ResumeError: another run works in it.
        OutputError: it holds something else.
        CheckpointError: it cannot be removed.
    """
    if not path.exists():
        return
    check_names(path)
    folder = RunFolder(path)
    folder.create()
    try:
        found = read_journal(path)
        if found is None or not changes(found.entries[0]["fingerprint"], run):
            folder.remove()
    finally:
        folder.unlock()


def _check_same_run(path: Path, found: Lines, fingerprint: Fingerprint) -> None:
    first = found.entries[0]
    different = changes(first["fingerprint"], fingerprint)
    if different:
        raise ResumeError(
            f"{path}: holds another run and cannot be resumed with this one: {'; '.join(different)}; "
            "give what was given before, or remove the folder to start over"
        )


def _check_stages(folder: RunFolder, found: Lines) -> None:
    """Compare every file with the hash in the journal."""
    entries = [entry for entry in found.entries if entry["kind"] in ("stage", "end")]
    for number, entry in enumerate(entries):
        file = folder.stage_file(entry.get("index"))
        remedy = f"restore the file, or remove {folder.path} to start over"
        if number > 0:
            remedy += (
                f"; or keep the first {number + 1} lines of {folder.journal.name} and the first {number} stage files, and resume there"
            )
        if not file.exists():
            raise ResumeError(f"{file}: is gone, though the journal says that the stage is finished; {remedy}")
        try:
            sha256 = file_hashes(file.parent, [file.name])[file.name]
        except OSError as error:
            raise ResumeError(f"{file}: cannot be read ({error.strerror}); {remedy}") from error
        if sha256 != entry["sha256"]:
            raise ResumeError(f"{file}: is not what was written (sha256 {sha256[:12]}, not {entry['sha256'][:12]}); {remedy}")
    # One file more may be there: a kill between a stage's file and its line.
    expected = {folder.stage_file(entry.get("index")) for entry in entries} | {folder.stage_file(len(entries))}
    orphans = sorted(set(folder.path.glob("stage-*.safetensors")) - expected)
    if orphans:
        raise ResumeError(
            f"{folder.journal}: ends after stage {len(entries)}, though {orphans[0].name} is there, so lines are missing; restore it, "
            f"or remove {folder.path} to start over, or remove the stage files that it does not name"
        )


# Where a run keeps its finished stages and its result, and what that means for a run that begins or goes on.

RECORD_FILE = "compression.json"


@dataclass(frozen=True)
class RunPlace:
    """The folders of one run; made by `check_places`.

    Attributes:
        output_dir: where the checkpoint will be; None keeps the result in memory.
        run_dir: where finished stages are kept until then; None keeps none.
        resume: go on where an earlier run stopped.
        required: the user asked for a journal, so it is an error where there can be none.
    """

    output_dir: Path | None
    run_dir: Path | None
    resume: bool
    required: bool

    def open(self, run: Fingerprint, modifiers: Sequence[Modifier]) -> AbstractContextManager[StageJournal]:
        """Open the journal, once everything that the result depends on is known.

        Args:
            run: what the result depends on.
            modifiers: of the run.

        Returns:
            A context manager that holds the run folder.

        Raises:
            AlreadyDoneError: the output folder holds the result of this very run.
            OutputError: the output folder holds something else.
            ResumeError: the run folder is in use, damaged, of another run, or not to be resumed.
            CheckpointError: the run folder cannot be written.
        """
        if self.run_dir is None:
            return nullcontext(NullJournal())
        if self.output_dir is not None and _is_checkpoint(self.output_dir):
            self.refuse_done(run)
        opened = open_journal(
            self.run_dir,
            resume=self.resume,
            required=self.required,
            fingerprint=run,
            modifiers=modifiers,
            output_dir=self.output_dir,
        )
        return nullcontext(NullJournal()) if opened is None else opened

    @property
    def may_be_done(self) -> bool:
        """Whether a run is resumed whose checkpoint is there."""
        return self.resume and self.output_dir is not None and _is_checkpoint(self.output_dir)

    def refuse_done(self, run: Fingerprint) -> None:
        """Refuse to run where a checkpoint is.

        Args:
            run: what the result depends on.

        Raises:
            AlreadyDoneError: it is that of this very run.
            OutputError: it is another.
            ResumeError: it is no longer what was written.
        """
        assert self.output_dir is not None and self.run_dir is not None
        try:
            record = from_json((self.output_dir / RECORD_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            record = {}
        if not isinstance(record, dict) or record.get("fingerprint") != digest(run):
            raise OutputError(
                f"{self.output_dir}: holds the result of another run, which nothing may overwrite; name a new folder, or give what was "
                "given before"
            )
        check_written(self.output_dir, record)
        discard_finished(self.run_dir, run)
        raise AlreadyDoneError(f"{self.output_dir}: holds the result of this very run already; nothing is left to resume")


def check_places(output_dir: str | Path | None, run_dir: str | Path | None, *, resume: bool, source: str | Path | None) -> RunPlace:
    """Refuse folders that cannot be used, before the work starts. Nothing stays changed on the disk.

    Args:
        output_dir: where the checkpoint goes; must not exist or be empty, unless a run that may have completed is resumed.
        run_dir: where finished stages are kept; None names the sibling `<output_dir>.partial-run`.
        resume: go on where an earlier run stopped.
        source: folder of the model that is compressed; None for a model from memory.

    Returns:
        The folders.

    Raises:
        OutputError: a folder cannot be written, or holds something else.
        ResumeError: nothing says where to resume; or the run folder is in use, damaged, or holds a run that is not to be resumed.
    """
    if resume and output_dir is None and run_dir is None:
        raise ResumeError("resume: neither output_dir nor run_dir was given, so nothing says where the run is kept; give one of them")
    target = None
    if output_dir is not None:
        target = real_path(output_dir)
        if not (resume and _is_checkpoint(target)):
            check_output_dir(target, source=source)
    if run_dir is None and target is None:
        return RunPlace(None, None, resume=False, required=False)
    kept = check_run_dir(run_dir or default_run_dir(target or "."), resume=resume, source=source, output_dir=target)
    return RunPlace(target, kept, resume, required=resume or run_dir is not None)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / RECORD_FILE).is_file()
