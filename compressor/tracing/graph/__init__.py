"""The graph engine: the forward runs once on real tensors, and what it does becomes one torch.fx graph per stage."""

from __future__ import annotations
