"""The folder of an unfinished run: its name, its lock, and who may use it.

lock                     held while a run works here; the kernel lets go of it when the process ends, however it ends
journal.jsonl            a line for the run, and one for each finished stage
stage-0000.safetensors   what each stage made
checkpoint               of a conversion without forwards: the files of the result, which are filled tensor by tensor
empty                    the same files before that, for a moment

Each line of the journal carries a checksum over itself and all lines before it. A kill in the middle of an append leaves a last line
without its end: that is found and dropped. Anything else that does not fit its checksum was changed after it was written, and is an error
that names the line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compressor.atomic import flush, own_names, real_path, reason, remove, whole_file
from compressor.errors import CheckpointError, ModelError, OutputError, ResumeError

_LOCK, JOURNAL = "lock", "journal.jsonl"
_FORMAT = 1
_CHECKPOINT, _EMPTY = "checkpoint", "empty"
# What lines of each kind hold; those of a conversion, which names what it counts, are "parts".
_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "run": frozenset({"fingerprint", "token", "output_dir"}),
        "stage": frozenset({"index", "name", "total", "modules", "file", "sha256", "tensors", "report", "memories"}),
        "parts": frozenset({"total", "finished", "done"}),
        "end": frozenset({"uncalled", "notes", "sha256"}),
        "done": frozenset(),
    }
)
_OWN_NAMES = own_names(rf"{_LOCK}|{_CHECKPOINT}|{_EMPTY}", rf"{re.escape(JOURNAL)}|(stage-\d+|end)\.safetensors")


class Lines:
    """The journal, open for appending.

    Attributes:
        path: of the file.
        entries: what its lines hold, in order.
        was_torn: whether a last line without its end was found, and dropped.
    """

    def __init__(self, path: Path, entries: list[dict[str, Any]], checksum: str, num_bytes: int, was_torn: bool = False) -> None:
        """Made by `create` and `read`."""
        self.path = path
        self.entries = entries
        self.was_torn = was_torn
        self._checksum, self._num_bytes = checksum, num_bytes

    @staticmethod
    def create(path: Path, first: Mapping[str, Any]) -> Lines:
        """Write a new file of one line: all of it, or nothing.

        Args:
            path: of the file; an existing one is replaced.
            first: the first entry; JSON types.

        Returns:
            The file.

        Raises:
            CheckpointError: it cannot be written.
        """
        checksum, line = _line("", first)
        with whole_file(path) as partial:
            partial.write_bytes(line)
        return Lines(path, [dict(first)], checksum, len(line))

    @staticmethod
    def read(path: Path) -> Lines:
        """Read a file; nothing on the disk is changed.

        Args:
            path: of the file.

        Returns:
            The file; a last line without its end is left out.

        Raises:
            ResumeError: a line does not fit its checksum, or the file cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ResumeError(f"{path}: cannot be read ({error.strerror}); {_remedy(path, 0)}") from error
        *whole, tail = data.split(b"\n")
        checksum, entries = "", []
        for number, text in enumerate(whole):
            expected, _ = text[:64].decode("ascii", "replace"), text[64:65]
            checksum = _checksum(checksum, text[65:])
            if checksum != expected or text[64:65] != b" ":
                raise ResumeError(f"{path}: line {number + 1} is not what was written (its checksum does not fit); {_remedy(path, number)}")
            entries.append(json.loads(text[65:]))
        if not entries:
            raise ResumeError(f"{path}: its first line is cut off; {_remedy(path, 0)}")
        return Lines(path, entries, checksum, len(data) - len(tail), was_torn=bool(tail))

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line and flush it to the disk; after an error the file is as it was.

        Args:
            entry: JSON types.

        Raises:
            OSError: the disk is full or fails.
        """
        checksum, line = _line(self._checksum, entry)
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, self._num_bytes)  # a line without its end, of this run or an earlier one
            os.lseek(descriptor, 0, os.SEEK_END)
            try:
                _write_all(descriptor, line)
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, self._num_bytes)
                raise
        finally:
            os.close(descriptor)
        self.entries.append(dict(entry))
        self._checksum, self._num_bytes, self.was_torn = checksum, self._num_bytes + len(line), False


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _line(previous: str, entry: Mapping[str, Any]) -> tuple[str, bytes]:
    text = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode()
    checksum = _checksum(previous, text)
    return checksum, checksum.encode() + b" " + text + b"\n"


def _checksum(previous: str, text: bytes) -> str:
    return hashlib.sha256(previous.encode() + b" " + text).hexdigest()


def _remedy(path: Path, num_good: int) -> str:
    remedy = f"restore the file, or remove {path.parent} to start over"
    if num_good < 2:
        return remedy
    return f"{remedy}; or keep its first {num_good} lines and the first {num_good - 1} stage files, and resume from there"


def check_run_dir(run_dir: str | Path, *, resume: bool, source: str | Path | None, output_dir: str | Path | None) -> Path:
    """Refuse a run folder that cannot be used, before the work starts. Nothing stays changed on the disk.

    Args:
        run_dir: the folder; need not exist.
        resume: whether an unfinished run in it is to be continued.
        source: folder of the model that is compressed; None for a model from memory.
        output_dir: where the checkpoint will be; None where none is written.

    Returns:
        The absolute path of the folder.

    Raises:
        OutputError: it is no folder, holds something else, cannot be written, or lies in a folder that must stay as it is.
        ResumeError: another run works in it, its journal is damaged, or it holds an unfinished run that is not to be resumed.
    """
    path = real_path(run_dir, "run_dir")
    if source is not None and path.is_relative_to(real_path(source, "model", ModelError)):
        raise OutputError(f"{path}: the run folder lies in the folder of the model that is compressed; name one outside of it")
    if output_dir is not None:
        target = real_path(output_dir)
        if path.is_relative_to(target) or target.is_relative_to(path):
            raise OutputError(f"{path}: run folder and output folder ({target}) lie one in the other; name two that do not")
    if not path.exists():
        return path
    check_names(path)
    # Tried at once: a run that cannot have the folder must end before hours of work, not after them.
    if (path / _LOCK).exists():
        try:
            folder = RunFolder(path)
            folder.lock()
            folder.unlock()
        except OSError as error:
            raise OutputError(f"{path}: cannot be used as run folder ({error.strerror}); name a folder that can be written") from error
    journal = read_journal(path)
    if journal is not None and not resume:
        refuse_to_overwrite(path, journal)
    return path


def check_names(path: Path) -> None:
    """Refuse a folder that holds what no run has written.

    Args:
        path: of the folder.

    Raises:
        OutputError: it is no folder, cannot be read, or holds other files.
    """
    try:
        strangers = [entry.name for entry in sorted(path.iterdir()) if _OWN_NAMES.fullmatch(entry.name) is None]
    except OSError as error:
        raise OutputError(f"{path}: cannot be used as run folder ({error.strerror}); name a new folder") from error
    if strangers:
        raise OutputError(f"{path}: is no run folder, for it holds {strangers[0]}; move that away, or name a new folder")


def read_journal(path: Path) -> Lines | None:
    """Read the journal of a run folder.

    Args:
        path: of the folder.

    Returns:
        The journal; None where there is nothing to resume.

    Raises:
        ResumeError: it is damaged, of another version, or gone while stages are still there.
    """
    if (path / JOURNAL).exists():
        journal = Lines.read(path / JOURNAL)
        _check_layout(path, journal)
        return None if journal.entries[-1]["kind"] == "done" else journal
    stages = sorted(path.glob("stage-*.safetensors"))
    if stages:
        raise ResumeError(f"{path / JOURNAL}: is gone, though {stages[0].name} is there; restore the file, or remove {path} to start over")
    return None


def _check_layout(path: Path, journal: Lines) -> None:
    """Refuse lines that lack what is read of them, before anything is."""
    kinds = [str(entry.get("what", entry.get("kind"))) for entry in journal.entries]
    fits = [kind in _KEYS and _KEYS[kind] | {"kind"} <= entry.keys() for kind, entry in zip(kinds, journal.entries, strict=True)]
    if journal.entries[0].get("format") != _FORMAT or kinds[0] != "run" or not all(fits):
        raise of_another_version(path)


def of_another_version(path: Path | str) -> ResumeError:
    """Say that a run folder holds what this version does not read.

    Args:
        path: of the folder, or what of it is meant.

    Returns:
        The error.
    """
    return ResumeError(f"{path}: was written by another version of this package; finish the run with that one, or remove the folder")


def refuse_to_overwrite(path: Path, journal: Lines) -> None:
    """Refuse to start a run where finished stages of another one would be lost.

    Args:
        path: of the folder.
        journal: what is there.

    Raises:
        ResumeError: there is at least one finished stage.
    """
    stages = [entry for entry in journal.entries if entry["kind"] == "stage"]
    if stages:
        raise ResumeError(
            f"{path}: holds a run that did not end ({stages[-1].get('finished', len(stages))} of {stages[-1]['total']} "
            f"{stages[-1].get('what', 'stages')} are finished); continue it with --resume "
            "(resume=True), or remove the folder to start over"
        )


class RunFolder:
    """A run folder that this process works in, once `lock` has returned."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing happens yet."""
        self.path = path
        self._descriptor: int | None = None
        self._made: list[Path] = []

    @property
    def journal(self) -> Path:
        """Path of the journal."""
        return self.path / JOURNAL

    @property
    def checkpoint(self) -> Path:
        """Path of the result of a conversion, as far as it has come."""
        return self.path / _CHECKPOINT

    @property
    def empty(self) -> Path:
        """Path of the files of that result as they are before anything has been written into them."""
        return self.path / _EMPTY

    def stage_file(self, index: int | None) -> Path:
        """Path of the file of a stage; None for what the end of the calibration leaves."""
        return self.path / ("end.safetensors" if index is None else f"stage-{index:04d}.safetensors")

    def create(self) -> None:
        """Make the folder where there is none, and lock it.

        Raises:
            CheckpointError: it cannot be made.
            ResumeError: another run works in it.
        """
        # So that a run which keeps nothing leaves no folder behind.
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            flush(self.path.parent)
        except OSError as error:
            self._remove_folders()
            raise CheckpointError(f"{self.path}: cannot be written ({reason(error)}); name another run folder") from error

    def lock(self) -> None:
        """Keep other runs out, until `unlock` or the end of the process.

        Raises:
            ResumeError: another run works in the folder.
        """
        while True:
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
                os.close(descriptor)
                raise ResumeError(
                    f"{self.path}: another run works in this folder{f' (process {holder})' if holder else ''}; "
                    "wait for its end, or name another run folder"
                ) from error
            if _is_same_file(descriptor, self.path / _LOCK):
                break
            os.close(descriptor)  # the run that held it has just removed the folder's files
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # a full disk: the number only makes the message of another run better
            os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def unlock(self) -> None:
        """Let others in; may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def clear(self) -> None:
        """Remove what runs have left here; the journal last, so that at no moment a stage is without it. The lock stays."""
        files = sorted(path for path in self.path.iterdir() if path.name not in (_LOCK, JOURNAL) and _OWN_NAMES.fullmatch(path.name))
        for path in (*files, self.journal):
            remove(path)

    def remove(self) -> None:
        """Remove the folder with what runs have left in it."""
        self.clear()
        (self.path / _LOCK).unlink(missing_ok=True)
        self.unlock()
        with suppress(OSError):  # somebody has put a file into it
            self.path.rmdir()

    def give_up(self) -> None:
        """Let others in, and take away what only the attempt to work here has made."""
        if {entry.name for entry in self.path.iterdir()} <= {_LOCK}:
            self.remove()
            self._remove_folders()
        self.unlock()

    def _remove_folders(self) -> None:
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()


def header(fingerprint: dict[str, Any], token: str, output_dir: str | Path | None) -> dict[str, Any]:
    """Make the first line of a journal.

    Args:
        fingerprint: what the result depends on.
        token: part of the name of the folder that the checkpoint is written to before it is whole.
        output_dir: where the checkpoint will be.

    Returns:
        JSON types.
    """
    target = None if output_dir is None else str(Path(output_dir).resolve())
    return {"kind": "run", "format": _FORMAT, "fingerprint": fingerprint, "token": token, "output_dir": target}


def remove_unfinished_checkpoint(first: dict[str, Any], name_of: Any) -> None:
    """Remove the half-written checkpoint of a run that was killed while it saved.

    Args:
        first: the first line of its journal.
        name_of: gives the temporary path for an output folder and a token.
    """
    if first["output_dir"] is not None:
        shutil.rmtree(name_of(Path(first["output_dir"]), first["token"]), ignore_errors=True)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
