"""The families of planted bugs of this repository, for `harness mutants`: name to where each is."""

from __future__ import annotations

from collections.abc import Mapping

FAMILIES: Mapping[str, str] = {
    "lifecycle": "tests.mutation.lifecycle.family:FAMILY",
    "quantizers": "tests.mutation.numerics.family:QUANTIZERS",
    "packers": "tests.mutation.numerics.family:PACKERS",
    "observers": "tests.mutation.numerics.family:OBSERVERS",
    "layers": "tests.mutation.numerics.family:LAYERS",
    "solvers": "tests.mutation.numerics.family:SOLVERS",
    "pruners": "tests.mutation.numerics.family:PRUNERS",
    "moved-scales": "tests.mutation.numerics.family:MOVED_SCALES",
    "rotations": "tests.mutation.numerics.family:ROTATIONS",
    "experts": "tests.mutation.numerics.family:EXPERTS",
    "algorithms": "tests.mutation.numerics.algorithms:FAMILY",
    "transforms": "tests.mutation.transforms:FAMILY",
    "goldens": "tests.mutation.goldens:FAMILY",
    "checkpoints": "tests.mutation.checkpoints:FAMILY",
    "attention": "tests.mutation.attention:FAMILY",
    "onloading": "tests.mutation.onloading:FAMILY",
    "ranks": "tests.mutation.ranks:FAMILY",
    "replay": "tests.mutation.replay:FAMILY",
}
