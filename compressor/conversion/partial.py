"""A conversion that has begun: the files of its result, and which of their tensors stand.

It lies in the run folder beside the output folder, `<output_dir>.partial-run`. The journal names a tensor after its bytes have been given
to the system. What a loss of power may take nevertheless is found when a run goes on: every tensor that the journal names is read again.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from compressor.atomic import flush, flush_all, reason, remove
from compressor.conversion.files import Files
from compressor.conversion.units import Done, Kind, Unit
from compressor.errors import CheckpointError, ResumeError
from compressor.model.headers import read_header
from compressor.pipelines.journal.fingerprint import Fingerprint, changes
from compressor.pipelines.journal.run_folder import (
    Lines,
    RunFolder,
    check_names,
    header,
    of_another_version,
    read_journal,
    refuse_to_overwrite,
)

_SECONDS = 1.0  # between two lines of the journal, each of which is flushed to the disk
_READ_BYTES = 1 << 22


class PartialRun:
    """The run folder of one conversion, which is locked as long as it is open.

    Attributes:
        checkpoint: folder of the result, as far as it has come.
    """

    def __init__(self, path: Path, identity: Fingerprint, *, resume: bool) -> None:
        """Open the folder.

        Args:
            path: of the run folder.
            identity: what the result depends on.
            resume: go on with what is there.

        Raises:
            ResumeError: another run works there, it is damaged, or it holds another run, or one that is not to be resumed.
            CheckpointError: it cannot be written.
        """
        self._folder, self._identity = RunFolder(path), identity
        self._folder.create()
        try:
            check_names(path)
            found = read_journal(path)
            if found is not None and not resume:
                refuse_to_overwrite(path, found)
            if found is not None and resume:
                self._check_same(path, found)
        except BaseException:
            self._folder.give_up()
            raise
        self.checkpoint = self._folder.checkpoint
        self._lines = found if resume and found is not None and self.checkpoint.is_dir() else None
        self._done: list[Done] = []
        last = {} if self._lines is None else self._lines.entries[-1]
        self._num_noted, self._total = int(last.get("finished", 0)), int(last.get("total", 0))
        self._said = 0.0
        self._is_published = False

    def _check_same(self, path: Path, found: Lines) -> None:
        different = changes(found.entries[0]["fingerprint"], self._identity)
        if different:
            raise ResumeError(
                f"{path}: holds another run and cannot be resumed with this one: {'; '.join(different)}; give what was given before, or "
                "remove the folder to start over"
            )

    def __enter__(self) -> Self:
        """Return the run."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Keep what has been done, and let others in."""
        if self._is_published:
            return
        with suppress(CheckpointError):  # the error that is on its way says more; what is not noted is done again
            self._write_down()
        if error is not None and self._num_noted:
            kept = f"{self._num_noted} of {self._total} parts are kept in {self._folder.path}"
            error.add_note(f"{kept}; the same command with --resume (resume=True) goes on from there")
        elif error is not None:
            self._folder.clear()
        self._folder.give_up()

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Have the files of the result written without values. Of an earlier run those are kept that are what they were but for values.

        Yields:
            An empty folder for them.

        Raises:
            CheckpointError: the disk is full or fails.
        """
        empty = self._folder.empty
        try:
            if self._lines is None:
                self._folder.clear()
            remove(empty)
            empty.mkdir()
            yield empty
            self.checkpoint.mkdir(exist_ok=True)
            names = {path.name for path in empty.iterdir()}
            for path in [path for path in self.checkpoint.iterdir() if path.name not in names]:
                remove(path)
            for name in names:
                if not _is_filled(self.checkpoint / name, empty / name):
                    remove(self.checkpoint / name)
                    (empty / name).rename(self.checkpoint / name)
            remove(empty)
        except OSError as error:
            raise CheckpointError(f"{self._folder.path}: cannot be written ({reason(error)}); make room or repair the disk") from error

    def open(self, units: Sequence[Unit], output_dir: Path) -> dict[tuple[Kind, str], Done]:
        """Find what has been done, once the files are there.

        Args:
            units: all units.
            output_dir: where the result goes.

        Returns:
            What came of finished units, by kind and name; those whose tensors are not what was written are left out.

        Raises:
            CheckpointError: the disk has no room for the rest.
            ResumeError: another version of this package noted it.
        """
        self._total = len(units)
        self._check_room()
        self._said = time.monotonic()
        if self._lines is None:
            flush_all(self.checkpoint)
            self._lines = Lines.create(self._folder.journal, header(self._identity, "", output_dir))
            return {}
        try:
            noted = [Done.model_validate(one) for entry in self._lines.entries[1:] for one in entry["done"]]
        except ValidationError as error:
            raise of_another_version(self._folder.path) from error
        found = {(done.kind, done.name): done for done in noted}
        whole = {key: found[key] for unit in units if (key := (unit.kind, unit.name)) in found and self._stands(unit, found[key])}
        self._num_noted = len(whole)
        return whole

    def _stands(self, unit: Unit, done: Done) -> bool:
        with Files(self.checkpoint) as files:
            for target in unit.targets.values():
                digest = hashlib.sha256()
                stored_bytes = target.num_bytes
                for first in range(0, stored_bytes, _READ_BYTES):
                    digest.update(files.read_bytes(target.file, target.start + first, min(_READ_BYTES, stored_bytes - first)).numpy().data)
                if done.digests.get(target.name) != f"{target.label} {digest.hexdigest()}":
                    return False
        return True

    def _check_room(self) -> None:
        files = [path.stat() for path in self.checkpoint.iterdir()]
        needed, free = sum(one.st_size - 512 * one.st_blocks for one in files), shutil.disk_usage(self.checkpoint).free
        if needed > free:
            raise CheckpointError(
                f"{self.checkpoint.parent}: this run will write about {needed:,} bytes there, and {free:,} are free; free some space or "
                "name another disk"
            )

    def finish(self, done: Done) -> None:
        """Note what came of a unit.

        Args:
            done: of the unit.
        """
        self._done.append(done)
        if time.monotonic() - self._said >= _SECONDS:
            self._write_down()

    def _write_down(self) -> None:
        if self._done and self._lines is not None:
            entry: Mapping[str, Any] = {
                "kind": "stage",
                "what": "parts",
                "total": self._total,
                "finished": self._num_noted + len(self._done),
                "done": [one.model_dump(mode="json", exclude_defaults=True) for one in self._done],
            }
            try:
                self._lines.append(entry)
            except OSError as error:
                raise CheckpointError(f"{self._lines.path}: cannot be written ({reason(error)}); make room or repair the disk") from error
            self._num_noted += len(self._done)
            self._done = []
        self._said = time.monotonic()

    def publish(self, output_dir: Path) -> None:
        """Let the result appear, and remove the run folder.

        Args:
            output_dir: where it goes; not there, or empty.

        Raises:
            CheckpointError: the disk fails, or the folder was filled meanwhile.
        """
        try:
            flush_all(self.checkpoint)
            output_dir.parent.mkdir(parents=True, exist_ok=True)
            self.checkpoint.rename(output_dir)  # replaces an empty folder, refuses any other
            flush(output_dir.parent)
        except OSError as error:
            raise CheckpointError(f"{output_dir}: cannot be written ({reason(error)}); go on with --resume") from error
        self._is_published = True
        self._folder.remove()


def remove_leftover(path: Path) -> None:
    """Remove the run folder of a conversion whose result is complete.

    Args:
        path: of the folder.
    """
    if path.is_dir() and not (path / "checkpoint").exists():
        remove(path)


def _is_filled(path: Path, empty: Path) -> bool:
    """Tell whether a weight file differs from an empty one by the values of its tensors at most."""
    if path.suffix != ".safetensors" or not path.is_file() or path.stat().st_size != empty.stat().st_size:
        return False
    begin = min((one.start for one in read_header(empty).values()), default=empty.stat().st_size)
    with path.open("rb") as stream, empty.open("rb") as wanted:
        return stream.read(begin) == wanted.read(begin)
