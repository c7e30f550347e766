"""Scale pairs: output channels of one module may be multiplied where the columns of all that read them are divided.

Shapes: C channels of the source, R rows, K columns of a reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from compressor.errors import NumericsError, TargetError, UserInputError
from compressor.model.evaluation import check_trainable
from compressor.nn import weight_of
from compressor.nn.build import is_quantizable
from compressor.settings.kinds import MODULE, TENSOR, Kind
from compressor.settings.options import checked


@dataclass(frozen=True)
class ScalePair:
    """A source and all its readers, with what was seen of the way between them.

    Attributes:
        source: dotted name of a norm or a linear layer.
        readers: dotted names of the layers that read its output channels, all of them, in the order of their calls.
        head_dim: None where column j of every reader carries channel j. Else readers have `repeats` times as many columns, in heads of
            this size, and each head of the source is carried by `repeats` heads in a row: grouped-query attention.
        repeats: see head_dim; 1 without it.
        offset: what is added to the weight of a norm before it multiplies: 1.0 in Gemma, 0.0 elsewhere.
        place: file and line of the model's code that calls the first reader.
    """

    source: str
    readers: tuple[str, ...]
    head_dim: int | None = None
    repeats: int = 1
    offset: float = 0.0
    place: str = ""

    def spread(self, values_C: Tensor) -> Tensor:
        """Lay values of the source's channels out over the columns of a reader.

        Args:
            values_C: [C].

        Returns:
            [K].
        """
        if self.head_dim is None:
            return values_C
        return values_C.view(-1, 1, self.head_dim).expand(-1, self.repeats, -1).reshape(-1)

    def gather(self, values_K: Tensor) -> Tensor:
        """Take the largest of the values of the columns that carry one channel.

        Args:
            values_K: [K].

        Returns:
            [C].
        """
        if self.head_dim is None:
            return values_K
        return values_K.view(-1, self.repeats, self.head_dim).amax(1).reshape(-1)


@dataclass(frozen=True)
class Refusal:
    """A source of which no scale may move.

    Attributes:
        source: dotted name.
        why: a sentence, such as "it meets NAME, which is called otherwise".
    """

    source: str
    why: str


@dataclass(frozen=True)
class Mappings:
    """What was found in a model.

    Attributes:
        pairs: proved, in the order of the model.
        refused: sources that were tried in vain.
    """

    pairs: tuple[ScalePair, ...]
    refused: tuple[Refusal, ...] = field(default=())

    @cached_property
    def by_source(self) -> Mapping[str, ScalePair]:
        """Pairs by the name of their source."""
        return {pair.source: pair for pair in self.pairs}

    @cached_property
    def why_not(self) -> Mapping[str, str]:
        """Reasons by the name of the refused source."""
        return {refusal.source: refusal.why for refusal in self.refused}


def pattern_of(name: str) -> str:
    """Name a module without the numbers of its layer and expert.

    Args:
        name: dotted name.

    Returns:
        `model.layers.*.mlp.up_proj`.
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


