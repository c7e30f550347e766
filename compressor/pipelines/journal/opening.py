"""Opening a run folder: a new run begins in it, or an old one goes on once everything has been found as it was left."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from compressor.errors import ResumeError
from compressor.lifecycle import Modifier
from compressor.model.atomic_folder import partial_path
from compressor.pipelines.journal.fingerprint import Fingerprint, changes, file_hashes
from compressor.pipelines.journal.journal import Journal
from compressor.pipelines.journal.lines import Lines
from compressor.pipelines.journal.run_folder import (
    RunFolder,
    check_names,
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
    expected = {folder.stage_file(entry.get("index")) for entry in entries} | {folder.stage_file(len(entries))}
    orphans = sorted(set(folder.path.glob("stage-*.safetensors")) - expected)
    if orphans:
        raise ResumeError(
            f"{folder.journal}: ends after stage {len(entries)}, though {orphans[0].name} is there, so lines are missing; restore it, "
            f"or remove {folder.path} to start over, or remove the stage files that it does not name"
        )
