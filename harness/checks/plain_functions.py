"""Plain functions as subjects of the catalogue: they offer what the protocols `Sparsifier` and `Transform` ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import Tensor, nn


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
        tags: see Sparsifier.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    sparsity: float = 0.5
    pattern: tuple[int, int] | None = None
    scope: str = "row"
    second_order: bool = False
    quantize: Callable[[Tensor], Tensor] | None = None
    tags: frozenset[str] = frozenset()
    kind: ClassVar[str] = "sparsifier"

    @property
    def name(self) -> str:
        """See Sparsifier."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def prune(self, weight: Tensor, hessian: Tensor) -> Tensor:
        """See Sparsifier."""
        return self.function(weight, hessian)


@dataclass
class InPlaceTransform:
    """A function that changes a model in place, as a subject of the catalogue.

    Attributes:
        function: takes the model and batches of token ids [B, T].
        changed: patterns of parameter names that must come out changed, such as `*.q_proj.weight`.
        architectures: see Transform.
        fake_quantize: see Transform.
        matrices: orthogonal matrices that it uses, by name.
        tags: see Transform.
    """

    function: Callable[[nn.Module, Sequence[Tensor]], None]
    changed: Sequence[str]
    architectures: Sequence[str] = ("llama",)
    fake_quantize: Callable[[Tensor], Tensor] | None = None
    matrices: Mapping[str, Tensor] = field(default_factory=dict)
    tags: frozenset[str] = frozenset({"invariant_fp"})
    kind: ClassVar[str] = "transform"

    @property
    def name(self) -> str:
        """See Transform."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def apply(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        """See Transform."""
        self.function(model, batches)

    def targets(self, model: nn.Module) -> Sequence[str]:
        """See Transform."""
        return [name for name, _ in model.named_parameters() if any(fnmatchcase(name, pattern) for pattern in self.changed)]

    def rotations(self, model: nn.Module) -> Mapping[str, Tensor]:
        """See Transform."""
        del model
        return self.matrices
