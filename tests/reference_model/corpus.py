"""The text that the models of this repository learn from: files that lie on any machine with Python.

Files are read where they lie (standard library and installed packages) and never copied. The list is sorted, deduplicated by
content and hashed, so that two trainings can tell whether they saw the same text. One file in a hundred, chosen by the hash of its
content, is held out.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Our own packages are evaluation text, never training text.
EXCLUDED_PACKAGES = frozenset({"compressor", "harness", "tests", "golden"})
MIN_FILE_BYTES, MAX_FILE_BYTES = 400, 150_000
MAX_PACKAGE_BYTES = 12_000_000
HELD_OUT_SHARE = 100  # one file in this many


@dataclass(frozen=True)
class SourceFile:
    """One text file: `label` is `root/relative/path.py`, free of this machine's folders."""

    label: str
    path: Path
    sha256: str
    num_bytes: int

    @property
    def package(self) -> str:
        """The package that the file counts for: `stdlib`, or `site-packages/name`."""
        parts = self.label.split("/")
        return parts[0] if parts[0] == "stdlib" else "/".join(parts[:2])

    @property
    def held_out(self) -> bool:
        """True for the files that the model never trains on."""
        return int(self.sha256[:8], 16) % HELD_OUT_SHARE == 0

    def read(self) -> str:
        """Return the text of the file."""
        return self.path.read_text(encoding="utf-8")


def source_files(
    suffixes: Sequence[str] = (".py",), max_package_bytes: int = MAX_PACKAGE_BYTES, *, of_system: bool = False
) -> list[SourceFile]:
    """List the text files of this interpreter, and of the system if asked, sorted by label, each content once.

    Args:
        suffixes: of the files' names, by default those of Python sources.
        max_package_bytes: of one package, chosen by the hash of the content.
        of_system: take what other programs have put into the system's folders, too.

    Returns:
        The files, those that are held out among them.
    """
    roots = {"stdlib": Path(sysconfig.get_path("stdlib")), "site-packages": Path(sysconfig.get_path("purelib"))}
    if of_system:
        roots |= {name: Path("/usr") / name for name in ("include", "lib", "share")}
    listed = [_describe(label, path) for name, root in roots.items() for label, path in _text_files(name, root, suffixes)]
    files, seen, used = [], set(), dict[str, int]()
    # In the order of content hashes, so that the cap keeps a fair sample of a large package and not the front of its alphabet.
    for file in sorted((file for file in listed if file), key=lambda file: (file.sha256, file.label)):
        size = used.get(file.package, 0) + file.num_bytes
        if file.sha256 not in seen and size <= max_package_bytes:
            seen.add(file.sha256)
            used[file.package] = size
            files.append(file)
    return sorted(files, key=lambda file: file.label)


def list_hash(files: list[SourceFile]) -> str:
    """Return the sha256 of labels and contents of a file list."""
    lines = "".join(f"{file.label} {file.sha256}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _text_files(name: str, root: Path, suffixes: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*"):
        if path.suffix not in suffixes or not path.is_file():
            continue
        relative = path.relative_to(root)
        if name == "stdlib" and "site-packages" in relative.parts:
            continue
        if relative.parts[0] not in EXCLUDED_PACKAGES:
            yield f"{name}/{relative.as_posix()}", path


def _describe(label: str, path: Path) -> SourceFile | None:
    raw = path.read_bytes()
    if not MIN_FILE_BYTES <= len(raw) <= MAX_FILE_BYTES:
        return None
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return SourceFile(label, path, hashlib.sha256(raw).hexdigest(), len(raw))
