"""What a pruner has to offer (magnitude, Wanda, SparseGPT): one weight in, one weight with zeros out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

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


@dataclass
class Pruner:
    """A function from weight and Hessian to a pruned weight, as a subject of the catalogue.

    Attributes:
        function: takes [R, C] and [C, C], gives [R, C].
        sparsity: see Sparsifier.
        pattern: see Sparsifier.
        scope: see Sparsifier.
        second_order: see Sparsifier.
        quantize: see Sparsifier.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    sparsity: float = 0.5
    pattern: tuple[int, int] | None = None
    scope: str = "row"
    second_order: bool = False
    quantize: Callable[[Tensor], Tensor] | None = None
    kind: ClassVar[str] = "sparsifier"
    tags: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """See Sparsifier."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def prune(self, weight: Tensor, hessian: Tensor) -> Tensor:
        """See Sparsifier."""
        return self.function(weight, hessian)
