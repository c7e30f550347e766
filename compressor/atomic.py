"""Files and folders that appear whole or not at all.

Everything is written into a sibling of the place and flushed to the disk; one rename then makes it visible. Whatever ends the work before
that (a full disk, ctrl-C, a bug) leaves the place as it was. `whole_or_nothing` is for a folder, `whole_file` for a file that a library
writes, `write_whole` for bytes that several processes may write at one time, `stage` for many files that change together.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compressor.errors import CheckpointError, ModelError, OutputError, UserInputError

# A file that appears whole or not at all, and the flushing that makes files and names durable.

PARTIAL_SUFFIX = ".partial"
"""What the folder is called in which a file is made: its name and this."""


_OF_SYSTEMS = r"\.DS_Store|\._.*|\.nfs\w+|Thumbs\.db|desktop\.ini"  # put into any folder by systems that show or serve it


def own_names(exact: str, made_whole: str) -> re.Pattern[str]:
    """Make a pattern of the names that a folder of ours may hold, with what a kill leaves in it.

    Args:
        exact: pattern of files that are written in place.
        made_whole: pattern of files that come from `whole_file`.

    Returns:
        The pattern. It knows what systems put into any folder, and safetensors' temporary file, which earlier releases let it make
        beside the file.
    """
    return re.compile(rf"{exact}|({made_whole})({re.escape(PARTIAL_SUFFIX)})?|\.tmp\w{{6}}|{_OF_SYSTEMS}")


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give a path to write to, in a folder of its own beside `target`; then flush it, rename it to `target` and flush the folder around.

    A library may make temporary files beside the one that it was told to write (safetensors does): a kill leaves them in that folder.

    Args:
        target: the file; an existing one is replaced.

    Yields:
        The temporary path, of the same name.

    Raises:
        CheckpointError: the disk is full or fails; an existing file is as it was.
    """
    if not target.name or target.is_dir():
        raise CheckpointError(f"{target}: is a folder; name a file in it")
    place = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        remove(place)
        place.mkdir()
        yield place / target.name
        flush(place / target.name)
        (place / target.name).replace(target)
        flush(target.parent)
        remove(place)
    except BaseException as error:
        with suppress(OSError):  # the error that is on its way says more
            remove(place)
        if _is_of_disk(error):
            advice = "make its folder first" if isinstance(error, FileNotFoundError) else "make room or repair the disk"
            raise CheckpointError(f"{target}: cannot be written ({reason(error)}); {advice}") from error
        raise


def stage(path: Path, data: bytes) -> Path:
    """Write the content of a file beside its place.

    Args:
        path: where it will stand; its folder is made.
        data: its content.

    Returns:
        The partial file; renaming it to `path` makes it visible.

    Raises:
        OSError: the disk is full, or the folder cannot be written; nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{secrets.token_hex(6)}{PARTIAL_SUFFIX}")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    return partial


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or replace it.

    Args:
        path: of the file; its folder is made.
        data: its content.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the file is as before.
    """
    partial = stage(path, data)
    try:
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; one that is not there is no error.

    Args:
        path: of the file or folder.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make a file, or the names in a folder, durable: after it a loss of power takes nothing away.

    Args:
        path: a file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):  # some file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def _is_of_disk(error: BaseException) -> bool:
    """An error of the file system, also where safetensors met it, that nobody has put into words yet."""
    from safetensors import SafetensorError  # here, so that commands answer without it

    return isinstance(error, OSError | SafetensorError) and not isinstance(error, CheckpointError)


def reason(error: BaseException) -> str:
    """Say in few words why a disk refused.

    Args:
        error: of the file system or of safetensors.

    Returns:
        The system's text where there is one.
    """
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


# What says that a folder holds a model, whole or in part.
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "compression.json", "*.bin")


