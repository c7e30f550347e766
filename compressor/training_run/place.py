"""Where a training keeps its states and its result: checked before the work starts, held while it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compressor.atomic import check_output_dir, default_run_dir, real_path
from compressor.errors import AlreadyDoneError, OutputError, ResumeError
from compressor.json_text import from_json
from compressor.model.checkpoints.audit import check_written
from compressor.pipelines.journal.fingerprint import Fingerprint, digest
from compressor.pipelines.journal.place import RECORD_FILE
from compressor.training_run.states import States, check_states_dir, opened


@dataclass(frozen=True)
class Place:
    """The folders of one run; made by `check_place`.

    Attributes:
        output_dir: where the checkpoint will be; None keeps the result in memory.
        run_dir: where states are kept until then; None keeps none.
        resume: go on where an earlier run stopped.
    """

    output_dir: Path | None
    run_dir: Path | None
    resume: bool

    @contextmanager
    def open(self, run: Fingerprint) -> Iterator[States]:
        """Hold the run folder, once everything that the result depends on is known.

        Args:
            run: what the result depends on.

        Yields:
            The states.

        Raises:
            AlreadyDoneError: the output folder holds the result of this very run.
            OutputError: the output folder holds something else.
            ResumeError: the run folder is in use, damaged, of another run, or not to be resumed.
            CheckpointError: the run folder cannot be written.
        """
        if self.output_dir is not None and (self.output_dir / RECORD_FILE).is_file():
            self._refuse_done(self.output_dir, run)
        with opened(self.run_dir, run, resume=self.resume, output_dir=self.output_dir) as states:
            yield states

    def _refuse_done(self, output_dir: Path, run: Fingerprint) -> None:
        try:
            record = from_json((output_dir / RECORD_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            record = {}
        if not isinstance(record, dict) or record.get("fingerprint") != digest(run):
            raise OutputError(
                f"{output_dir}: holds the result of another run, which nothing may overwrite; name a new folder, "
                "or give what was given before"
            )
        check_written(output_dir, record)
        if self.run_dir is not None and self.run_dir.exists():  # killed between the last rename and the clearing up
            with opened(self.run_dir, run, resume=True, output_dir=output_dir) as states:
                states.finish()
        raise AlreadyDoneError(f"{output_dir}: holds the result of this very run already; nothing is left to resume")


def check_place(output_dir: str | Path | None, run_dir: str | Path | None, *, resume: bool, source: str | Path | None) -> Place:
    """Refuse folders that cannot be used, before the work starts. Nothing stays changed on the disk.

    Args:
        output_dir: where the checkpoint goes; must not exist or be empty, unless a run that may have completed is resumed.
        run_dir: where states are kept; None names the sibling `<output_dir>.partial-run`.
        resume: go on where an earlier run stopped.
        source: folder of the model; None for a model from memory.

    Returns:
        The folders.

    Raises:
        OutputError: a folder cannot be written, or holds something else.
        ResumeError: nothing says where to resume, or the run folder holds a run that is not to be resumed.
    """
    if resume and output_dir is None and run_dir is None:
        raise ResumeError("resume: neither output_dir nor run_dir was given, so nothing says where the run is kept; give one of them")
    target = None
    if output_dir is not None:
        target = real_path(output_dir)
        if not (resume and (target / RECORD_FILE).is_file()):
            check_output_dir(target, source=source)
    if run_dir is None and target is None:
        return Place(None, None, resume=False)
    kept = check_states_dir(run_dir or default_run_dir(target or "."), resume=resume, source=source, output_dir=target)
    return Place(target, kept, resume)
