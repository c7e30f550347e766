"""What a transform has to offer (SmoothQuant, AWQ, rotations, folded norms): any callable that changes a float model in place will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Transform(Protocol):
    """Changes the weights of a model so that they quantize better.

    Attributes:
        kind: "transform".
        name: for reports.
        tags: what it promises: invariant_fp (the float output stays what it was).
        architectures: names of `harness trace-audit` that it claims to know, the one to look at most closely first.
        fake_quantize: weight [R, C] -> the values that a quantizer leaves of it; for a transform that searches its scales, else None.
    """

    kind: str
    name: str
    tags: frozenset[str]
    architectures: Sequence[str]
    fake_quantize: Callable[[Tensor], Tensor] | None

    def apply(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        """Transform a model of transformers in place; batches of token ids [B, T] to calibrate on."""

    def targets(self, model: nn.Module) -> Sequence[str]:
        """Return the names of the parameters of the float model that must come out changed."""

    def rotations(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the orthogonal matrices [n, n] that it uses on this model, by name; none where it does not rotate."""


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
