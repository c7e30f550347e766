"""How a check goes through weights: the fixed ones first, then what Hypothesis draws and shrinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError
from harness.checks.inputs.memory import hold_memory
from harness.checks.oracles import at_tie, nearest, spread
from harness.checks.protocols import Quantized, Quantizer
from harness.checks.strategies import MOST_COLUMNS, MOST_ROWS, fixed_weights, grid_weights


@dataclass(frozen=True)
class Examined:
    """One weight and what a quantizer made of it, in float64 and per value.

    Attributes:
        weight: as given.
        quantized: what came out.
        values: dequantized, in the dtype that came out.
        exact: the weight, float64 [R, C].
        codes: float64 [R, C].
        scale: of each value, divided by the global scale, float64 [R, C].
        zero: zero point of each value, float64 [R, C].
        unit: rows and columns that share a scale.
    """

    weight: Tensor
    quantized: Quantized
    values: Tensor
    exact: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    unit: tuple[int, int]

    @property
    def positions(self) -> Tensor:
        """Where each value lies between the codes: w / s + z."""
        return self.exact / self.scale + self.zero

    @property
    def reach(self) -> Tensor:
        """The largest magnitude on the way to a position, by which rounding errors are measured."""
        return torch.maximum((self.exact / self.scale).abs(), self.positions.abs())


def examine(subject: Quantizer, weight: Tensor) -> Examined:
    """Quantize one weight and look at the parts.

    Args:
        subject: a quantizer.
        weight: [R, C].

    Returns:
        All of it in float64.

    Raises:
        CheckFailed: codes or scales of a wrong form, or a weight that was changed.
    """
    before = weight.clone()
    quantized = subject.quantize(weight)
    if not torch.equal(before, weight):
        raise CheckFailed("quantize() has changed the weight that it was given")
    values = subject.dequantize(quantized)
    shape = (weight.shape[0], weight.shape[1])
    for name, part in (("codes", quantized.codes), ("values", values)):
        if tuple(part.shape) != shape:
            raise CheckFailed(f"{name} of shape {list(part.shape)} came out of a weight of {list(shape)}")
    unit = subject.unit(shape)
    try:
        scale = spread(quantized.scale, shape, unit)
        zero = torch.zeros_like(scale) if quantized.zero_point is None else spread(quantized.zero_point, shape, unit)
    except ValueError as error:
        raise CheckFailed(f"scale or zero point: {error}") from error
    if quantized.global_scale is not None:
        scale = scale / quantized.global_scale.to(torch.float64).reshape(())
    return Examined(weight, quantized, values, weight.to(torch.float64), quantized.codes.to(torch.float64), scale, zero, unit)


def each_weight(
    subject: Quantizer, context: CheckContext, hold: Callable[[Examined], None], *, dtypes: Sequence[torch.dtype] | None = None
) -> str:
    """Show a function every weight that hurts, and what the subject made of it.

    A fixed weight is quantized once for all checks that share a look: that the same weight gives the same codes twice is a check of
    its own, and a dozen checks that each quantize all of them again took most of the time.

    Args:
        subject: a quantizer.
        context: how closely.
        hold: raises CheckFailed for a weight with which the subject is wrong.
        dtypes: of the weights; by default all that the subject takes.

    Returns:
        How many were looked at, in words.

    Raises:
        CheckFailed: what the function raised, with the words for the weight.
        NothingToCheckError: the subject takes none of these dtypes.
    """
    wanted = [dtype for dtype in subject.dtypes if dtypes is None or dtype in dtypes]
    if not wanted:
        raise NothingToCheckError("the subject takes no dtype in which this can be said")
    group = subject.unit((8, 64 * subject.column_multiple))[1]
    count = 0
    of_units = grid_weights(wanted[0], subject.column_multiple, large_unit(subject))
    for label, weight in (*fixed_weights(wanted, subject.column_multiple, group), *of_units):
        if not _has_scales(subject, weight):
            continue
        count += 1
        try:
            hold(context.once(subject, label, partial(examine, subject, weight)))
        except CheckFailed as broken:
            raise CheckFailed(f"{label}: {broken}", broken.findings) from None
    if not context.draws:
        return f"{count} fixed weights"
    return f"{count} fixed weights and {_drawn(subject, context, hold, wanted)} drawn ones"


def large_unit(subject: Quantizer) -> tuple[int, int]:
    """Return how many rows and columns share a scale in the largest weight: what a unit is where no edge cuts it short."""
    return subject.unit((MOST_ROWS, -(-MOST_COLUMNS // subject.column_multiple) * subject.column_multiple))


def _drawn(subject: Quantizer, context: CheckContext, hold: Callable[[Examined], None], dtypes: Sequence[torch.dtype]) -> int:
    from hypothesis import given

    from harness.checks.strategies import weights

    count = 0

    @context.profile.example_settings()
    @given(weights(dtypes=dtypes, column_multiple=subject.column_multiple))
    def drawn(weight: Tensor) -> None:
        nonlocal count
        if not _has_scales(subject, weight):
            return
        count += 1
        try:
            hold(examine(subject, weight))
        except CheckFailed as broken:
            raise CheckFailed(f"{list(weight.shape)} {weight.dtype} {weight.flatten()[:6].tolist()}: {broken}", broken.findings) from None

    drawn()
    return count


def held_in(subject: Quantizer) -> torch.dtype | None:
    """Return the dtype of 16 bits or more in which scales are stored, by which they are right; None: that of the scales themselves.

    Smaller ones stand under a global scale, or hold exponents alone, and have rules of their own.
    """
    stored = subject.stored_scale
    return stored if stored is not None and stored.is_floating_point and stored.itemsize > 1 else None


def _has_scales(subject: Quantizer, weight: Tensor) -> bool:
    """Whether the dtype in which scales are stored reaches as far as the weight."""
    held = held_in(subject)
    return held is None or float(weight.abs().amax()) <= torch.finfo(held).max


def eps_of(dtype: torch.dtype) -> float:
    """Return eps of the dtype in which codes may have been computed: float32 or better, whatever the dtype of the weight."""
    return float(min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps))


def first(bad: Tensor) -> list[int]:
    """Return the index of the first True."""
    return [int(place) for place in bad.nonzero()[0]]


def refuse(bad: Tensor, what: str, **shown: Tensor) -> None:
    """Raise where something is wrong.

    Args:
        bad: True where it is.
        what: is wrong, in words.
        **shown: tensors whose value at the first place helps.

    Raises:
        CheckFailed: something is.
    """
    if not bool(bad.any()):
        return
    place = first(bad)
    numbers = ", ".join(f"{name} {float(tensor[tuple(place)]):.9g}" for name, tensor in shown.items())
    raise CheckFailed(f"{what} at {int(bad.sum())} of {bad.numel()} places, the first at {place}: {numbers}")


def hold_memory_of(subject: Quantizer, weight: Tensor) -> None:
    """Quantize, encode and take back in memory that has held other values.

    Args:
        subject: a quantizer.
        weight: [R, C]; not modified.

    Raises:
        CheckFailed: what came out is not what comes out of new memory.
    """
    weights = [weight, weight * 4, weight.flip(0) * -0.5]
    found = [subject.quantize(one) for one in weights]
    codes, scales = [one.codes for one in found], [one.scale for one in found]
    what = f"{list(weight.shape)} {weight.dtype}"
    hold_memory(subject.quantize, f"quantize {what}", weights)
    hold_memory(lambda values, scale: subject.encode(values, replace(found[0], scale=scale)), f"encode {what}", weights, scales)
    hold_memory(lambda one, scale: subject.dequantize(replace(found[0], codes=one, scale=scale)), f"dequantize {what}", codes, scales)


def hold_nearest(grid: Tensor, found: Examined) -> None:
    """Hold every code against the nearest value of the grid in float64, but for one step at ties.

    Args:
        grid: all code values in rising order, float64 [K].
        found: a weight and what was made of it.

    Raises:
        CheckFailed: a code is another one.
    """
    positions = found.positions
    expected = nearest(positions, grid)
    excused = at_tie(positions, grid, eps_of(found.weight.dtype), found.reach)
    one_step = (torch.searchsorted(grid, found.codes) - torch.searchsorted(grid, expected)).abs() <= 1
    wrong = (found.codes != expected) & ~(excused & one_step)
    refuse(wrong, "a code is not the nearest one", code=found.codes, nearest=expected, position=positions)


def hold_same(found: Quantized, expected: Quantized, what: str) -> None:
    """Hold what came out of a tensor against what came out of an ordinary one of the same values.

    Args:
        found: of the tensor.
        expected: of the ordinary one.
        what: the tensor, in words.

    Raises:
        CheckFailed: codes, scales, zero points or the global scale are others.
    """
    names = {"codes": "codes", "scale": "scales", "zero_point": "zero points", "global_scale": "global scale"}
    for key, name in names.items():
        one, two = getattr(found, key), getattr(expected, key)
        if (one is None) != (two is None) or (one is not None and not torch.equal(one.to(torch.float64), two.to(torch.float64))):
            raise CheckFailed(f"{what}: other {name} than those of an ordinary tensor of the same values")
