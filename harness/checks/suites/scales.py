"""Checks of a quantizer's scales and zero points: 1, 2, 13, 14, and what they follow from."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.examine import Examined, each_weight, examine, held_in, hold_nearest, hold_same, refuse
from harness.checks.inputs.pairs import pairwise
from harness.checks.inputs.presentations import EXPANDED, GRAD_MODES, HELD, WAYS, places, presentations
from harness.checks.oracles import RULES, e4m3_grid, units
from harness.checks.protocols import Quantizer
from harness.checks.strategies import NOT_FINITE, hurtful, large_shapes, shapes
from harness.tolerance import T1, compare, vacuous_decoys

_SCALE_ULP = 2  # a subtraction and a division, each to half a unit
TIER = T1(max_ulp=_SCALE_ULP)
# Below it 448 * 6 / largest |w|, the global scale of NVFP4, is no float32.
_LEAST_GLOBAL = 448.0 * 6.0 / torch.finfo(torch.float32).max


@register(
    1,
    "scales_positive",
    "Scales are finite and above 0, as computed and as stored, for all-zero and subnormal groups too",
    kind="quantizer",
    caught_by=("coremltools#2853", "GPTQModel#1531"),
)
def scales_positive(subject: Quantizer, context: CheckContext) -> str:
    """Look at the scales of every weight that hurts."""

    def hold(found: Examined) -> None:
        quantized = found.quantized
        for name, scale in (("scale", quantized.scale), ("global scale", quantized.global_scale)):
            if scale is None:
                continue
            kinds = {"computed": scale, "stored": scale.to(subject.stored_scale) if subject.stored_scale and name == "scale" else scale}
            for how, part in kinds.items():
                wide = part.to(torch.float64)
                refuse(~(wide.isfinite() & (wide > 0)), f"the {name} as {how} is not finite and above 0", scale=wide)

    return each_weight(subject, context, hold)


@register(
    2,
    "zero_points_in_range",
    "Zero points are integers that are codes, never what a platform casts NaN to",
    kind="quantizer",
    caught_by=("GPTQModel#2350",),
)
def zero_points_in_range(subject: Quantizer, context: CheckContext) -> str:
    """Look at the zero points of every weight that hurts."""
    if subject.quantize(_plain(subject)).zero_point is None:
        raise NothingToCheckError("this quantizer has no zero points")
    low, high = float(subject.code_values[0]), float(subject.code_values[-1])

    def hold(found: Examined) -> None:
        refuse(found.zero != found.zero.round(), "a zero point is no integer", zero_point=found.zero)
        refuse((found.zero < low) | (found.zero > high), f"a zero point is no code of {low:g} to {high:g}", zero_point=found.zero)
        # Where a group reaches only to one side of zero, the zero point is the end code: one that is clipped to it by chance is not.
        values = units(found.weight, found.unit)
        none_used = values.nan_to_num(nan=0.0).abs().amax(1) == 0
        zero = units(found.zero, found.unit)[:, 0]
        refuse(none_used & ~zero.isfinite(), "the zero point of a group of zeros is no number", zero_point=zero)

    return each_weight(subject, context, hold)


@register(
    None,
    "scale_rule",
    "Scales and zero points are what the declared rule says in float64, to 2 ulp: of the right unit, in no smaller dtype",
    kind="quantizer",
    caught_by=("compressed-tensors#308",),
)
def scale_rule(subject: Quantizer, context: CheckContext) -> str:
    """Hold the scales against a rule in float64."""
    if subject.scale_rule is None:
        raise NothingToCheckError("the scales are searched; no rule is declared")
    rule = RULES[subject.scale_rule]

    def hold(found: Examined) -> None:
        expected, zero = rule(units(found.weight, found.unit), subject.code_values)
        _hold_scales(found, expected, held_in(subject) or found.quantized.scale.dtype)
        if zero is not None:
            _hold_zero_points(found, expected, zero, subject.code_values)

    _guard(subject)
    return each_weight(subject, context, hold)


def _hold_scales(found: Examined, expected: Tensor, held: torch.dtype) -> None:
    scale = found.quantized.scale
    if found.quantized.global_scale is not None:
        if float(found.exact.abs().amax()) < _LEAST_GLOBAL:
            return
        info = torch.finfo(found.weight.dtype)
        largest = units(found.weight, found.unit).abs().nan_to_num(nan=0.0).amax(1)
        _hold_small_scales(scale.reshape(-1), torch.where(largest > info.tiny * 32, expected, 0.0), float(info.eps))
        return
    flat = scale.reshape(-1).to(held)
    usable = (expected > torch.finfo(held).tiny) & expected.isfinite()  # else any scale above 0 serves, which check 1 asks for
    if scale.numel() != expected.numel():
        raise CheckFailed(f"{scale.numel()} scales for {expected.numel()} units")
    result = compare(flat[usable], expected[usable].to(held), TIER, name="scale")
    if not result.ok:
        raise CheckFailed(f"scales are not what their units ask for: {result.summary}")


def _hold_small_scales(actual: Tensor, expected: Tensor, eps: float) -> None:
    """Scales that were rounded to fp8: half a step of that format, and what was lost before it in the dtype of the weight."""
    grid = e4m3_grid()
    above = torch.searchsorted(grid, expected.clamp(grid[0], grid[-1])).clamp(1, len(grid) - 1)
    limit = (grid[above] - grid[above - 1]) / 2 + 4 * eps * expected
    wide = actual.to(torch.float64)
    # What rounds to zero is raised to something above it.
    wrong = (expected > float(grid[grid > 0][0])) & ((wide - expected).abs() > limit)
    refuse(wrong, "a scale is not the one of its unit", scale=wide, expected=expected)


def _hold_zero_points(found: Examined, scale: Tensor, expected: Tensor, grid: Tensor) -> None:
    """A zero point is the rounded one, or its neighbour where the real one lies close to the middle."""
    actual = units(found.zero, found.unit)[:, 0]
    # Scales that underflow are rounded coarsely, or raised to a floor; any code serves as zero point there.
    live = expected.isfinite() & (scale > torch.finfo(found.quantized.scale.dtype).tiny)
    slack = 0.5 + 4 * float(torch.finfo(found.weight.dtype).eps) * (expected.abs() + float(grid[-1] - grid[0]))
    wanted = expected.clamp(grid[0], grid[-1])
    refuse(live & ((actual - wanted).abs() > slack), "a zero point is not the one of its unit", zero_point=actual, expected=wanted)


def _guard(subject: Quantizer) -> None:
    """The limit must not let zeros, halves or the neighbour's scales through."""
    scale = examine(subject, _plain(subject)).quantized.scale.reshape(-1)
    passed = vacuous_decoys(scale, TIER) if len(scale) > 1 else ()
    if passed:
        raise CheckFailed(f"the limit of {_SCALE_ULP} ulp measures nothing: {', '.join(passed)} would pass")


