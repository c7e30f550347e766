"""Checks of a quantizer's codes: 3 to 9, 12 and 15, under scales that it chooses and under scales that are given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.examine import (
    Examined,
    each_weight,
    eps_of,
    examine,
    held_in,
    hold_memory_of,
    hold_nearest,
    hold_same,
    large_unit,
    refuse,
)
from harness.checks.inputs.planted import POWERS, is_exact, middles_of, power_scales, tied, tied_weights
from harness.checks.inputs.presentations import GRAD_MODES, layouts, places, presentations
from harness.checks.oracles import at_tie, nearest, units
from harness.checks.protocols import Quantized, Quantizer
from harness.checks.strategies import MOST_COLUMNS, MOST_ROWS, grid_weights, hurtful, large_shapes, shapes, uniform

_MANY_UNITS = 64


@register(None, "dequantizes", "The values are (code - zero point) * scale, over the global scale: 4 u", kind="quantizer")
def dequantizes(subject: Quantizer, context: CheckContext) -> str:
    """Compute the values of the codes in float64: a turned sign or a neighbour's scale is told here, and not by what it does to weights."""

    def hold(found: Examined) -> None:
        exact = (found.codes - found.zero) * found.scale
        info = torch.finfo(found.quantized.scale.dtype)
        limit = 4 * info.eps * (found.codes.abs() + found.zero.abs()) * found.scale.abs() + info.tiny
        values = found.values.to(torch.float64)
        refuse((values - exact).abs() > limit, "a value is not (code - zero point) * scale", value=values, exact=exact)

    return f"{each_weight(subject, context, hold)}, and {_every_code(subject)}"


