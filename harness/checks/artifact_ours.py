"""A checkpoint of ours as a subject of the catalogue.

from harness import check
from harness.checks.artifact_ours import OurArtifact

print(check(OurArtifact("MODEL", "MODEL-W4A16")))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from compressor.model.compressed import load_compressed
from compressor.nn import shard_problems


@dataclass
class OurArtifact:
    """Two folders; see Artifact."""

    base: Path
    folder: Path
    model: nn.Module | None = None
    num_shards: int = 2
    kind: ClassVar[str] = "artifact"
    tags: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Take texts for paths."""
        self.base, self.folder = Path(self.base), Path(self.folder)

    @property
    def name(self) -> str:
        """See Artifact."""
        return self.folder.name

    def uncuttable(self) -> Mapping[str, str]:
        """See Artifact; what `compressor.nn.shard_problems` says of the checkpoint."""
        return shard_problems(load_compressed(self.folder, device="cpu"), self.num_shards)
