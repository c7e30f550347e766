"""What a pruner has to offer (magnitude, Wanda, SparseGPT): one weight in, one weight with zeros out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Sparsifier(Protocol):
    """Sets weights to zero.

    Attributes:
        kind: "sparsifier".
        name: for reports.
        tags: none are defined.
        pattern: (n, m): n of m neighbours in a row are kept, such as (2, 4); None for no pattern.
        sparsity: share of zeros; for a pattern 1 - n/m.
        scope: "row" where each row has that share of zeros, "tensor" where only the whole has.
        second_order: it reads the Hessian and moves the weights that it keeps, to make up for those that it drops.
        quantize: weight -> the values that the quantizer behind it leaves of a pruned weight; None where nothing comes behind it.
    """

    kind: str
    name: str
    tags: frozenset[str]
    pattern: tuple[int, int] | None
    sparsity: float
    scope: str
    second_order: bool
    quantize: Callable[[Tensor], Tensor] | None

    def prune(self, weight: Tensor, hessian: Tensor) -> Tensor:
        """Return the pruned weight [R, C]; the Hessian of its input is 2 * mean(x x^T), [C, C]. Changes neither."""