def _every_code(subject: Quantizer) -> str:
    """Take every code back under a scale that is given: the last one of the longer side comes out of no weight by itself."""
    grid = subject.code_values
    columns = -(-len(grid) // subject.column_multiple) * subject.column_multiple
    for dtype in subject.dtypes:
        like, offset = power_scales(subject, columns, 2.0, dtype=dtype)
        codes = grid.repeat(-(-columns // len(grid)))[:columns].repeat(2, 1)
        values = subject.dequantize(replace(like, codes=codes.to(like.codes.dtype)))
        exact = (codes - offset) * 2.0
        wrong = (values.to(torch.float64) - exact).abs() > 4 * float(torch.finfo(values.dtype).eps) * exact.abs()
        refuse(wrong, f"{dtype}: a code does not come back as (code - zero point) * 2", code=codes, value=values)
    return f"{len(grid)} codes under a scale of 2"


@register(
    15,
    "nearest_codes",
    "Codes are the nearest in exact arithmetic, but for one step at ties (|frac(w/s) - 1/2| < 4 u |w/s|), and so agree across platforms",
    kind="quantizer",
    caught_by=("compressed-tensors#308",),
)
def nearest_codes(subject: Quantizer, context: CheckContext) -> str:
    """Hold every code against the nearest value of the grid in float64."""
    seen = each_weight(subject, context, partial(hold_nearest, subject.code_values))
    return f"{seen}, {_beside_middles(subject)}"


def _beside_middles(subject: Quantizer) -> str:
    """Plant values a little beside every middle of two codes, where a threshold that was rounded shows; no tie, and no rounding error."""
    grid = subject.code_values
    middles = middles_of(grid)
    columns = -(-len(middles) // subject.column_multiple) * subject.column_multiple
    like, offset = power_scales(subject, columns, 1.0)
    for share in (-(2.0**-19), 2.0**-19):
        exact = middles.repeat(-(-columns // len(middles)))[:columns] - offset
        values = (exact * (1 + share)).to(torch.float32)[None].repeat(2, 1)
        positions = values.to(torch.float64) + offset
        excused = at_tie(positions, grid, eps_of(torch.float32), torch.maximum(positions.abs(), values.abs().to(torch.float64)))
        codes, expected = subject.encode(values, like).to(torch.float64), nearest(positions, grid)
        text = "beside the middle of two codes: a code is not the nearest one"
        refuse((codes != expected) & ~excused, text, code=codes, nearest=expected, position=positions)
    return f"and beside {len(middles)} middles"


@register(5, "zero", "0 becomes 0 exactly", kind="quantizer", needs=("zero",))
def zero(subject: Quantizer, context: CheckContext) -> str:
    """Look at the zeros of every weight."""

    def hold(found: Examined) -> None:
        values = found.values.to(torch.float64)
        refuse((found.weight == 0) & (values != 0), "0 does not come back as 0", value=values)
        refuse((found.weight == 0) & ~found.weight.signbit() & values.signbit(), "0 comes back as -0", value=values)

    return each_weight(subject, context, hold)


@register(
    4,
    "half_step",
    "|dq - w| <= s/2 + 2 ulp(w) inside the clipping range, in steps of the grid where they are not all equal",
    kind="quantizer",
)
def half_step(subject: Quantizer, context: CheckContext) -> str:
    """Measure the error of every value that is not cut off."""
    grid = subject.code_values

    def hold(found: Examined) -> None:
        """Hold the error of each value against half a step where it lies, and the rounding of both dtypes."""
        positions = found.positions
        inside = (positions >= grid[0]) & (positions <= grid[-1])
        place = torch.searchsorted(grid, positions.clamp(grid[0], grid[-1]).contiguous()).clamp(1, len(grid) - 1)
        values = found.values.to(torch.float64)
        dtypes = found.weight.dtype, found.values.dtype
        ulp = max(float(torch.finfo(dtype).eps) for dtype in dtypes) * torch.maximum(found.exact.abs(), values.abs())
        tiny = max(float(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps) for dtype in dtypes)
        eps = eps_of(found.weight.dtype)  # of a zero point that is added, an ulp of the sum is lost
        limit = ((grid[place] - grid[place - 1]) / 2 * (1 + 4 * eps) + eps * found.reach) * found.scale + 2 * ulp + tiny
        error = (values - found.exact).abs()
        refuse(inside & ~(error <= limit), "a value is more than half a step away", error=error, limit=limit, weight=found.exact)

    return each_weight(subject, context, hold)


@register(
    None, "covers", "The range covers the weight: no value is cut off by more than a step, and no scale is twice as wide as needed",
    kind="quantizer", needs=("covers",),
)  # fmt: skip
def covers(subject: Quantizer, context: CheckContext) -> str:
    """Measure how far values lie outside of the codes, and how many codes a unit leaves unused."""
    grid = subject.code_values
    # Between the last two codes of the grid; a float format ends in wide steps.
    last, widest = float(grid[-1] - grid[-2]), float(grid[-1])

    def hold(found: Examined) -> None:
        """Refuse a scale that cuts values off, and one that leaves codes unused."""
        positions = found.positions
        slack = last * (1 + 1e-6) + float(torch.finfo(found.values.dtype).eps) * 4 * widest
        # Scales that underflow are raised to a floor, or rounded coarsely.
        whole = found.quantized.global_scale
        largest = units(found.exact, found.unit).abs().nan_to_num(nan=0.0).amax(1) * (1.0 if whole is None else float(whole))
        dtypes = found.values.dtype, (held_in(subject) if whole is None else subject.stored_scale) or found.values.dtype
        normal = largest > max(torch.finfo(dtype).tiny for dtype in dtypes) * 4 * widest
        over = units(torch.maximum(positions - grid[-1], grid[0] - positions), found.unit).nan_to_num(nan=-1.0).amax(1)
        refuse(normal & (over > slack), "a value is cut off by more than a step", steps=over)
        reach = units((positions - found.zero).abs(), found.unit).nan_to_num(nan=0.0).amax(1)
        spans = units(found.zero, found.unit)[:, 0]
        needed = torch.where(spans == 0, widest, float(grid[-1] - grid[0]) / 2) / 2 - last
        is_alone = found.quantized.global_scale is None  # under one, the smallest groups may fall below what their own scale can say
        unused = normal & (reach < needed) & is_alone
        refuse(unused, "less than half of the codes are used: the scale is too wide", reach=reach, needed=needed)

    return each_weight(subject, context, hold)


@register(
    3,
    "codes_come_back",
    "quantize(dequantize(q)) == q bitwise in float32, where the bits of a code are fewer than those of the significand",
    kind="quantizer",
)
def codes_come_back(subject: Quantizer, context: CheckContext) -> str:
    """Quantize the values again, with the scales that are there."""

    def hold(found: Examined) -> None:
        again = subject.encode(found.values, found.quantized).to(torch.float64)
        refuse(again != found.codes, "a value does not come back as its own code", code=found.codes, again=again)

    return each_weight(subject, context, hold, dtypes=[torch.float32, torch.float64])


@register(6, "monotone", "w1 <= w2 in one unit gives q1 <= q2", kind="quantizer")
def monotone(subject: Quantizer, context: CheckContext) -> str:
    """Sort each unit by its weights and look at the codes."""

    def hold(found: Examined) -> None:
        values, codes = units(found.weight, found.unit), units(found.codes, found.unit)
        order = values.nan_to_num(nan=torch.inf).argsort(dim=1, stable=True)
        sorted_codes = codes.gather(1, order)
        refuse(sorted_codes.diff(dim=1) < 0, "a larger weight has a smaller code", code=sorted_codes[:, 1:])

    return each_weight(subject, context, hold)


@register(7, "homogeneous", "Q(2^k w) == 2^k Q(w) bitwise", kind="quantizer", needs=("homogeneous",))
def homogeneous(subject: Quantizer, context: CheckContext) -> str:
    """Scale weights by powers of two, away from the ends of their dtype."""

    def hold(found: Examined) -> None:
        if not _is_central(found.weight, held_in(subject)):
            return
        values = found.values.to(torch.float64)
        asked = (found.weight != 0) | (values == 0)  # dead groups of a grid without a zero have its smallest scale, whatever they are times
        for factor in (0.125, 2.0, 64.0):
            again = subject.dequantize(subject.quantize(found.weight * factor)).to(torch.float64)
            refuse(asked & (again != values * factor), f"{factor:g} times the weight gives something else", value=values, scaled=again)

    return each_weight(subject, context, hold)


def _is_central(weight: Tensor, stored: torch.dtype | None) -> bool:
    """All of it, and its scales as stored, stay normal numbers when it is divided by a scale of 8 bits or multiplied by 2^6."""
    live = weight[weight != 0].abs().to(torch.float64)
    is_half = torch.float16 in (weight.dtype, stored)
    info, margin = torch.finfo(torch.float16 if is_half else weight.dtype), 2.0**12 if is_half else 2.0**20
    return live.numel() == 0 or bool((live.amin() > info.tiny * margin) & (live.amax() < info.max / 2.0**8))


@register(8, "odd", "Q(-w) == -Q(w), away from the last code of the longer side", kind="quantizer", needs=("odd",))
def odd(subject: Quantizer, context: CheckContext) -> str:
    """Turn the sign of every weight."""
    last = min(abs(float(subject.code_values[0])), float(subject.code_values[-1]))

    def hold(found: Examined) -> None:
        codes = found.codes
        turned = subject.quantize(-found.weight).codes.to(torch.float64)
        refuse((codes != -turned) & (codes.abs() < last), "the codes of -w are not those of w, negated", code=codes, turned=turned)

    return each_weight(subject, context, hold)


# Checks of a quantizer's units and of its inputs as a whole: 11, 12, 16 and 64, and of what it reports.


@register(
    11,
    "local",
    "Changing one unit changes no other unit's codes or scale, bitwise",
    kind="quantizer",
    needs=("local",),
    caught_by=("compressed-tensors#308",),
)
def local(subject: Quantizer, context: CheckContext) -> str:
    """Change each unit of some weights in turn; of a weight with many, units of each kind of place."""
    ordinary = shapes(subject.column_multiple)[0]
    count = 0
    for dtype in subject.dtypes:
        given = [hurtful(name, ordinary, dtype, group=subject.unit(ordinary)[1]) for name in ("spread groups", "lopsided")]
        given += [weight for _, weight in grid_weights(dtype, subject.column_multiple, large_unit(subject))][:1]
        for weight in given:
            unit = subject.unit((weight.shape[0], weight.shape[1]))
            units = tuple(-(-size // each) for size, each in zip(weight.shape, unit, strict=True))
            before = subject.quantize(weight)
            some = places(units) if math.prod(units) > _MANY_UNITS else [*itertools.product(*map(range, units))]
            for place in some if math.prod(units) > 1 else ():
                _change_unit(subject, weight, before, place, unit)
                count += 1
    if not count:
        raise NothingToCheckError("all values of every weight that is shown share one scale")
    return f"{count} units were changed"


def _change_unit(subject: Quantizer, weight: Tensor, before: Quantized, place: tuple[int, ...], unit: tuple[int, int]) -> None:
    changed = weight.clone()
    rows, columns = (slice(index * size, (index + 1) * size) for index, size in zip(place, unit, strict=True))
    changed[rows, columns] *= -5
    after = subject.quantize(changed)
    others = torch.ones_like(weight, dtype=torch.bool)
    others[rows, columns] = False
    moved = (before.codes.to(torch.float64) != after.codes.to(torch.float64)) & others
    refuse(moved, f"codes outside of the unit {list(place)} that was changed have changed", before=before.codes, after=after.codes)
    number = place[0] * -(-weight.shape[1] // unit[1]) + place[1]
    for name, one, two in (("scale", before.scale, after.scale), ("zero point", before.zero_point, after.zero_point)):
        if one is None or two is None:
            continue
        differs = one.flatten().to(torch.float64) != two.flatten().to(torch.float64)
        differs[number] = False
        if bool(differs.any()):
            raise CheckFailed(f"the {name} of unit {int(differs.nonzero()[0])} changed with the values of unit {number}")


@register(
    16,
    "per_token",
    "Dynamic per-token quantization is equivariant to token permutation, bitwise",
    kind="quantizer",
    needs=("per_token",),
)
def per_token(subject: Quantizer, context: CheckContext) -> str:
    """Permute the rows of some activations, and leave some out."""
    count = 0
    for dtype in subject.dtypes:
        for name in ("spread groups", "outliers", "dead groups", "lopsided"):
            x = hurtful(name, (7, shapes(subject.column_multiple)[0][1]), dtype, group=max(8, subject.column_multiple))
            order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
            whole = subject.quantize(x)
            for kept in (order, order[:4], order[2:3]):
                part = subject.quantize(x[kept])
                same = torch.equal(part.codes.to(torch.float64), whole.codes[kept].to(torch.float64))
                same &= torch.equal(part.scale.reshape(len(kept), -1), whole.scale.reshape(7, -1)[kept])
                if not same:
                    raise CheckFailed(f"{name} in {dtype}: tokens {kept.tolist()} by themselves are quantized differently")
                count += 1
    return f"{count} permutations and selections of tokens"


@register(
    64,
    "shapes",
    "Odd, one-wide and prime shapes, other layouts, used memory, Parameters, and gradients off, in every dtype give the same codes twice",
    kind="quantizer",
)
def every_shape(subject: Quantizer, context: CheckContext) -> str:
    """Quantize every shape in every dtype, also as a view; one shape in every presentation; and take codes in every layout back."""
    count = 0
    for dtype in subject.dtypes:
        for shape in shapes(subject.column_multiple):
            weight = hurtful("spread groups", shape, dtype, group=max(8, subject.column_multiple))
            found = examine(subject, weight)
            larger = torch.zeros(shape[0] + 2, shape[1] + 3, dtype=dtype)
            larger[1:-1, 2:-1] = weight
            views = {"again": weight, "a transposed view": weight.t().contiguous().t(), "a part of a larger tensor": larger[1:-1, 2:-1]}
            for name, view in views.items():
                hold_same(subject.quantize(view), found.quantized, f"{list(shape)} {dtype}, {name}")
                count += 1
            with torch.no_grad():
                hold_same(subject.quantize(weight), found.quantized, f"{list(shape)} {dtype}, where gradients are off")
        weight = hurtful("spread groups", shapes(subject.column_multiple)[0], dtype, group=max(8, subject.column_multiple))
        count += _hold_presented(subject, weight)
        hold_memory_of(subject, weight)
    return f"{count} shapes, dtypes and layouts"


def _hold_presented(subject: Quantizer, weight: Tensor) -> int:
    """How many presentations of a weight, and layouts of its codes, were as ordinary tensors are."""
    what, count = f"{list(weight.shape)} {weight.dtype}", 0
    quantized = subject.quantize(weight)
    for name, view, plain in presentations(weight):
        expected = quantized if torch.equal(plain, weight) else subject.quantize(plain)
        hold_same(subject.quantize(view), expected, f"{what}, {name}")
        with torch.no_grad():
            hold_same(subject.quantize(view), expected, f"{what}, {name}, where gradients are off")
        count += 1
    for name, view, plain in layouts(quantized.codes):
        one, two = (subject.dequantize(replace(quantized, codes=codes)).to(torch.float64) for codes in (view, plain))
        refuse(one != two, f"{what}, codes as {name}: another value than for ordinary ones", value=one, ordinary=two)
        count += 1
    return count


@register(None, "reported_error", "The reported relative squared error is that of the values, to 1e-3", kind="quantizer")
def reported_error(subject: Quantizer, context: CheckContext) -> str:
    """Compute the error of every weight in float64."""

    def hold(found: Examined) -> None:
        reported = found.quantized.relative_error
        if reported is None:
            raise NothingToCheckError("the quantizer reports no error")
        energy = float(found.exact.square().sum())
        exact = float((found.values.to(torch.float64) - found.exact).square().sum()) / energy if energy else 0.0
        # In float32 the squares of the smallest and the largest numbers are none.
        if 1e-30 < energy < 1e30 and abs(reported - exact) > 1e-3 * exact:
            raise CheckFailed(f"the reported error is {reported:.6g}, that of the values {exact:.6g}")

    return each_weight(subject, context, hold)


# Under scales that are given, not chosen.


@register(9, "ties", "The declared tie mode, half to even, is exact on planted ties, and one ulp beside them", kind="quantizer",
          needs=("half_even",))  # fmt: skip
def ties(subject: Quantizer, context: CheckContext) -> str:
    """Plant every tie of the grid, and its two neighbours, under scales that are powers of two: given ones, and those that it chooses."""
    count = 0
    for dtype in subject.dtypes:
        narrow = len(middles_of(subject.code_values))
        for shape in ((1, narrow), (MOST_ROWS, narrow), (narrow, narrow), (2, MOST_COLUMNS)):
            for power in POWERS if shape[0] == 1 else POWERS[:1]:
                _hold_given_ties(subject, dtype, shape, power)
        _hold_given_ties(subject, dtype, (2, narrow), POWERS[0], above=1)
        count += _hold_own_ties(subject, dtype)
    own = f", and {count} under scales of its own" if count else ""
    return f"{len(middles_of(subject.code_values))} ties and their neighbours under 2 scales in {len(subject.dtypes)} dtypes{own}"


def _hold_given_ties(subject: Quantizer, dtype: torch.dtype, shape: tuple[int, int], power: int, above: int = 0) -> None:
    """The columns are rounded up to what the quantizer takes, and so are the rows of a square."""
    grid = subject.code_values
    columns = -(-shape[1] // subject.column_multiple) * subject.column_multiple
    rows = columns if shape[0] == shape[1] else shape[0]
    like, offset = power_scales(subject, columns, 2.0**power, rows=rows, dtype=dtype, above=above)
    at = ((tied(grid, rows, columns) - offset) * 2.0**power).to(dtype)
    for name, values in _and_beside(at):
        codes = subject.encode(values, like).to(torch.float64)
        positions = values.to(torch.float64) / 2.0**power + offset
        # An ulp that is lost when the zero point is added leaves a tie; either side is right then.
        kept = is_exact(torch.full_like(positions, 2.0**power), positions, dtype)
        expected, text = nearest(positions, grid), f"{dtype}, {name}: not half to even"
        if above and like.zero_point is not None:  # an odd one: who rounds before it is added takes the other neighbour, always
            text += " under an odd zero point, neither of codes nor of values"
            before = ((positions - offset).round() + offset).clamp(grid[0], grid[-1])
            expected = expected if bool((kept & (codes != before)).any()) else before
        refuse(kept & (codes != expected), text, code=codes, expected=expected, position=positions)


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
        _hold_presented_encoded(subject, every[0], dtype)
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


def _hold_presented_encoded(subject: Quantizer, shape: tuple[int, int], dtype: torch.dtype) -> None:
    like, offset = power_scales(subject, shape[1], 1 / 16, rows=shape[0], dtype=dtype)
    values = _values(subject, shape, 1.0, offset).to(dtype)
    whole = subject.encode(values, like)
    for name, view, plain in presentations(values):
        two = (whole if torch.equal(plain, values) else subject.encode(plain, like)).to(torch.float64)
        for mode, grad in GRAD_MODES.items():
            with grad():
                one = subject.encode(view, like).to(torch.float64)
            refuse(one != two, f"{list(shape)} {dtype}, {name}, {mode}: another code than for an ordinary tensor", code=one, ordinary=two)
