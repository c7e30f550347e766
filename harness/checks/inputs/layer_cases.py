"""What layers are built from and handed, float layers of every shape, plain inputs, those that hurt, and the largest; and how near their
outputs come."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.checks.catalogue.registry import CheckFailed
from harness.checks.protocols import Layer
from harness.checks.strategies import hurtful, uniform
from harness.lifecycle.driving.snapshot import freeze


def float_linear(
    shape: tuple[int, int], dtype: torch.dtype, bias: bool = True, name: str = "spread groups", seed: int = 3, times: int = 1
) -> nn.Linear:
    """Make a float layer.

    Args:
        shape: [R, C] of its weight.
        dtype: of weight and bias.
        bias: whether it has one.
        name: kind of the weight, as `hurtful` has it.
        seed: of the bias.
        times: what the weight is multiplied with.

    Returns:
        The layer.
    """
    linear = nn.Linear(shape[1], shape[0], bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(hurtful(name, shape, dtype, group=16) * times)
        if bias:
            linear.bias.copy_(uniform((shape[0],), torch.Generator().manual_seed(seed)))
    return linear


def layer_shapes(subject: Layer) -> list[tuple[int, int]]:
    """Name small shapes that a subject takes: one wide, one high, of one output and one column where that may be, and a square.

    Args:
        subject: of the catalogue.

    Returns:
        [R, C] each.
    """
    multiple = subject.column_multiple
    if multiple == 1:
        return [(5, 37), (33, 64), (1, 13), (7, 1), (1, 1), (32, 32)]
    # In a square of several groups those that run down the columns fit, too.
    return [(5, 3 * multiple), (33, multiple), (1, 2 * multiple), (2 * multiple, 2 * multiple)]


def block_shapes(subject: Layer) -> list[tuple[int, int]]:
    """Name shapes with as many blocks of usual sizes down as across: 16 x 16 to 128 x 128, and those twice as wide as high.

    Args:
        subject: of the catalogue.

    Returns:
        [R, C] each; none where its groups do not fit.
    """
    return [] if 256 % subject.column_multiple else [(256, 256), (128, 256)]


@dataclass(frozen=True)
class LayerCase:
    """A layer, the values with which it multiplies and the bias of the float one that it was built from; zeros where that has none."""

    subject: Layer
    layer: nn.Module
    weight: Tensor
    bias: Tensor

    @classmethod
    def built(cls, subject: Layer, shape: tuple[int, int], dtype: torch.dtype, bias: bool, times: int = 1) -> LayerCase:
        """Build a layer from a weight of a bell curve.

        Args:
            subject: builds it.
            shape: [R, C] of the weight.
            dtype: of the float layer.
            bias: whether that has one.
            times: what the weight is multiplied with.

        Returns:
            The case.
        """
        linear = float_linear(shape, dtype, bias, name="bell", times=times)
        return cls.of(subject, subject.build(linear), linear.bias.detach().clone() if bias else torch.zeros(shape[0]))

    @classmethod
    def of(cls, subject: Layer, layer: nn.Module, bias: Tensor) -> LayerCase:
        """Ask a layer for its weight.

        Args:
            subject: that has built it.
            layer: any of its layers.
            bias: [R] of the float one.

        Returns:
            The case.
        """
        return cls(subject, layer, subject.weight(layer).to(torch.float64), bias)


def plain_inputs(leading: Sequence[tuple[int, ...]], columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw inputs of usual size, no two columns of which are alike.

    Args:
        leading: sizes in front of the columns, of each.
        columns: C.
        dtype: of the inputs.

    Returns:
        [*leading, C] each.
    """
    inputs = [uniform((*sizes, columns), torch.Generator().manual_seed(1)) for sizes in leading]
    return [x.to(dtype) * torch.arange(1, columns + 1).sqrt().to(dtype) for x in inputs]


def hurtful_inputs(columns: int, dtype: torch.dtype, bias: bool) -> dict[str, Tensor]:
    """Make many tokens, large values, rows of zeros; and small ones of each rank, where no bias hides what becomes of them.

    Args:
        columns: C.
        dtype: of the inputs.
        bias: whether the layer has one.

    Returns:
        By words for them.
    """
    many, large = hurtful("bell", (130, columns), dtype), hurtful("large", (3, columns), dtype)
    many[1::2] *= 64  # a deviation of 1.5, as hidden states have it, beside one of 0.02: what saturates for many tokens only
    some = hurtful("outliers", (5, columns), dtype)
    some[1::2] = 0
    found = {"130 tokens": many, "5 sequences": torch.stack([many.roll(by, 0) for by in range(5)]), "large": large, "rows of zeros": some}
    tiles = many.repeat(2, 1)[:256]  # kernels take another way where tokens fill their tiles
    found |= {"256 tokens": tiles, "4 sequences of 64 tokens": tiles.view(4, 64, columns)}
    found |= {"zeros only": torch.zeros(2, columns, dtype=dtype), "a constant": torch.full((3, columns), 0.3, dtype=dtype)}
    if not bias:
        for name in ("small", "tiny", "subnormal"):
            x = hurtful(name, (3, columns), dtype)
            found |= {name: x, f"{name}, in sequences": x[None], f"{name}, in four dimensions": x[:, None, None]}
    return found


