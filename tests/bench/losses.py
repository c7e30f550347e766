"""Whether one checkpoint predicts held-out text better than another: paired, sequence by sequence, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.validation.behaviour.bootstrap import percentile_interval, resample_sums

NUM_RESAMPLES, CONFIDENCE = 10_000, 0.95


def compare_losses(losses: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Compare checkpoints by their losses on the same sequences, all of one length.

    Args:
        losses: nats per token of each sequence, by checkpoint.
        pairs: names (left, right) whose mean difference left - right is wanted.
    Returns:
        The mean loss of each checkpoint, and each difference `left_minus_right` with its interval; JSON types.
    """
    differences = {}
    for left, right in pairs:
        pairwise = np.subtract(losses[left], losses[right])
        resampled = resample_sums(pairwise[:, None], NUM_RESAMPLES, seed=0)[:, 0] / len(pairwise)
        differences[f"{left}_minus_{right}"] = percentile_interval(float(pairwise.mean()), resampled, CONFIDENCE, len(pairwise)).to_dict()
    return {
        "confidence": CONFIDENCE,
        "differences": differences,
        "mean_nats_per_token": {name: statistics.fmean(values) for name, values in losses.items()},
        "num_sequences": len(next(iter(losses.values()))),
    }