def real_path(path: object, name: str = "output_dir", error: type[UserInputError] = OutputError) -> Path:
    """Make a path of the user's absolute, with its symbolic links followed.

    Args:
        path: need not exist.
        name: of the argument, for the error.
        error: class of the error.

    Returns:
        The absolute path.

    Raises:
        UserInputError: of the class that was given: it is no path, or cannot be followed.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise error(f"{name}: {path!r} is no path; name a folder")
    try:
        os.fsdecode(path).encode("utf-8")  # safetensors and JSON take no other
        return Path(path).resolve()
    except UnicodeEncodeError as problem:
        raise error(f"{name}: {os.fsencode(path)!r} is no UTF-8, and libraries take nothing else; rename it") from problem
    except (RuntimeError, OSError, ValueError) as problem:  # links in a circle, a NUL in the name
        raise error(f"{name}: {str(path)!r} cannot be followed ({problem}); name another folder") from problem


_BEGINS = {".json": (b"{", b"["), ".svg": (b"<?xml", b"<svg"), ".png": (b"\x89PNG",), ".onnx": (b"\x08",), ".zip": (b"PK",)}
"""What files begin with that are written here. Of .onnx that is the tag of its first field, which all that write it put first."""


def check_output_file(path: Path, *suffixes: str) -> None:
    """Refuse a name that does not say what the file will hold, and one under which something of another kind lies.

    Args:
        path: to be written; a file of the same kind, or an empty one, is replaced.
        *suffixes: endings that the name may have, such as `.json`.

    Raises:
        OutputError: another ending, a folder of that name, another content than the ending says, or no folder to put it into, or one that
            takes no file.
    """
    if path.suffix not in suffixes:
        kinds = " or ".join(suffixes)
        raise OutputError(f"{path}: a file of the kind {kinds} goes there, and this names another; end the name in {kinds}")
    if path.is_dir():
        raise OutputError(f"{path}: it is a folder; name a file")
    if path.suffix in _BEGINS and path.is_file():
        _check_beginning(path)
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}; make it first")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:  # rights alone do not say it: of mounts that are read only, and for those who may do anything
        raise OutputError(f"{path}: {path.parent} takes no file ({error.strerror or error}); choose another folder") from error


def _check_beginning(path: Path) -> None:
    try:
        with path.open("rb") as file:
            begins = file.read(16).lstrip()
    except OSError as error:
        raise OutputError(f"{path}: it is there and cannot be read ({error.strerror or error}); name another file") from error
    if begins and not begins.startswith(_BEGINS[path.suffix]):
        raise OutputError(f"{path}: what is there is no {path.suffix}, and nothing of another kind is replaced; name another file")


def check_output_dir(output_dir: str | Path, *, source: str | Path | None = None, beside_others: bool = False) -> Path:
    """Refuse an output folder that could not be written, before the work starts. Nothing stays changed on the disk.

    Args:
        output_dir: folder to be written; must not exist, or be empty.
        source: folder of a model, which must stay untouched; None for a model from memory.
        beside_others: the folder may hold other files, such as a tokenizer, but no model.

    Returns:
        The absolute path of the folder.

    Raises:
        OutputError: it is a file, not empty, the current folder, a mount point, inside the source folder, or cannot be created.
    """
    target = real_path(output_dir)
    if source is not None and target.is_relative_to(real_path(source, "model", ModelError)):
        raise OutputError(f"{target}: the output folder lies in the folder of the model, which is only read; name one outside of it")
    try:
        if target.exists():
            _check_empty_dir(target, beside_others)
        places = (target, *target.parents) if beside_others else target.parents
        # Always the same name: one that a kill leaves is taken away by the next run.
        probe = next(place for place in places if place.exists()) / f".{target.name}.probe"
        probe.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another run has taken it for its own
            probe.rmdir()
    except OSError as error:
        raise OutputError(f"{target}: cannot be created ({error.strerror}); name a folder that can be written") from error
    return target


@contextmanager
def whole_or_nothing(target: Path, num_bytes: int = 0, token: str | None = None, *, beside_others: bool = False) -> Iterator[Path]:
    """Give a temporary sibling of `target` to write into; rename it to `target` at the end, or remove it.

    A folder that is there already and may hold other files gets the files one by one, each whole, config.json as the last: before it
    nobody takes the folder for a model.

    Args:
        target: what `check_output_dir` returned.
        num_bytes: about how much will be written; more than the disk has free is an error before anything is written.
        token: part of the temporary name, for a run that a later one may have to clean up after; None for a random one.
        beside_others: `target` may hold other files.

    Yields:
        The temporary folder.

    Raises:
        OutputError: `target` holds a file of a name that is written; nothing of the output is left.
        CheckpointError: the disk is full or fails, or `target` was filled meanwhile; nothing of the output is left.
    """
    new_parents = [parent for parent in target.parents if not parent.exists()]
    inside = beside_others and target.exists()
    partial = partial_path(target / target.name if inside else target, token or secrets.token_hex(4))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(target.parent, num_bytes)
        if beside_others:  # what a kill left behind
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        flush_all(partial)
        if inside:
            _move_into(partial, target)
        else:
            partial.rename(target)  # replaces an empty folder, refuses any other
        for parent in (target.parent, *(made.parent for made in new_parents)):
            flush(parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()
        if _is_of_disk(error):
            raise CheckpointError(f"{target}: cannot be written ({reason(error)}); nothing of it was kept") from error
        raise


def partial_path(target: Path, token: str) -> Path:
    """Name the temporary sibling of a folder.

    Args:
        target: what the folder will be called.
        token: tells apart what several runs write at one time.

    Returns:
        The path.
    """
    return target.with_name(f".{target.name}.partial-{token}")


def default_run_dir(output_dir: str | Path) -> Path:
    """Name the run folder that belongs to an output folder: its sibling, which keeps what a run has finished.

    Args:
        output_dir: where the checkpoint will be.

    Returns:
        The path.
    """
    target = real_path(output_dir)
    return target.with_name(f"{target.name}.partial-run")


def _check_empty_dir(target: Path, beside_others: bool) -> None:
    if not target.is_dir():
        raise OutputError(f"{target}: is a file where a folder is to be written; name a new folder")
    if beside_others:
        model = next((name for pattern in _MODEL_FILES for name in sorted(target.glob(pattern))), None)
        if model is not None:
            raise OutputError(f"{target}: holds a model already ({model.name}), and nothing is overwritten; name a new folder")
        return
    if any(target.iterdir()):
        raise OutputError(f"{target}: exists and is not empty, and nothing is overwritten; name a new folder")
    if target == Path.cwd() or target.is_mount():
        kind = "the current folder" if target == Path.cwd() else "a mount point"
        raise OutputError(f"{target}: is {kind} and cannot be replaced in one step; name a folder in it")


def _move_into(partial: Path, target: Path) -> None:
    paths = sorted(partial.iterdir(), key=lambda path: (path.name == "config.json", path.name))
    taken = [path.name for path in paths if (target / path.name).exists()]
    if taken:
        raise OutputError(f"{target}: holds {taken[0]} already, and nothing is overwritten; name a new folder")
    moved: list[Path] = []
    try:
        for path in paths:
            moved.append(path.rename(target / path.name))
        partial.rmdir()
    except BaseException:
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _check_space(parent: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise CheckpointError(
            f"{parent}: {num_bytes:,} bytes are to be written but {free:,} are free; free some space or name another disk"
        )


def flush_all(folder: Path) -> None:
    """Make files and names durable, so that a rename never shows a folder whose content is still on the way.

    Args:
        folder: with all that is in it.
    """
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666  # safetensors makes files that only their owner reads, whatever the umask says
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(mode)
        flush(path)
    flush(folder)
