"""Correct reference transforms, small enough to be read: what planted bugs in transforms are variants of.

Folding the weights of norms into the linear layers behind them (as every rotation does first), turning the residual stream by a Hadamard
matrix (QuaRot, arXiv:2404.00456), and scaling columns against a norm by a searched power of the activations' size (AWQ, arXiv:2306.00978).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.checks.inputs.norm_linear_models import logits


class Base:
    """What the reference transforms share."""

    kind: ClassVar[str] = "transform"
    tags: ClassVar[frozenset[str]] = frozenset({"invariant_fp"})
    architectures: tuple[str, ...] = ("llama", "mistral", "qwen2")
    fake_quantize: Any = None

    @property
    def name(self) -> str:
        """Of the transform."""
        return type(self).__name__

    def rotations(self, model: Any) -> dict[str, Tensor]:
        """Matrices that must be orthogonal."""
        return {}


def norm_pairs(model: Any) -> Iterator[tuple[Any, list[nn.Linear]]]:
    """Norm -> the linear layers that read it, for models of the shape of llama; gemma2 reads its MLP from another norm."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(layer, "input_layernorm"):
            yield layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
        before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
        if before_mlp is None and hasattr(layer, "input_layernorm"):
            before_mlp = layer.post_attention_layernorm
        if before_mlp is not None:
            yield before_mlp, [mlp.gate_proj, mlp.up_proj]
    yield model.model.norm, [model.lm_head]


def gain(norm: Any) -> Tensor:
    """What a norm multiplies with: gemma adds one."""
    weight: Tensor = norm.weight
    return weight + 1 if "Gemma" in type(norm).__name__ else weight


def set_gain(norm: Any, value: Tensor) -> None:
    """Let a norm multiply with a value."""
    norm.weight.copy_(value - 1 if "Gemma" in type(norm).__name__ else value)


def untie(model: Any) -> None:
    """Give the head a weight of its own, and say so."""
    if model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False


class FoldNorms(Base):
    """Moves the weights of norms into the linear layers behind them."""

    architectures: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma2")

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        untie(model)
        for norm, linears in self.pairs(model):
            for linear in linears:
                linear.weight.mul_(self.factor(norm))
            self.reset(norm)

    def pairs(self, model: Any) -> Iterable[tuple[Any, list[nn.Linear]]]:
        """Norms, and who reads them."""
        return list(norm_pairs(model))

    def factor(self, norm: Any) -> Tensor:
        """What is folded."""
        return gain(norm)

    def reset(self, norm: Any) -> None:
        """Leave the norm with nothing to multiply."""
        set_gain(norm, torch.ones_like(norm.weight))

    def targets(self, model: Any) -> list[str]:
        """Weights that must have changed."""
        names = {id(module): name for name, module in model.named_modules()}
        return [f"{names[id(linear)]}.weight" for _, linears in norm_pairs(model) for linear in linears]


class Rotate(FoldNorms):
    """Folds the norms, then turns the residual stream by a Hadamard matrix."""

    architectures: tuple[str, ...] = ("llama", "mistral", "qwen2")

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        super().apply(model, batches)
        rotation = self.rotation(model.config.hidden_size).to(model.lm_head.weight.dtype)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ rotation)
        for _, linears in norm_pairs(model):
            for linear in linears:
                linear.weight.copy_(linear.weight @ rotation)
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.copy_(rotation.t() @ linear.weight)

    def rotation(self, n: int) -> Tensor:
        """A Hadamard matrix, [n, n] float64."""
        one = torch.ones(1, 1, dtype=torch.float64)
        while len(one) < n:
            one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
        return one / math.sqrt(n)

    def rotations(self, model: Any) -> dict[str, Tensor]:
        """Matrices that must be orthogonal."""
        return {"hadamard": self.rotation(model.config.hidden_size)}

    def targets(self, model: Any) -> list[str]:
        """Weights that must have changed."""
        return [*super().targets(model), "model.embed_tokens.weight"]


def fake_int4(weight: Tensor) -> Tensor:
    """Round to 4 bits, one scale a row."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
    return (weight / scale).round() * scale


class Smooth(Base):
    """Searches, for each norm, the power of the activation's size by which columns are scaled."""

    fake_quantize = staticmethod(fake_int4)
    powers: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def apply(self, model: Any, batches: Sequence[Tensor]) -> None:
        """Change the model in place."""
        pairs = [pair for pair in norm_pairs(model) if pair[0] is not model.model.norm]
        inputs: dict[int, list[Tensor]] = {}
        handles = [
            linears[0].register_forward_pre_hook(lambda _, args, key=number: inputs.setdefault(key, []).append(args[0]))
            for number, (_, linears) in enumerate(pairs)
        ]
        for ids in batches:
            logits(model, ids)
        for handle in handles:
            handle.remove()
        for number, (norm, linears) in enumerate(pairs):
            x = torch.cat([batch.flatten(0, -2) for batch in inputs[number]])
            scale = self.best(x, linears)
            self.place(norm, linears, scale)

    def best(self, x: Tensor, linears: list[nn.Linear]) -> Tensor:
        """The scale with the least loss."""
        size = x.abs().mean(0).clamp(min=1e-5)
        scales = [size**power / (size**power).mean() for power in self.powers]
        return min(scales, key=lambda scale: self.loss(x, linears, scale))

    def loss(self, x: Tensor, linears: list[nn.Linear], scale: Tensor) -> float:
        """Relative error of the outputs."""
        errors = [((fake_int4(linear.weight * scale) / scale - linear.weight) @ x.t()).square().sum() for linear in linears]
        return float(sum(errors)) / float(sum((linear.weight @ x.t()).square().sum() for linear in linears))

    def place(self, norm: Any, linears: list[nn.Linear], scale: Tensor) -> None:
        """Scale weights up and the norm down."""
        norm.weight.div_(scale)
        for linear in linears:
            linear.weight.mul_(scale)

    def targets(self, model: Any) -> list[str]:
        """Weights that must have changed."""
        names = {id(module): name for name, module in model.named_modules()}
        pairs = [pair for pair in norm_pairs(model) if pair[0] is not model.model.norm]
        return [f"{names[id(linear)]}.weight" for _, linears in pairs for linear in linears]


class AlwaysSmooth(Smooth):
    """Without a search that may choose to do nothing."""

    fake_quantize: Any = None
    powers: tuple[float, ...] = (0.5,)