def largest_input(case: LayerCase, x: Tensor) -> Tensor:
    """Scale inputs until they are as large as may be while their products, in whatever order they are added up, stay numbers.

    Args:
        case: the layer.
        x: inputs of it; not modified.

    Returns:
        The inputs, 2^98 at most.
    """
    wide = x.to(torch.float64)
    sums = wide.abs() @ case.weight.abs().t()
    most = min(float(torch.finfo(x.dtype).max), 2.0**100) / 4
    return (wide * (most / max(float(sums.max()), float(wide.abs().max()), 1e-30))).to(x.dtype)


def answer(layer: nn.Module, x: Tensor, what: str) -> Tensor | None:
    """Run a layer on what it may refuse.

    Args:
        layer: of a subject.
        x: its input.
        what: it is, for the error.

    Returns:
        What comes out; None where the layer refuses it.

    Raises:
        CheckFailed: it refuses without a message.
    """
    try:
        found: Tensor = layer(x)
    except Exception as error:  # the subject may refuse with any class
        if not str(error).strip():
            raise CheckFailed(f"{what}: {type(error).__name__} came without a message") from error
        return None
    return found


def hold_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Hold outputs as near as another order of additions: a T3 of the norm, which one output that is near zero does not decide.

    Args:
        actual: outputs of a layer.
        expected: those that they should be.
        what: they are, for the error.

    Raises:
        CheckFailed: another dtype, shape, or values further off than 8 u.
    """
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise CheckFailed(f"{what}: {actual.dtype} {list(actual.shape)}, not {expected.dtype} {list(expected.shape)}")
    wide, error = expected.to(torch.float64), actual.to(torch.float64) - expected.to(torch.float64)
    error = error.masked_fill((actual == expected) | (actual.isnan() & expected.isnan()), 0.0)  # infinities are equal, too
    wide = wide.masked_fill(~wide.isfinite(), 0.0)
    if not float(error.norm()) <= 8 * float(torch.finfo(expected.dtype).eps) * float(wide.norm()):
        raise CheckFailed(f"{what}: relative error {float(error.norm() / wide.norm()):.3g}")


def hold_apart(source: nn.Module, other: nn.Module, blank: nn.Module, what: str, x: Tensor) -> None:
    """Hold that what is done to one layer is not done to another that came from it, nor the other way round.

    Args:
        source: a layer in eval mode.
        other: another one, of the same shape.
        blank: one that is filled from the state dict of copies of `source`.
        what: for messages.
        x: inputs.

    Raises:
        CheckFailed: it is.
    """
    for name, act in {
        "was filled": lambda layer: layer.load_state_dict(other.state_dict()),
        "was moved to bfloat16": lambda layer: layer.to(torch.bfloat16),
        "was moved to float16": lambda layer: layer.to(torch.float16),
    }.items():
        for kind, goes_first in ((kind, goes_first) for kind in ("copy", "one filled from it") for goes_first in (True, False)):
            layer = copy.deepcopy(source)
            made = copy.deepcopy(layer if kind == "copy" else blank)
            if kind != "copy":
                made.load_state_dict(layer.state_dict())
            (goes, whose), (stays, kept) = ((made, kind), (layer, "layer")) if goes_first else ((layer, "layer"), (made, kind))
            before, expected = freeze(stays.state_dict()), stays(x).clone()
            act(goes)
            if freeze(stays.state_dict()) != before:
                raise CheckFailed(f"{what}: the {whose} {name}, and the state dict of the {kept} has changed with it")
            hold_close(stays(x), expected, f"{what}: the {whose} {name}, and the {kept} gives another output")
    _hold_unshared(source, copy.deepcopy(source), what)


def _hold_unshared(layer: nn.Module, made: nn.Module, what: str) -> None:
    if made.training != layer.training:
        raise CheckFailed(f"{what}: the copy of a layer in eval mode is in training mode")
    theirs = dict(made.named_modules())
    for place, module in layer.named_modules():
        own, its = vars(module), vars(theirs[place]) if place in theirs else {}
        shared = [name for name, value in own.items() if isinstance(value, dict | list | set) and its.get(name) is value]
        if shared:
            raise CheckFailed(f"{what}: the layer and its copy share one {'.'.join(filter(None, (place, shared[0])))}")