@checked(model=MODULE, pair=Kind(lambda value: isinstance(value, ScalePair), "a ScalePair of `find_pairs`"), factor_C=TENSOR)
@torch.no_grad()
def scale_channels(model: nn.Module, pair: ScalePair, factor_C: Tensor) -> None:
    """Multiply the source's channels and divide the readers' columns: the model computes what it did. Changes the model.

    Args:
        model: that the pair was found in.
        pair: whose weights change, each computed in float32, at least, and rounded once.
        factor_C: [C], positive and finite.

    Raises:
        TargetError: the pair is none of this model.
        UserInputError: a weight was made under torch.inference_mode; or the factors are of another shape, or not all positive and finite.
        NumericsError: a weight would no longer be finite; none has been changed.
    """
    if factor_C.is_complex() or factor_C.is_meta or factor_C.layout != torch.strided:
        raise UserInputError("factor_C: it is complex, sparse or without values (on the meta device); give a dense tensor of real numbers")
    channels = _size_of(model, pair.source, 0)
    if factor_C.shape != (channels,):
        raise UserInputError(f"factor_C: {list(factor_C.shape)} was given, and {pair.source} has {channels} channels; give one for each")
    if not bool(((factor_C > 0) & (factor_C < torch.inf)).all()):
        raise UserInputError("factor_C: not all of it is positive and finite, so it cannot be undone; give such factors")
    misfit = next((name for name in pair.readers if _size_of(model, name, -1) != channels * pair.repeats), None)
    if misfit is not None or channels % (pair.head_dim or 1):
        raise TargetError(f"pair: {misfit or pair.source} does not fit it here; give the model that it was found in")
    columns_K = pair.spread(factor_C)
    modules = {name: model.get_submodule(name) for name in (pair.source, *pair.readers)}
    changed = {pair.source: list(_scaled_source(modules[pair.source], factor_C, pair.offset))}
    changed |= {name: [_scaled_reader(modules[name], columns_K)] for name in pair.readers}
    check_trainable((name, weight) for name, parts in changed.items() for weight, _ in parts)
    lost = next((name for name, parts in changed.items() if not all(bool(value.isfinite().all()) for _, value in parts)), None)
    if lost is not None:
        raise NumericsError(f"{lost}: its weight would hold NaN or infinity with this factor_C; give factors nearer to 1")
    for weight, value in [part for parts in changed.values() for part in parts]:
        weight.copy_(value)


def _size_of(model: nn.Module, name: str, dim: int) -> int:
    """A size of a weight that is a parameter."""
    module = dict(model.named_modules()).get(name)
    weight = None if module is None else module._parameters.get("weight")
    if module is None or weight is None or weight.is_meta:
        raise TargetError(f"pair: {name} has no weight in this {type(model).__name__}; give the model that it was found in, uncompressed")
    return (weight_of(module) if is_quantizable(module) else weight).shape[dim]


def scale_source(module: nn.Module, factor_C: Tensor, offset: float) -> None:
    """Multiply what a module gives by a factor for each channel. Changes the module.

    Args:
        module: a norm or a linear layer.
        factor_C: [C].
        offset: see ScalePair.
    """
    for weight, value in _scaled_source(module, factor_C, offset):
        weight.copy_(value)


def scale_reader(module: nn.Module, factor_K: Tensor) -> None:
    """Divide the columns of a layer. Changes the module.

    Args:
        module: a linear layer, or one with a weight [R, K], such as a router.
        factor_K: [K].
    """
    weight_RK, value_RK = _scaled_reader(module, factor_K)
    weight_RK.copy_(value_RK)


# What weights become, rounded once.


def _scaled_source(module: nn.Module, factor_C: Tensor, offset: float) -> Iterator[tuple[Tensor, Tensor]]:
    weight = module.get_parameter("weight")
    wide = torch.promote_types(weight.dtype, torch.float32)
    factor_C = factor_C.to(weight.device, wide)
    if weight.dim() == 1:
        yield weight, ((weight.to(wide) + offset) * factor_C - offset).to(weight.dtype)
    else:
        rows_RK = weight_of(module)
        yield rows_RK, (rows_RK.to(wide) * factor_C[:, None]).to(rows_RK.dtype)
    bias = module._parameters.get("bias")
    if bias is not None:
        yield bias, (bias.to(wide) * factor_C).to(bias.dtype)


def _scaled_reader(module: nn.Module, factor_K: Tensor) -> tuple[Tensor, Tensor]:
    weight_RK = weight_of(module) if is_quantizable(module) else module.get_parameter("weight")
    wide = torch.promote_types(weight_RK.dtype, torch.float32)
    return weight_RK, (weight_RK.to(wide) / factor_K.to(weight_RK.device, wide)).to(weight_RK.dtype)
