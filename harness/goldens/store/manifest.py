"""The manifest beside the goldens of one folder: what each file holds, where it came from, and every loosening. No torch.

One sorted JSON file, so that a difference in version control reads line by line. It is read strictly: a mark of a merge conflict, a key
that stands there twice or a format of a newer harness is an error, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, PlainValidator, TypeAdapter

from compressor.errors import UserInputError
from compressor.json_text import from_json
from compressor.settings.kinds import WHOLE, Kind, Whole
from harness.errors import GoldenError
from harness.goldens.store.paths import MANIFEST, file_name, folder_of, same_file
from harness.goldens.store.provenance import Platform
from harness.settings_file import read_as
from harness.tolerance.tiers import TierMap

FORMAT = 1
_CONFLICT_MARKS = ("<<<<<<<", "=======", ">>>>>>>", "|||||||")


def _checked_step(step: Mapping[str, str]) -> Mapping[str, str]:
    if not {"date", "what", "reason"} <= set(step) or ("from" in step) != ("to" in step):
        raise ValueError("date, what and reason belong there, and from and to only together")
    return step


Words = Annotated[str, Kind(lambda value: isinstance(value, str), "a text")]
"""Any text: names of goldens and inputs may hold what no encoding takes, which a plain `str` of pydantic would refuse."""
Tiers = Annotated[TierMap, PlainValidator(TierMap.from_dict)]
_Sizes = Annotated[
    list[int],
    Kind(lambda sizes: isinstance(sizes, list) and all(WHOLE.holds(size) and size >= 0 for size in sizes), "a list of sizes"),
]
_Step = Annotated[Mapping[Words, Words], AfterValidator(_checked_step)]


@dataclass(frozen=True)
class TensorEntry:
    """What identifies one tensor.

    Attributes:
        sha256: of its bytes, in memory order.
        shape: of the tensor; for an input that is no tensor its number of bytes.
        dtype: torch's name for it; for an input that is no tensor a word for its kind.
    """

    sha256: Words
    shape: _Sizes
    dtype: Words

    def __str__(self) -> str:
        """Dtype, shape and the beginning of the hash."""
        return f"{self.dtype}{self.shape} {self.sha256[:12]}"


@dataclass(frozen=True)
class Variant:
    """What one platform accepted.

    Attributes:
        platform: where it was computed.
        file: name of the file, in the manifest's folder.
        sha256: of the file.
        tensors: what the file holds.
        versions: of torch and whatever else was loaded.
    """

    platform: Platform
    file: Words
    sha256: Words
    tensors: Mapping[Words, TensorEntry]
    versions: Mapping[Words, Words]


@dataclass(frozen=True)
class GoldenEntry:
    """One golden.

    Attributes:
        name: as the test calls it.
        tier: how equal outputs must be on the platform that accepted them.
        elsewhere: the tier on every other platform; None for the same.
        reason: why the tiers are what they are.
        inputs: hashes of what the outputs were computed from.
        recipe: hash of the recipe, or None.
        seed: of everything random, or None.
        test: the test that wrote it.
        history: what happened to it, oldest first: date, what, reason and, for a loosening, from and to.
        variants: one per platform, the oldest first.
    """

    name: Words
    tier: Tiers
    elsewhere: Tiers | None
    reason: Words
    inputs: Mapping[Words, TensorEntry]
    recipe: Words | None
    seed: Whole | None
    test: Words
    history: tuple[_Step, ...]
    variants: tuple[Variant, ...]


_ENTRY = TypeAdapter(GoldenEntry)


@dataclass(frozen=True)
class Manifest:
    """The goldens of one folder.

    Attributes:
        path: of the manifest.
        goldens: by full name.
    """

    path: Path
    goldens: Mapping[str, GoldenEntry] = field(default_factory=dict)

    def with_entries(self, entries: Mapping[str, GoldenEntry]) -> Manifest:
        """Return the manifest with some entries replaced or added."""
        return replace(self, goldens={**self.goldens, **entries})

    def without(self, names: set[str]) -> Manifest:
        """Return the manifest without some goldens."""
        return replace(self, goldens={name: entry for name, entry in self.goldens.items() if name not in names})

    def owner_of(self, file: str) -> str | None:
        """Return the golden that has a file of this name, or None."""
        return next((name for name, entry in self.goldens.items() if any(variant.file == file for variant in entry.variants)), None)

    def to_text(self) -> str:
        """Return the sorted JSON text; equal manifests give equal bytes."""
        data = {"format": FORMAT, "goldens": {name: _entry_data(entry) for name, entry in self.goldens.items()}}
        return json.dumps(data, sort_keys=True, indent=1, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Args:
        folder: of the goldens.

    Returns:
        The manifest; an empty one where there is none yet.

    Raises:
        GoldenError: it cannot be read, is in conflict, from a newer harness, names files as an older one, or describes what cannot be.
    """
    manifest = read_anywhere(folder)
    owners: dict[str, str] = {}
    for name, entry in manifest.goldens.items():
        _check_place(manifest.path, entry)
        for variant in entry.variants:
            if owners.setdefault(variant.file, name) != name:
                raise GoldenError(f"{manifest.path}: {same_file(name, owners[variant.file])}")
    return manifest


