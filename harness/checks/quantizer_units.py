"""Checks of a quantizer's units and of its inputs as a whole: 11, 12, 16 and 64, and of what it reports."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.checks.catalogue import Broken, Look, NothingToCheckError, register
from harness.checks.hurtful import hurtful, shapes
from harness.checks.looking import each_weight, examine, refuse
from harness.checks.protocols import Quantized, Quantizer
from harness.checks.quantizer_codes import power_scales


@register(
    11,
    "local",
    "Changing one unit changes no other unit's codes or scale, bitwise",
    kind="quantizer",
    needs=("local",),
    caught_by=("compressed-tensors#308",),
)
def local(subject: Quantizer, look: Look) -> str:
    """Change each unit of some weights in turn."""
    shape = shapes(subject.column_multiple)[0]
    unit = subject.unit(shape)
    counts = -(-shape[0] // unit[0]), -(-shape[1] // unit[1])
    if counts[0] * counts[1] == 1:
        raise NothingToCheckError("all values share one scale")
    for dtype in subject.dtypes:
        for name in ("spread groups", "lopsided"):
            weight = hurtful(name, shape, dtype, group=unit[1])
            before = subject.quantize(weight)
            for number in range(counts[0] * counts[1]):
                _change_unit(subject, weight, before, divmod(number, counts[1]), unit)
    return f"each of {counts[0] * counts[1]} units was changed"


def _change_unit(subject: Quantizer, weight: Tensor, before: Quantized, place: tuple[int, int], unit: tuple[int, int]) -> None:
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
            raise Broken(f"the {name} of unit {int(differs.nonzero()[0])} changed with the values of unit {number}")


@register(
    12,
    "saturates",
    "Codes saturate: what lies beyond the range takes the last code, and no code is NaN",
    kind="quantizer",
    caught_by=("Model-Optimizer#1633",),
)
def saturates(subject: Quantizer, look: Look) -> str:
    """Encode values far beyond the range, and just beyond it."""
    grid = subject.code_values
    like = power_scales(subject, subject.column_multiple * 8, 0.5)
    offset = 0.0 if like.zero_point is None else float(like.zero_point.flatten()[0])
    width = like.codes.shape[1]
    for factor in (1.001, 1.1, 1.2, 2.0, 3.7, 300.0, 1e6):
        for end, sign in ((grid[-1], 1.0), (grid[0], -1.0)):
            target = float(end) + sign * abs(float(end)) * (factor - 1)
            values = torch.full((2, width), (target - offset) * 0.5, dtype=torch.float32)
            codes = subject.encode(values, like).to(torch.float64)
            refuse(~(codes == end), f"{factor:g} times the last code does not become it", code=codes)
    return f"14 values beyond the codes {float(grid[0]):g} to {float(grid[-1]):g}"


@register(
    16,
    "per_token",
    "Dynamic per-token quantization is equivariant to token permutation, bitwise",
    kind="quantizer",
    needs=("per_token",),
)
def per_token(subject: Quantizer, look: Look) -> str:
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
                    raise Broken(f"{name} in {dtype}: tokens {kept.tolist()} by themselves are quantized differently")
                count += 1
    return f"{count} permutations and selections of tokens"


@register(
    64,
    "shapes",
    "Odd, one-wide and prime shapes, and other memory layouts, in every supported dtype give the same codes twice",
    kind="quantizer",
)
def every_shape(subject: Quantizer, look: Look) -> str:
    """Quantize every shape in every dtype, also as a transposed view and as a part of a larger tensor."""
    count = 0
    for dtype in subject.dtypes:
        for shape in shapes(subject.column_multiple):
            weight = hurtful("spread groups", shape, dtype, group=max(8, subject.column_multiple))
            found = examine(subject, weight)
            larger = torch.zeros(shape[0] + 2, shape[1] + 3, dtype=dtype)
            larger[1:-1, 2:-1] = weight
            views = {"again": weight, "a transposed view": weight.t().contiguous().t(), "a part of a larger tensor": larger[1:-1, 2:-1]}
            for name, view in views.items():
                same = examine(subject, view)
                if not (torch.equal(same.codes, found.codes) and torch.equal(same.scale, found.scale)):
                    raise Broken(f"{list(shape)} {dtype}: {name} gives other codes or scales")
                count += 1
    return f"{count} shapes, dtypes and layouts"


@register(None, "reported_error", "The reported relative squared error is that of the values, to 1e-3", kind="quantizer")
def reported_error(subject: Quantizer, look: Look) -> str:
    """Compute the error of every weight in float64."""

    def examined(weight: Tensor) -> None:
        found = examine(subject, weight)
        reported = found.quantized.relative_error
        if reported is None:
            raise NothingToCheckError("the quantizer reports no error")
        energy = float(found.exact.square().sum())
        exact = float((found.values.to(torch.float64) - found.exact).square().sum()) / energy if energy else 0.0
        # In float32 the squares of the smallest and the largest numbers are none.
        if 1e-30 < energy < 1e30 and abs(reported - exact) > 1e-3 * exact:
            raise Broken(f"the reported error is {reported:.6g}, that of the values {exact:.6g}")

    return each_weight(subject, look, examined)
