"""How equal two tensors must be: tiers, what a comparison found, decoys against limits that measure nothing, and the precision ladder.

    from harness.tolerance import T0, T1, compare

    compare(actual, expected, T1(max_ulp=4)).ok

Names are imported on first use, so that reading a tier from a manifest needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.object_reference import lazy_names

if TYPE_CHECKING:
    from harness.tolerance.comparison import Comparison, compare
    from harness.tolerance.decoys import decoys_of, vacuous_decoys
    from harness.tolerance.ladder import Ladder, climb
    from harness.tolerance.tiers import T0, T1, T2, T3, T4, Tier, TierMap


_PUBLIC = {
    "T0": "harness.tolerance.tiers",
    "T1": "harness.tolerance.tiers",
    "T2": "harness.tolerance.tiers",
    "T3": "harness.tolerance.tiers",
    "T4": "harness.tolerance.tiers",
    "Tier": "harness.tolerance.tiers",
    "TierMap": "harness.tolerance.tiers",
    "Comparison": "harness.tolerance.comparison",
    "compare": "harness.tolerance.comparison",
    "decoys_of": "harness.tolerance.decoys",
    "vacuous_decoys": "harness.tolerance.decoys",
    "Ladder": "harness.tolerance.ladder",
    "climb": "harness.tolerance.ladder",
}

__all__ = ["T0", "T1", "T2", "T3", "T4", "Comparison", "Ladder", "Tier", "TierMap", "climb", "compare", "decoys_of", "vacuous_decoys"]


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