def find_entry(root: Path, name: str, manifest: Manifest | None = None) -> GoldenEntry | None:
    """Look up a golden of a store that may have to be written.

    Args:
        root: of the store.
        name: of the golden.
        manifest: of its folder, if it has been read, or is about to be written.

    Returns:
        Its entry; None where there is none and its file would be its own.

    Raises:
        GoldenError: the name makes no file, or another golden's, the manifest cannot be read, or an older harness named the folder.
    """
    manifest = manifest or read_manifest(root / folder_of(name))
    entry = manifest.goldens.get(name)
    if entry is None:
        owner = manifest.owner_of(file_name(name))
        if owner is not None:
            raise same_file(name, owner, is_stored=True)
        check_not_elsewhere(root, name)
    return entry


def check_not_elsewhere(root: Path, name: str) -> None:
    """Refuse to call a golden missing that lies in a folder as an older harness named it.

    Args:
        root: of the store.
        name: of the golden.

    Raises:
        GoldenError: another folder of the same depth has the golden.
    """
    here = root / folder_of(name)
    for path in sorted(root.glob("*/" * name.count("/") + MANIFEST)):
        if path.parent != here and _may_hold(path, name) and name in read_anywhere(path.parent).goldens:
            _check_folder(path, name)


def _may_hold(path: Path, name: str) -> bool:
    """A look at the text spares reading every manifest for every new golden."""
    try:
        return json.dumps(name) in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def read_anywhere(folder: Path) -> Manifest:
    """Read the manifest of a folder, whatever the folder and its files are called.

    Args:
        folder: of the goldens.

    Returns:
        The manifest; an empty one where there is none yet.

    Raises:
        GoldenError: it cannot be read, is in conflict, or from a newer harness.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return Manifest(path)
    except UnicodeDecodeError as error:
        raise GoldenError(f"{path}: is no text ({error.reason}); take it from version control again") from error
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    return Manifest(path, _read(path, text))


def _read(path: Path, text: str) -> dict[str, GoldenEntry]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(_CONFLICT_MARKS):
            raise GoldenError(
                f"{path}:{number}: holds the mark of a merge conflict, {line[:40]!r}; keep both sides' entries "
                "(each golden is one entry of its own), or take one side and update the other's goldens again"
            )
    try:
        data = from_json(text, once=True)
    except json.JSONDecodeError as error:
        raise GoldenError(f"{path}:{error.lineno}: is no JSON ({error.msg}); take it from version control again") from error
    except ValueError as error:
        raise GoldenError(f"{path}: cannot be read: {error}; keep one side of a merge, or take it from version control again") from error
    version = data.get("format") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise GoldenError(f"{path}: has format {version}, and this harness reads up to {FORMAT}; install the newer compressor-harness")
    if version != FORMAT or not isinstance(data.get("goldens"), dict):
        raise GoldenError(f"{path}: is no manifest of goldens (format {version!r}); take it from version control again")
    return {name: _read_entry(path, name, entry) for name, entry in data["goldens"].items()}


def _read_entry(path: Path, name: str, data: Any) -> GoldenEntry:
    try:
        return read_as(_ENTRY, {**data, "name": name} if isinstance(data, dict) else data)
    except UserInputError as error:
        raise GoldenError(f"{path}: golden {name!r}: {error}; take it from version control again") from error


def _check_place(path: Path, entry: GoldenEntry) -> None:
    """A file name is decided by the golden's name; one that is not is old, or was edited and could lead out of the folder."""
    allowed = {file_name(entry.name), *(file_name(entry.name, str(variant.platform)) for variant in entry.variants)}
    files = [variant.file for variant in entry.variants]
    if not files or not set(files) <= allowed or len(set(files)) != len(files):
        raise GoldenError(
            f"{path}: golden {entry.name!r}: names the files {files}; it must be {sorted(allowed)}: rename them with harness golden rename "
            "if an older harness wrote them, else undo the edit"
        )
    _check_folder(path, entry.name)


def _check_folder(path: Path, name: str) -> None:
    folder = folder_of(name)
    if folder and not f"/{path.parent.as_posix()}".endswith(f"/{folder}"):
        raise GoldenError(
            f"{path}: golden {name!r}: belongs into the folder {folder}; rename it with harness golden rename if an older harness "
            "wrote it, else move manifest and files back"
        )


def tensors_data(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return hashes, shapes and dtypes as JSON types."""
    return {name: vars(entry) for name, entry in tensors.items()}


def _entry_data(entry: GoldenEntry) -> dict[str, Any]:
    return {
        "tier": entry.tier.to_dict(),
        "elsewhere": None if entry.elsewhere is None else entry.elsewhere.to_dict(),
        "reason": entry.reason,
        "inputs": tensors_data(entry.inputs),
        "recipe": entry.recipe,
        "seed": entry.seed,
        "test": entry.test,
        "history": [dict(item) for item in entry.history],
        "variants": [
            {
                "platform": variant.platform.to_dict(),
                "file": variant.file,
                "sha256": variant.sha256,
                "tensors": tensors_data(variant.tensors),
                "versions": dict(variant.versions),
            }
            for variant in entry.variants
        ],
    }
