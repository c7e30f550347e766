"""REAP: an expert matters by what it adds to the tokens that the router sends to it.

Source: Lasby et al. 2025, arXiv:2510.13999. Shapes: N tokens, K slots of a token, E experts, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.errors import NumericsError


class ExpertSaliency:
    """S_j = mean over the tokens that are sent to expert j of g_j ||f_j(x)||, where g_j is the weight that the router gives it."""

    def __init__(self, num_experts: int) -> None:
        """Start at zero tokens."""
        self._sum_E = torch.zeros(num_experts, dtype=torch.float64)
        self.num_tokens_E = torch.zeros(num_experts, dtype=torch.int64)

    def add(self, expert: int, weights_N: Tensor, outputs_NC: Tensor) -> None:
        """Add tokens of one expert.

        Args:
            expert: its number.
            weights_N: what the router multiplies its outputs by.
            outputs_NC: [N, C], not yet weighted.
        """
        added = weights_N.double().abs() * outputs_NC.detach().float().norm(dim=-1).double()
        self._sum_E[expert] += float(added.sum())
        self.num_tokens_E[expert] += len(outputs_NC)

    def value(self, name: str = "experts") -> Tensor:
        """Return [E] float64; 0 for an expert that no token reached.

        Args:
            name: dotted module name, for errors only.

        Returns:
            The saliency of each expert.

        Raises:
            NumericsError: NaN or infinity in what experts gave.
        """
        found_E = self._sum_E / self.num_tokens_E.clamp_min(1)
        if not bool(torch.isfinite(found_E).all()):
            raise NumericsError(f"{name}: its experts give NaN or infinity, which have no place in an order; repair the model or the data")
        return found_E


def kept_experts(saliency_E: Tensor, num_dropped: int, num_groups: int = 1) -> list[int]:
    """Choose the experts that stay: in every group, all but those with the lowest saliency; of equal ones the first goes first.

    Args:
        saliency_E: [E].
        num_dropped: how many go, a multiple of `num_groups`.
        num_groups: into which the router divides the experts, neighbours together; each loses as many.

    Returns:
        Numbers of the experts that stay, in their order.
    """
    size = len(saliency_E) // num_groups
    order = saliency_E.reshape(num_groups, size).sort(dim=-1, stable=True).indices[:, num_dropped // num_groups :]
    return sorted(int(place) + group * size for group, row in enumerate(order) for place in row)


def lost_share(saliency_E: Tensor, kept: Sequence[int]) -> float:
    """Say how much of the saliency goes with the experts that go.

    Args:
        saliency_E: [E].
        kept: numbers of the experts that stay.

    Returns:
        Share of the sum, 0 to 1.
    """
    total = float(saliency_E.sum())
    return 0.0 if total == 0 else 1.0 - float(saliency_E[list(kept)].sum()) / total
