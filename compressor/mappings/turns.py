"""Turning what modules give, and what reads it back, in their weights: the model computes what it did.

All that is done to one weight is done in float64 and rounded once.

Shapes: R rows, K columns of a weight; C channels of a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.algorithms.rotations import Rotation
from compressor.errors import TargetError
from compressor.mappings.pairs import ScalePair
from compressor.nn import weight_of
from compressor.nn.build import is_quantizable


@dataclass(frozen=True)
class Turn:
    """One rotation of hidden states.

    Attributes:
        rotation: Q; hidden states h become h Q, run of channels by run.
        writers: dotted names of modules whose outputs are turned, or of norms whose bias is.
        readers: dotted names of layers that turn them back.
    """

    rotation: Rotation
    writers: tuple[str, ...]
    readers: tuple[str, ...]


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
    norms = {pair.source: _Norm(model, pair) for pair in folds}
    readers = {name: norm for norm in norms.values() for name in norm.pair.readers}
    names = dict.fromkeys([*readers, *(name for turn in turns for name in (*turn.readers, *turn.writers)), *norms])
    for name in names:
        if name not in norms:
            prepare(name)
            _change_layer(model.get_submodule(name), name, readers.get(name), turns)
    for name, norm in norms.items():
        prepare(name)
        _neutralize(model.get_submodule(name), norm, [turn for turn in turns if name in turn.writers])


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


def has_biases(model: nn.Module, names: Sequence[str]) -> bool:
    """Tell whether layers have a bias each, so that they can take that of a norm."""
    return all(model.get_submodule(name)._parameters.get("bias") is not None for name in names)


def _change_layer(module: nn.Module, name: str, norm: _Norm | None, turns: Sequence[Turn]) -> None:
    stored_RK = weight_of(module) if is_quantizable(module) else module.get_parameter("weight")
    bias = module._parameters.get("bias")
    weight_RK = stored_RK.double()
    bias_R = None if bias is None else bias.double()
    if norm is not None:
        if norm.bias_C is not None and norm.bias_moves:
            assert bias_R is not None
            bias_R = bias_R + weight_RK @ norm.bias_C
        weight_RK = weight_RK * norm.weight_C
    for turn in turns:
        if name in turn.readers:
            weight_RK = turn.rotation.turn(weight_RK)
        if name in turn.writers:
            weight_RK = _turned_output(module, weight_RK, turn.rotation)
            bias_R = None if bias_R is None else turn.rotation.turn(bias_R)
    stored_RK.copy_(weight_RK)
    if bias is not None and bias_R is not None:
        bias.copy_(bias_R)


def _turned_output(module: nn.Module, weight_RK: Tensor, rotation: Rotation) -> Tensor:
    """What is turned: rows of an embedding, columns of what a linear layer gives."""
    return rotation.turn(weight_RK) if isinstance(module, nn.Embedding) else rotation.turn(weight_RK.T).T


def _neutralize(module: nn.Module, norm: _Norm, turns: Sequence[Turn]) -> None:
    module.get_parameter("weight").fill_(1.0 - norm.pair.offset)
    bias = module._parameters.get("bias")
    if bias is None:
        return
    if norm.bias_C is None or norm.bias_moves:
        bias.zero_()
        return
    bias_C = norm.bias_C / norm.weight_C
    for turn in turns:
        bias_C = turn.rotation.turn(bias_C)
    bias.copy_(bias_C)
