"""Hazards of torch: addresses, autograd, batches, kernels, models, optimizers."""

from __future__ import annotations
