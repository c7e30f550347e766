"""Give the files and folders of goldens, as an older harness named them, the names that this one gives. Bytes never change. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import GoldenError
from harness.goldens.store.listing import state_of_file
from harness.goldens.store.manifest import GoldenEntry, Manifest, Variant, read_anywhere
from harness.goldens.store.paths import MANIFEST, SUFFIX, file_name, folder_of
from harness.goldens.store.writer import locked, replace_files

_WRITTEN_ONCE = re.compile(r"[a-z0-9+%~_-][a-z0-9+%~_.@-]*" + re.escape(SUFFIX))
"""What some harness has called a file. Any other name was edited in, and could lead out of the folder."""


@dataclass(frozen=True)
class _Move:
    name: str
    source: Path
    target: Path
    data: bytes


def rename(root: Path) -> tuple[str, ...]:
    """Rename the files of a store, with their manifests, all or none.

    Args:
        root: of the store.

    Returns:
        A line for each file that was renamed.

    Raises:
        GoldenError: there is no store, a file is not the one of its manifest, two goldens would have one file, or a folder cannot be
            written; nothing was renamed.
    """
    if not root.is_dir():
        raise GoldenError(f"{root}: is no folder of goldens; name it with --golden-dir")
    with locked(root):
        old = [read_anywhere(path.parent) for path in sorted(root.rglob(MANIFEST))]
        _check_depth(root, old)
        moves = [move for manifest in old for entry in manifest.goldens.values() for move in _moves(manifest, entry)]
        _check_apart(moves)
        due = [move for move in moves if move.source != move.target]
        files: dict[Path, bytes | None] = {move.target: move.data for move in due}
        files |= {move.source: None for move in due if move.source not in files}
        changed = {path for move in due for path in (move.source.parent / MANIFEST, move.target.parent / MANIFEST)}
        replace_files(files, [manifest for manifest in _renamed(old) if manifest.path in changed])
        for folder in {move.source.parent for move in due}:
            with suppress(OSError):  # other files may lie there
                folder.rmdir()
    return tuple(f"{move.source.relative_to(root).as_posix()} -> {move.target.relative_to(root).as_posix()}" for move in due)


def _check_depth(root: Path, manifests: list[Manifest]) -> None:
    """A golden that lies less deep than its name was moved by hand; counted from there, its folder could lie outside the store."""
    for manifest in manifests:
        depth = len(manifest.path.parent.relative_to(root).parts)
        for name in manifest.goldens:
            if name.count("/") > depth:
                raise GoldenError(
                    f"{manifest.path}: golden {name!r}: belongs into the folder {folder_of(name)}; nothing was renamed; move manifest and "
                    "files back"
                )


def _moves(manifest: Manifest, entry: GoldenEntry) -> Iterator[_Move]:
    for variant in entry.variants:
        source = manifest.path.parent / variant.file
        if not _WRITTEN_ONCE.fullmatch(variant.file):
            raise GoldenError(f"{manifest.path}: golden {entry.name!r}: names the file {variant.file!r}, as no harness does; undo the edit")
        try:
            data = source.read_bytes()
        except OSError as error:
            raise GoldenError(f"{source}: cannot be read ({error.strerror}); take it from version control again") from error
        if state_of_file(source.parent, variant) != "ok":
            raise GoldenError(f"{source}: is not the file that its manifest describes; nothing was renamed; take both from one version")
        yield _Move(entry.name, source, _folder(manifest, entry.name) / _file(entry, variant), data)


def _folder(manifest: Manifest, name: str) -> Path:
    """The folder where a golden belongs: as deep below its store as the one where it lies."""
    folder, depth = manifest.path.parent, name.count("/")
    return (folder, *folder.parents)[depth] / folder_of(name)


def _file(entry: GoldenEntry, variant: Variant) -> str:
    return file_name(entry.name, str(variant.platform) if "@" in variant.file else "")


def _check_apart(moves: list[_Move]) -> None:
    sources, taken = {move.source for move in moves}, dict[Path, _Move]()
    for move in moves:
        other = taken.setdefault(move.target, move)
        if other is not move:
            raise GoldenError(
                f"{move.target}: would be the file of golden {other.name!r}, now {other.source}, and of golden {move.name!r}, now "
                f"{move.source}; nothing was renamed; delete the file and the entry of one of both, and give its test another name"
            )
        if move.target not in sources and move.target.exists():
            raise GoldenError(f"{move.target}: exists and is in no {MANIFEST}; nothing was renamed; delete it")


def _renamed(old: list[Manifest]) -> list[Manifest]:
    """Return the manifests as they are to be; one that has lost every golden is empty."""
    new = {manifest.path: Manifest(manifest.path) for manifest in old}
    for manifest in old:
        for name, entry in manifest.goldens.items():
            path = _folder(manifest, name) / MANIFEST
            variants = tuple(replace(variant, file=_file(entry, variant)) for variant in entry.variants)
            new[path] = new.get(path, Manifest(path)).with_entries({name: replace(entry, variants=variants)})
    return list(new.values())