def _plain(subject: Quantizer) -> Tensor:
    group = subject.unit((8, 64 * subject.column_multiple))[1]
    return hurtful("spread groups", shapes(subject.column_multiple)[0], subject.dtypes[0], group=group)


@register(
    13,
    "refuses_nonfinite",
    "NaN or infinity in a weight or activation raises an error with a message, and changes nothing",
    kind="quantizer",
    needs=("refuses_nonfinite",),
)
def refuses_nonfinite(subject: Quantizer, context: CheckContext) -> str:
    """Plant NaN in every kind of place of weights of several sizes, infinities, and all of them in every presentation, in every dtype."""
    count = 0
    ordinary, *others = shapes(subject.column_multiple)
    for dtype in subject.dtypes:
        for shape in (ordinary, *others, *large_shapes(subject.column_multiple)):
            clean = hurtful("bell", shape, dtype)
            for value in NOT_FINITE if shape == ordinary else NOT_FINITE[:1]:
                for place in places(shape) if shape == ordinary or shape not in others else [(-1, -1)]:
                    weight = clean.clone()
                    weight[place] = value
                    _must_refuse(subject, weight, f"{value} at {list(place)} of a weight {list(shape)} in {dtype}")
                    count += 1
        count += _refuses_presented(subject, hurtful("bell", ordinary, dtype))
    return f"{count} planted values were refused"


def _refuses_presented(subject: Quantizer, weight: Tensor) -> int:
    weight[0, 0] = weight[-1, -1] = float("nan")
    count = 0
    for mode, grad in GRAD_MODES.items():
        for name, view, _ in presentations(weight):
            with grad():
                _must_refuse(subject, view, f"NaN in {name} of a weight {list(weight.shape)} in {weight.dtype}, {mode}")
            count += 1
    return count


def _must_refuse(subject: Quantizer, weight: Tensor, what: str) -> None:
    before = weight.detach().clone()
    try:
        subject.quantize(weight)
    except Exception as error:  # of which class is the subject's affair; that there is a message is ours
        if not str(error).strip():
            raise CheckFailed(f"{what}: {type(error).__name__} came without a message") from error
        if not torch.equal(before.nan_to_num(nan=7.0), weight.nan_to_num(nan=7.0)):
            raise CheckFailed(f"{what}: it was refused, but the weight has changed") from error
        return
    raise CheckFailed(f"{what}: it was quantized as if nothing had happened")


