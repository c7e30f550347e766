"""The loss of a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.data.blocks import IGNORED


def next_token_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Compute the mean cross entropy of the next token.

    Args:
        model: a causal language model of transformers.
        batch: `labels` and the arguments of the model.

    Returns:
        The mean over all targets, in nats.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)
