"""Turning what modules give, and what reads it back, in their weights: the model computes what it did.

All that is done to one weight is done in float64 and rounded once.

Shapes: R rows, K columns of a weight; C channels of a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from compressor.errors import TargetError
from compressor.mappings.pairs import ScalePair
from compressor.nn import weight_of
from compressor.nn.build import is_quantizable


class Orthogonal(Protocol):
    """What turns runs of channels: a Rotation, or one that is being learned."""

    def turn(self, x_ND: Tensor) -> Tensor:
        """Multiply rows by Q, run by run."""


@dataclass(frozen=True)
class Turn:
    """One rotation of hidden states.

    Attributes:
        rotation: Q; hidden states h become h Q, run of channels by run.
        writers: dotted names of modules whose outputs are turned, or of norms whose bias is.
        readers: dotted names of layers that turn them back.
        online: where readers are handed h Q in every forward, or what writers give is turned back: the name of the rotation in the config
            of a checkpoint (R4, v, u). There are only readers then, or only writers.
    """

    rotation: Orthogonal
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    online: str = ""


@torch.no_grad()
def fold_and_turn(
    model: nn.Module, folds: Sequence[ScalePair], turns: Sequence[Turn], prepare: Callable[[str], None] = lambda name: None
) -> None:
    """Move the weights of norms into their readers, and turn hidden states. Changes the model.

    A bias of a norm moves into the biases of its readers; else it stays with the norm, which must then be a writer of a turn.

    Args:
        model: whose modules are named.
        folds: norms that become neutral, with all that read them.
        turns: in this order; a module may stand in several.
        prepare: called with the name of each module before it changes.

    Raises:
        TargetError: a bias must stay with a norm that multiplies a channel by zero.
    """
    plan = TurnPlan(model, folds, turns)
    for name in plan.names:
        prepare(name)
        module = model.get_submodule(name)
        weight, bias = plan.tensors(name, torch.float64)
        stored_weight(module).copy_(weight)
        if bias is not None:
            module.get_parameter("bias").copy_(bias)


class TurnPlan:
    """What becomes of the tensors of each module; the model is only read, and norms as they are now.

    Attributes:
        names: of all modules that change, layers first: what norms were is read before they become neutral.
    """

    def __init__(self, model: nn.Module, folds: Sequence[ScalePair], turns: Sequence[Turn]) -> None:
        """Read the norms; see `fold_and_turn`."""
        self._model, self._turns = model, turns
        self._norms = {pair.source: _Norm(model, pair) for pair in folds}
        self._readers = {name: norm for norm in self._norms.values() for name in norm.pair.readers}
        named = [*self._readers, *(name for turn in turns for name in (*turn.readers, *turn.writers))]
        self.names = [*dict.fromkeys(name for name in named if name not in self._norms), *self._norms]

    def turns_of(self, name: str) -> list[Turn]:
        """Which rotations decide what a module holds."""
        return [turn for turn in self._turns if name in turn.readers or name in turn.writers]

    def tensors(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Compute what a module is to hold; gradients flow back to the rotations.

        Args:
            name: dotted name.
            dtype: in which it is computed.

        Returns:
            Weight, [R, K] of layers and [C] of norms, and bias, or None where there is none.
        """
        module = self._model.get_submodule(name)
        bias = module._parameters.get("bias")
        if name in self._norms:
            return self._neutral(module, self._norms[name], [turn for turn in self._turns if name in turn.writers], dtype)
        weight_RK = stored_weight(module).detach().to(dtype)
        bias_R = None if bias is None else bias.detach().to(dtype)
        norm = self._readers.get(name)
        if norm is not None:
            weight_RK, bias_R = _folded(weight_RK, bias_R, norm)
        for turn in self._turns:
            if name in turn.readers:
                weight_RK = turn.rotation.turn(weight_RK)
            if name in turn.writers:
                weight_RK = _turned_output(module, weight_RK, turn.rotation)
                bias_R = None if bias_R is None else turn.rotation.turn(bias_R)
        return weight_RK, bias_R

    def _neutral(self, module: nn.Module, norm: _Norm, turns: Sequence[Turn], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        weight_C = torch.full_like(norm.weight_C, 1.0 - norm.pair.offset).to(dtype)
        if module._parameters.get("bias") is None:
            return weight_C, None
        if norm.bias_C is None or norm.bias_moves:
            return weight_C, torch.zeros_like(weight_C)
        bias_C = (norm.bias_C / norm.weight_C).to(dtype)
        for turn in turns:
            bias_C = turn.rotation.turn(bias_C)
        return weight_C, bias_C


class _Norm:
    """The weight and bias of a norm as they were, in float64."""

    def __init__(self, model: nn.Module, pair: ScalePair) -> None:
        module = model.get_submodule(pair.source)
        bias = module._parameters.get("bias")
        self.pair = pair
        self.weight_C = module.get_parameter("weight").detach().double() + pair.offset
        self.bias_C = None if bias is None or not bool(bias.any()) else bias.detach().double()
        self.bias_moves = has_biases(model, pair.readers)
        if self.bias_C is not None and not self.bias_moves and not bool(self.weight_C.all()):
            raise TargetError(
                f"{pair.source} multiplies a channel by zero and adds a bias, which its readers cannot take: not all have one"
            )


def stored_weight(module: nn.Module) -> Tensor:
    """Return the weight of a module as [R, K], or [C] of a norm; a view.

    Args:
        module: linear layer, embedding, router or norm.

    Returns:
        The parameter, for Conv1D its transpose.
    """
    return weight_of(module) if is_quantizable(module) else module.get_parameter("weight")


def has_biases(model: nn.Module, names: Sequence[str]) -> bool:
    """Tell whether layers have a bias each, so that they can take that of a norm.

    Args:
        model: whose modules are named.
        names: dotted names.

    Returns:
        False where one has none.
    """
    return all(model.get_submodule(name)._parameters.get("bias") is not None for name in names)


def _folded(weight_RK: Tensor, bias_R: Tensor | None, norm: _Norm) -> tuple[Tensor, Tensor | None]:
    if norm.bias_C is not None and norm.bias_moves:
        assert bias_R is not None
        bias_R = bias_R + weight_RK @ norm.bias_C.to(weight_RK.dtype)
    return weight_RK * norm.weight_C.to(weight_RK.dtype), bias_R


def _turned_output(module: nn.Module, weight_RK: Tensor, rotation: Orthogonal) -> Tensor:
    """What is turned: rows of an embedding, columns of what a linear layer gives."""
    return rotation.turn(weight_RK) if isinstance(module, nn.Embedding) else rotation.turn(weight_RK.T).T