@register(
    14,
    "scale_as_stored",
    "Dequantizing with the scale as stored, in its storage dtype, equals what calibration used, bitwise",
    kind="quantizer",
)
def scale_as_stored(subject: Quantizer, context: CheckContext) -> str:
    """Send the scale through its storage dtype."""

    def hold(found: Examined) -> None:
        scale = found.quantized.scale
        stored = scale.to(subject.stored_scale or found.weight.dtype).to(scale.dtype)
        wide, kept = scale.to(torch.float64), stored.to(torch.float64)
        refuse(wide != kept, "calibration used a scale that its storage dtype does not hold", used=wide, stored=kept)

    return each_weight(subject, context, hold)


@register(
    None,
    "search_pays",
    "Searched scales have no more error than those of the full range, in all, and no group has ten times as much",
    kind="quantizer",
    needs=("searches_scales",),
)
def search_pays(subject: Quantizer, context: CheckContext) -> str:
    """Add up |dq - w|^2.4 of the values with outliers in them, which a search is made for."""
    plain = subject.unsearched()  # type: ignore[attr-defined]  # what the tag promises
    ratios = []
    for dtype in subject.dtypes:
        for name in ("bell", "lopsided", "outliers", "spread groups", "correlated"):
            weight = hurtful("correlated columns" if name == "correlated" else name, shapes(subject.column_multiple)[0], dtype)
            own, other = (_errors(one, weight) for one in (subject, plain))
            ratios.append(float(own.sum() / other.sum()) if float(other.sum()) else 1.0)
            if ratios[-1] > 1 + 1e-3:
                raise CheckFailed(f"{name} in {dtype}: {ratios[-1]:.3f} times the error of the full range")
            refuse(own > 10 * other + 1e-12, f"{name} in {dtype}: a group has ten times the error", error=own, full_range=other)
    if min(ratios) > 0.999:
        raise CheckFailed("the search never changes anything")
    return f"{min(ratios):.3f} to {max(ratios):.3f} of the error of the full range"


def _errors(subject: Quantizer, weight: Tensor) -> Tensor:
    found = examine(subject, weight)
    errors = (found.values.to(torch.float64) - found.exact).abs().pow(2.4)
    return units(errors, found.unit).nan_to_num(nan=0.0).sum(1)


_VARIED = (
    *("spread groups", "bell", "dead groups", "positive", "negative", "lopsided", "outliers", "ties", "correlated columns"),
    *("small", "tiny", "large"),  # a floor or a ceiling of scales that not every layout meets
)


@register(
    None,
    "conditions_meet",
    "Any two of shape, dtype, layout, kind of tensor, gradients and values may meet: the nearest codes, as of ordinary tensors; no NaN",
    kind="quantizer",
)
def conditions_meet(subject: Quantizer, context: CheckContext) -> str:
    """Quantize a weight for each pair of conditions."""
    multiple = subject.column_multiple
    square = (16, 16) if multiple == 1 else (2 * multiple, 2 * multiple)
    sizes = [*shapes(multiple), square, *large_shapes(multiple)]
    cases = pairwise(
        {
            "laid": tuple(WAYS),
            "held": tuple(HELD),
            "shape": sizes,
            "values": (*_VARIED, "zeros"),
            "dtype": subject.dtypes,
            "grad": tuple(GRAD_MODES),
        },
        {"laid": tuple(EXPANDED), "values": ("zeros",), "shape": [size for size in sizes if 1 in size]},
    )
    for one in cases:
        made = hurtful(one["values"], one["shape"], one["dtype"], group=max(8, multiple))
        weight = HELD[one["held"]](WAYS[one["laid"]](made))
        what = f"{one['values']} {list(weight.shape)} {one['dtype']}, {one['laid']}, {one['held']}, {one['grad']}"
        plain = weight.detach().clone(memory_format=torch.contiguous_format)
        found = examine(subject, plain)
        try:
            hold_nearest(subject.code_values, found)
        except CheckFailed as broken:
            raise CheckFailed(f"{what}: {broken}") from broken
        with GRAD_MODES[one["grad"]]():
            hold_same(subject.quantize(weight), found.quantized, what)
            if "refuses_nonfinite" in subject.tags:
                made[(0, 0) if one["laid"] in EXPANDED else (-1, -1)] = float("nan")
                _must_refuse(subject, HELD[one["held"]](WAYS[one["laid"]](made)), f"NaN among {what}")
    return f"{len(cases)} weights"
