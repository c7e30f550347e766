"""Contract tags: what a subject promises beyond what every subject of its kind must keep. A check runs where its tags are promised."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TAGS: Mapping[str, str] = MappingProxyType(
    {
        # quantizers and solvers
        "odd": "codes of -w are those of w, negated, away from the ends of the range",
        "zero": "0 becomes 0 exactly",
        "half_even": "what lies in the middle between two codes goes to the even one",
        "homogeneous": "2^k times the weight gives 2^k times the values",
        "local": "what shares a scale depends on nothing else",
        "covers": "the range covers every value: nothing is cut off by more than a step",
        "refuses_nonfinite": "NaN or infinity raises an error that names the tensor",
        "per_token": "each row has a scale of its own, computed from that row alone",
        # packers
        "refuses_unfit": "a code that does not fit into its bits raises an error",
        # solvers
        "act_order": "columns are rounded in the order of their activation",
        "rows_apart": "the order of the rows decides nothing: each has scales of its own, or all have one",
        "fixed_scales": "scales come from the weight's range alone, not from a search",
        "searches_scales": "scales are searched, by the loss; `unsearched()` gives the same subject without a search",
        # checkpoints
        "trained": "was trained, too, so that its weights are no longer near the base's",
        # modifiers and transforms
        "data_free": "needs no calibration data",
        "idempotent": "applied to its own result it changes nothing",
        "invariant_fp": "the float output stays what it was",
    }
)
