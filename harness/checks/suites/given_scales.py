"""Checks of a quantizer under scales that are given, not chosen: 9, 12, and that codes are the nearest of whatever is encoded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, register
from harness.checks.inputs.examine import eps_of, examine, refuse
from harness.checks.inputs.planted import POWERS, is_exact, middles_of, power_scales, tied, tied_weights
from harness.checks.inputs.presentations import GRAD_MODES, presentations
from harness.checks.oracles import at_tie, nearest
from harness.checks.protocols import Quantizer
from harness.checks.strategies import large_shapes, shapes, uniform

_MANY_ROWS = 131


@register(9, "ties", "The declared tie mode, half to even, is exact on planted ties, and one ulp beside them", kind="quantizer",
          needs=("half_even",))  # fmt: skip
def ties(subject: Quantizer, context: CheckContext) -> str:
    """Plant every tie of the grid, and its two neighbours, under scales that are powers of two: given ones, and those that it chooses."""
    count = 0
    for dtype in subject.dtypes:
        for rows in (1, _MANY_ROWS):
            for power in POWERS:
                _hold_given_ties(subject, dtype, rows, power)
        count += _hold_own_ties(subject, dtype)
    own = f", and {count} under scales of its own" if count else ""
    return f"{len(middles_of(subject.code_values))} ties and their neighbours under 2 scales in {len(subject.dtypes)} dtypes{own}"


def _hold_given_ties(subject: Quantizer, dtype: torch.dtype, rows: int, power: int) -> None:
    grid = subject.code_values
    columns = -(-len(middles_of(grid)) // subject.column_multiple) * subject.column_multiple
    like, offset = power_scales(subject, columns, 2.0**power, rows=rows, dtype=dtype)
    at = ((tied(grid, rows, columns) - offset) * 2.0**power).to(dtype)
    for name, values in _and_beside(at):
        codes = subject.encode(values, like).to(torch.float64)
        positions = values.to(torch.float64) / 2.0**power + offset
        # An ulp that is lost when the zero point is added leaves a tie; either side is right then.
        kept = is_exact(torch.full_like(positions, 2.0**power), positions, dtype)
        expected = nearest(positions, grid)
        refuse(kept & (codes != expected), f"{dtype}, {name}: not half to even", code=codes, expected=expected, position=positions)


def _and_beside(at: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "on a tie", at
    yield "just above a tie", torch.nextafter(at, torch.full_like(at, torch.inf))
    yield "just below a tie", torch.nextafter(at, torch.full_like(at, -torch.inf))


def _hold_own_ties(subject: Quantizer, dtype: torch.dtype) -> int:
    """The number of ties in weights for which the quantizer chose scales of powers of two by itself."""
    columns = 5 * subject.column_multiple if subject.column_multiple > 1 else 60
    unit, count = subject.unit((11, columns)), 0
    for planted in tied_weights(subject.code_values, 11, columns, min(columns, unit[1])):
        for name, weight in _and_beside(planted.to(dtype)):
            found = examine(subject, weight)
            exact, expected = is_exact(found.scale, found.positions, dtype), nearest(found.positions, subject.code_values)
            what = f"{dtype}, {name}, under a scale of its own: not half to even"
            refuse(exact & (found.codes != expected), what, code=found.codes, expected=expected, position=found.positions)
            if name == "on a tie":
                count += int((exact & torch.isin(found.positions, middles_of(subject.code_values))).sum())
    return count


@register(
    12,
    "saturates",
    "Codes saturate: what lies beyond the range takes the last code, and no code is NaN",
    kind="quantizer",
    caught_by=("Model-Optimizer#1633",),
)
def saturates(subject: Quantizer, context: CheckContext) -> str:
    """Encode values far beyond the range, and just beyond it, in every dtype and in one row and more."""
    grid = subject.code_values
    width = subject.column_multiple * 8
    factors = (1.001, 1.1, 1.2, 2.0, 3.7, 300.0, 1e6, 3e9, 1e12, 1e20, 1e30)  # 2^31 and 2^63, where integers wrap around, lie between them
    count = 0
    for dtype in subject.dtypes:
        for rows in (1, 2):
            like, offset = power_scales(subject, width, 0.5, rows=rows, dtype=dtype)
            for factor in factors:
                for end, sign in ((grid[-1], 1.0), (grid[0], -1.0)):
                    value = (float(end) + sign * abs(float(end)) * (factor - 1) - offset) * 0.5
                    if abs(value) > torch.finfo(dtype).max:
                        continue
                    codes = subject.encode(torch.full((rows, width), value, dtype=dtype), like).to(torch.float64)
                    refuse(~(codes == end), f"{dtype}: {factor:g} times the last code does not become it", code=codes)
                    count += 1
    return f"{count} values beyond the codes {float(grid[0]):g} to {float(grid[-1]):g}"


@register(
    None,
    "given_scales",
    "Under given scales codes are the nearest ones, of whatever shape, dtype and layout, with gradients on and off",
    kind="quantizer",
)
def given_scales(subject: Quantizer, context: CheckContext) -> str:
    """Encode values under scales that are not those of their range, and present some in every way."""
    count = 0
    every = [*shapes(subject.column_multiple), (1, 5 * subject.column_multiple), *large_shapes(subject.column_multiple)]
    for dtype in subject.dtypes:
        for shape in every:
            for share in (0.3, 1.1):  # within a third of the codes, and a little beyond them
                _hold_encoded(subject, shape, dtype, share)
                count += 1
        _hold_presented(subject, every[0], dtype)
    return f"{count} tensors, and one in every layout in {len(subject.dtypes)} dtypes"


def _values(subject: Quantizer, shape: tuple[int, int], share: float, offset: float) -> Tensor:
    """Values at positions all over so large a share of the codes, under a scale of 1/16."""
    low, high = float(subject.code_values[0]), float(subject.code_values[-1])
    middle, reach = (low + high) / 2, (high - low) / 2
    return (middle + uniform(shape, torch.Generator().manual_seed(11)) * reach * share - offset) / 16


def _hold_encoded(subject: Quantizer, shape: tuple[int, int], dtype: torch.dtype, share: float) -> None:
    grid = subject.code_values
    like, offset = power_scales(subject, shape[1], 1 / 16, rows=shape[0], dtype=dtype)
    values = _values(subject, shape, share, offset).to(dtype)
    codes, wide = subject.encode(values, like).to(torch.float64), values.to(torch.float64) * 16
    positions = wide + offset
    expected = nearest(positions, grid)
    excused = at_tie(positions, grid, eps_of(dtype), torch.maximum(positions.abs(), wide.abs()))
    what = f"{list(shape)} {dtype}: a code is not the nearest one"
    refuse((codes != expected) & ~excused, what, code=codes, nearest=expected, position=positions)


def _hold_presented(subject: Quantizer, shape: tuple[int, int], dtype: torch.dtype) -> None:
    like, offset = power_scales(subject, shape[1], 1 / 16, rows=shape[0], dtype=dtype)
    values = _values(subject, shape, 1.0, offset).to(dtype)
    whole = subject.encode(values, like)
    for name, view, plain in presentations(values):
        two = (whole if torch.equal(plain, values) else subject.encode(plain, like)).to(torch.float64)
        for mode, grad in GRAD_MODES.items():
            with grad():
                one = subject.encode(view, like).detach().to(torch.float64)
            refuse(one != two, f"{list(shape)} {dtype}, {name}, {mode}: another code than for an ordinary tensor", code=one, ordinary=two)
