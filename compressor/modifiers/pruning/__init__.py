"""Modifiers that set weights to zero, or take out whole experts.

masks.py       weights kept at zero, in training too      magnitude.py   the smallest weights
calibrated.py  what pruning layer after layer shares      sparsegpt.py   the weights whose loss the others make good
wanda.py       small weights that meet small inputs       reap.py        experts that add least
expert_count.py   what of a model follows from the number of its experts
expert_refit.py   those that stay make good for those that go
"""

from __future__ import annotations

from compressor import look_up

__getattr__ = look_up  # where llm-compressor has them
