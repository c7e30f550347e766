"""The folder as bytes: nothing in it runs when it is read, nothing is there that belongs to nobody, and it stays as it was looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compressor.json_text import from_json
from harness.release.candidate import Candidate, Check
from harness.reporting.record import CheckRecord, Claim
from harness.validation.format.files import TOKENIZER_FILES
from harness.validation.format.record import file_hashes, folder_entries

SAFE = Claim("files.safe", "No file runs code when it is read: no pickle, no Python, no program, no link or pipe, no auto_map")
FOREIGN = Claim("files.foreign", "Every file is the base's, or one that a checkpoint has")
STABLE = Claim("files.stable", "The files are the same after all checks as before them")

_ODD = _LINK, _NO_FILE = ("is a link", "is a pipe, a socket or a device")
_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".py", ".so", ".dill", ".joblib", ".npy", ".npz", ".h5")
_PICKLES = (*(bytes([128, protocol]) for protocol in range(2, 6)), b"PK\x03\x04")  # protocols 2 to 5; torch.save writes a zip
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.md", "README*", "LICENSE*", "NOTICE*")
_LOOKED_AT = 65536  # bytes: of a program, or of what was compressed, some of the first are 0
_KNOWN = (
    *("config.json", "generation_config.json", "compression.json", "*.safetensors", "*.safetensors.index.json"),
    *("README.md", "LICENSE*", "NOTICE*", *TOKENIZER_FILES),
)


def _look_for_code(candidate: Candidate) -> CheckRecord:
    findings = [found for path in folder_entries(candidate.compressed) for found in _dangers(path, candidate.compressed)]
    return SAFE.found(findings, "every file is data", noun="danger")


def _dangers(path: Path, folder: Path) -> Iterator[str]:
    name = path.relative_to(folder).as_posix()
    if odd := _oddity(path, folder):
        yield f"{name}: {odd}"
    if not path.is_file():
        return
    if path.suffix.lower() in _CODE_SUFFIXES:
        yield f"{name}: files of this kind can run code when they are loaded"
        return
    with path.open("rb") as file:
        start = file.read(_LOOKED_AT)
    if start.startswith(_PICKLES):
        yield f"{name}: begins as a pickle or an archive does"
    elif b"\0" in start and any(fnmatchcase(path.name, text) for text in _TEXTS):
        yield f"{name}: is no text, as its name says"
    if path.suffix == ".json" and "auto_map" in _object(path):
        yield f"{name}: auto_map asks a loader to run code"


def _oddity(path: Path, folder: Path) -> str:
    """Why an entry is no file of the folder, in words; else empty."""
    if path.is_symlink():
        return "" if path.is_file() and _is_cached(path, folder) else _LINK
    return "" if path.is_file() else _NO_FILE


def _is_cached(path: Path, folder: Path) -> bool:
    """Say whether a link is one of the hub's cache, where every file of a snapshot is a link to its blob."""
    return folder.parent.name == "snapshots" and path.resolve().parent == (folder.parent.parent / "blobs").resolve()


def _object(path: Path) -> Mapping[str, Any]:
    try:
        value = from_json(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # what cannot be read is told by the check of that file
    return value if isinstance(value, dict) else {}


def _look_for_strangers(candidate: Candidate) -> CheckRecord:
    folder, base = candidate.compressed, candidate.base
    names = [path.relative_to(folder).as_posix() for path in folder_entries(folder)]
    strange = [name for name in names if not (base / name).is_file() and not any(fnmatchcase(name, known) for known in _KNOWN)]
    return FOREIGN.found([f"{name}: belongs to nobody" for name in strange], f"{len(names)} files", noun="file")


def contents(folder: Path) -> dict[str, str]:
    """Return what a folder holds.

    Args:
        folder: a checkpoint.

    Returns:
        Name to sha256, or to what else it is: what a link or a pipe gives is another thing tomorrow.
    """
    odd = {path.relative_to(folder).as_posix(): word for path in folder_entries(folder) if (word := _oddity(path, folder))}
    return {**file_hashes(folder), **odd}


def digests(found: Mapping[str, str]) -> dict[str, str]:
    """Return those of files alone.

    Args:
        found: as of `contents`.

    Returns:
        sha256 by name.
    """
    return {name: what for name, what in found.items() if what not in _ODD}


def stable_record(before: Mapping[str, str], after: Mapping[str, str]) -> CheckRecord:
    """Hold the digests that go into the statement against those after the checks.

    Args:
        before: as of `contents`.
        after: likewise.

    Returns:
        The record.
    """
    return STABLE.found(differences(before, after), f"{len(before)} files", noun="file")


def differences(noted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return a line for each file that is missing, added, has another digest or is no file now.

    Args:
        noted: sha256 by name.
        found: as of `contents`.

    Returns:
        The lines, by name.
    """
    names = sorted(name for name in noted.keys() | found.keys() if noted.get(name) != found.get(name))
    return [f"{name}: {_change(noted.get(name), found.get(name))}" for name in names]


def _change(noted: str | None, found: str | None) -> str:
    if found is None or found in _ODD:
        return found or "is missing"
    return "was added" if noted is None else "has other bytes"


CHECKS = (Check(SAFE, _look_for_code), Check(FOREIGN, _look_for_strangers))
