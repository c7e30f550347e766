"""Candidates: what a failed check would have wanted as its golden, kept in a cache folder that `harness golden diff` and `accept` use.

A candidate is two files of one name: the tensors, in the very bytes that the golden would have, and a JSON record. Its file name is
the golden's and a hash of golden and test, so that no two goldens, tests or worker processes write one file. Reading one needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compressor.atomic import write_whole
from compressor.json_text import from_json, to_json
from compressor.settings.kinds import Whole
from harness.errors import GoldenError
from harness.goldens.store.manifest import TensorEntry, Tiers, Words, tensors_data
from harness.goldens.store.paths import SUFFIX, relative_path
from harness.goldens.store.provenance import Platform
from harness.settings_file import read_as

_FORMAT = 2
"""1 had file names of another form, which nobody would overwrite or delete any more."""


@dataclass(frozen=True)
class Candidate:
    """What one test would write.

    Attributes:
        name: of the golden.
        test: id of the test.
        verdict: why there is a candidate.
        summary: the decisive fact of the check.
        tier: as the test asks.
        elsewhere: as the test asks.
        reason: as the test gives it; may be empty.
        inputs: hashes of the inputs.
        recipe: hash of the recipe.
        seed: of everything random.
        platform: where it was computed.
        versions: of what computed it.
        tensors: hash, shape and dtype of each.
        sha256: of the file of tensors.
        comparisons: what was found, one per tensor; JSON types.
        path: of the record; empty before it is saved.
    """

    name: Words
    test: Words
    verdict: Words
    summary: Words
    tier: Tiers
    elsewhere: Tiers | None
    reason: Words
    inputs: Mapping[Words, TensorEntry]
    recipe: Words | None
    seed: Whole | None
    platform: Platform
    versions: Mapping[Words, Words]
    tensors: Mapping[Words, TensorEntry]
    sha256: Words
    comparisons: tuple[Mapping[str, Any], ...] = ()
    path: Words = ""

    @property
    def tensors_path(self) -> Path:
        """The file of tensors beside the record."""
        return Path(self.path).with_suffix("")

    def data(self) -> bytes:
        """Return the file of tensors.

        Returns:
            Its bytes.

        Raises:
            GoldenError: it is missing or not the one that was saved.
        """
        try:
            data = self.tensors_path.read_bytes()
        except OSError as error:
            raise GoldenError(f"{self.tensors_path}: cannot be read ({error.strerror}); run the test again") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise GoldenError(f"{self.tensors_path}: is not the file that the test saved; run the test again")
        return data

    def content(self) -> dict[str, Any]:
        """Return what the golden would be made of: two candidates with equal contents write the same golden."""
        data = self.to_dict()
        return {name: value for name, value in data.items() if name not in ("test", "verdict", "summary", "comparisons")}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "format": _FORMAT,
            "name": self.name,
            "test": self.test,
            "verdict": self.verdict,
            "summary": self.summary,
            "tier": self.tier.to_dict(),
            "elsewhere": None if self.elsewhere is None else self.elsewhere.to_dict(),
            "reason": self.reason,
            "inputs": tensors_data(self.inputs),
            "recipe": self.recipe,
            "seed": self.seed,
            "platform": self.platform.to_dict(),
            "versions": dict(self.versions),
            "tensors": tensors_data(self.tensors),
            "sha256": self.sha256,
            "comparisons": [dict(item) for item in self.comparisons],
        }


_CANDIDATE = TypeAdapter(Candidate)


class CandidateFolder:
    """The candidates of a project, below its cache folder."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder; it need not exist yet."""
        self.folder = Path(folder)

    def path_of(self, name: str, test: str) -> Path:
        """Return where the record of a golden and a test lies."""
        digest = hashlib.sha256(f"{name}\0{test}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return self.folder / f"{relative_path(name).removesuffix(SUFFIX)}@{digest}{SUFFIX}.json"

    def save(self, candidate: Candidate, data: bytes) -> Candidate:
        """Write a candidate, tensors first.

        Args:
            candidate: the record.
            data: the file of tensors.

        Returns:
            The candidate with its path.

        Raises:
            GoldenError: the folder cannot be written.
        """
        path = self.path_of(candidate.name, candidate.test)
        try:
            marker = self.folder / ".gitignore"
            if not marker.exists():
                write_whole(marker, b"# Made by compressor-harness; nothing here belongs into version control.\n*\n")
            write_whole(path.with_suffix(""), data)
            write_whole(path, to_json(candidate.to_dict()).encode())
        except OSError as error:
            raise GoldenError(f"{path}: cannot be written ({error.strerror}); name another folder with harness_cache_dir") from error
        return replace(candidate, path=str(path))

    def drop(self, name: str, test: str) -> None:
        """Remove the candidate of a golden and a test, if there is one."""
        path = self.path_of(name, test)
        for file in (path, path.with_suffix("")):
            with suppress(OSError):
                file.unlink()

    def all(self) -> Iterator[Candidate]:
        """Yield every candidate, by path.

        Yields:
            Candidates.

        Raises:
            GoldenError: a record cannot be read.
        """
        for path in sorted(self.folder.rglob(f"*{SUFFIX}.json")):
            yield read_candidate(path)


def read_candidate(path: Path) -> Candidate:
    """Read a record.

    Args:
        path: of the record.

    Returns:
        The candidate.

    Raises:
        GoldenError: it is none.
    """
    try:
        data = from_json(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"it has not format {_FORMAT}")
        return read_as(_CANDIDATE, {**data, "path": str(path)})
    except (OSError, ValueError) as error:
        raise GoldenError(f"{path}: is no record of a failed check ({error}); delete it and run the test again") from error
