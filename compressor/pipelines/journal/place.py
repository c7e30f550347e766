"""Where a run keeps its finished stages and its result, and what that means for a run that begins or goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import AlreadyDoneError, OutputError, ResumeError
from compressor.lifecycle import Modifier
from compressor.model.atomic_folder import check_output_dir, real_path
from compressor.model.tensor_digests import check_written
from compressor.pipelines.journal.fingerprint import Fingerprint, digest
from compressor.pipelines.journal.journal import NoJournal
from compressor.pipelines.journal.opening import discard_finished, open_journal
from compressor.pipelines.journal.run_folder import check_run_dir, default_run_dir

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

    def open(self, run: Fingerprint, modifiers: Sequence[Modifier]) -> AbstractContextManager[NoJournal]:
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
            return nullcontext(NoJournal())
        if self.output_dir is not None and _is_checkpoint(self.output_dir):
            self._refuse_done(run)
        opened = open_journal(
            self.run_dir,
            resume=self.resume,
            required=self.required,
            fingerprint=run,
            modifiers=modifiers,
            output_dir=self.output_dir,
        )
        return nullcontext(NoJournal()) if opened is None else opened

    @property
    def may_be_done(self) -> bool:
        """Whether a run is resumed whose checkpoint is there."""
        return self.resume and self.output_dir is not None and _is_checkpoint(self.output_dir)

    def _refuse_done(self, run: Fingerprint) -> None:
        assert self.output_dir is not None and self.run_dir is not None
        try:
            record = json.loads((self.output_dir / RECORD_FILE).read_text(encoding="utf-8"))
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
