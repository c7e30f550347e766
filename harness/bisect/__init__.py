"""Localize: which layer, module and modifier makes a compressed model differ from its base, or from a compressed one that was accepted.

    from harness.bisect import bisect

    print(bisect("BASE", "COMPRESSED", "heldout.jsonl").to_text())

models.py   both models, and the parts in which they differ, in the order in which they run
difference.py  a model that is base here and compressed there, and how far its predictions are from the base's
search.py   binary search over the parts, knows nothing of models    locate.py      layers first, then modules of a guilty one
blame.py    what compression.json and the weights say of a module    reproduce.py   a pytest file that fails until it is repaired
report.py   the answer as text and JSON                              command.py     the verb

Names are imported on first use, so that the command line answers without loading torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.object_reference import lazy_names

if TYPE_CHECKING:
    from harness.bisect.locate import bisect
    from harness.bisect.report import BisectReport
    from harness.bisect.reproduce import swap_difference


_PUBLIC = {
    "BisectReport": "harness.bisect.report",
    "bisect": "harness.bisect.locate",
    "swap_difference": "harness.bisect.reproduce",
}

__all__ = ["BisectReport", "bisect", "swap_difference"]


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
