"""The pictures of a report, of models near and far: nothing leaves the axes, for matplotlib would warn, and warnings are errors here."""

from __future__ import annotations

import numpy as np
import pytest

from harness.validation.behaviour.metrics import TokenScores
from harness.validation.behaviour.quality import check_quality
from harness.validation.behaviour.scoring import Scores
from harness.validation.policy import Policy
from harness.validation.report.plots import plot_kl, plot_nll


@pytest.mark.parametrize("limit", [1e-6, 30.0])
@pytest.mark.parametrize(("size", "spread"), [(0.0, 0.1), (1e-9, 3.0), (1.0, 1e-6), (8.0, 0.1)])
def test_plots_hold_their_marks(size: float, spread: float, limit: float) -> None:
    rng = np.random.default_rng(0)
    moved = size * np.exp(spread * rng.standard_normal(256))
    base = rng.uniform(2, 4, 256)
    flags = np.ones(256, dtype=bool)
    tokens = TokenScores(base, base + moved, moved, flags, flags, flags)
    scores = Scores(tokens, np.repeat(np.arange(32), 8), tokens)
    policy = Policy(max_mean_kl=limit, max_perplexity_ratio=1.0 + limit)
    quality = check_quality(scores, policy, 0)[1]
    assert quality is not None
    for picture in (plot_kl(scores, quality, policy), plot_nll(quality, policy)):
        assert picture.count("</g>") > 10
