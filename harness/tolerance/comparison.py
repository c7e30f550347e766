"""Compare one tensor with what was expected, under a tier. Never raises for a bad tensor: a Comparison says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.errors import UserInputError
from harness.tolerance.bits import differs, dtype_name, is_floating, misplaced, ordered, ulp_distance, unit_of, widen, without_bytes
from harness.tolerance.measures import Distance, absolute_error, index_of, mean_kl, measure
from harness.tolerance.tiers import T0, T1, T2, T3, T4, Tier


@dataclass(frozen=True)
class Comparison:
    """What one comparison found.

    Attributes:
        tensor: name of the tensor.
        tier: what was asked of it, as text.
        ok: whether the tier holds.
        summary: the decisive fact in one line.
        distance: every measure; None where dtype or shape differ.
        evidence: further numbers of the tier.
    """

    tensor: str
    tier: str
    ok: bool
    summary: str
    distance: Distance | None
    evidence: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; infinite numbers are floats."""
        found = self.distance
        numbers = {} if found is None else {**vars(found), "share": found.share}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in numbers.items()}
        return {
            "tensor": self.tensor,
            "tier": self.tier,
            "ok": self.ok,
            "summary": self.summary,
            **listed,
            "evidence": dict(self.evidence),
        }


@dataclass(frozen=True)
class _Finding:
    ok: bool
    summary: str
    evidence: Mapping[str, Any]


def compare(
    actual: Tensor, expected: Tensor, tier: Tier | None = None, *, name: str = "value", context: Mapping[str, Tensor] | None = None
) -> Comparison:
    """Compare one tensor with what was expected.

    Args:
        actual: what came out.
        expected: what should have.
        tier: how equal they must be; T0, bitwise, by default.
        name: of the tensor, for the report.
        context: tensors beside `expected`, by name; T2 reads the values before rounding from it.

    Returns:
        What was found.

    Raises:
        UserInputError: the tier cannot be applied to this kind of tensor, or names a tensor that is not in the context; a tensor is
            sparse, nested, quantized by torch, or without values.
    """
    kind = without_bytes(actual) or without_bytes(expected)
    if kind:
        raise UserInputError(f"{name}: a {kind} tensor has no plain bytes to compare; give its parts as dense tensors")
    asked = tier if tier is not None else T0()
    wrong = _form(actual, expected)
    if wrong:
        return Comparison(name, str(asked), False, wrong, None, {})
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    distance = measure(actual, expected)
    odd = misplaced(actual, expected).any(dim=1)
    if distance.num_changed == 0:
        finding = _Finding(True, "bitwise equal", {})
    elif odd.any() and not isinstance(asked, T0):
        where = list(index_of(int(odd.int().argmax()), tuple(expected.shape)))
        finding = _Finding(False, f"NaN or infinity against another value at {where}; {_changed(distance)}", {})
    else:
        finding = _RULES[type(asked)](asked, actual, expected, distance, context or {})
    return Comparison(name, str(asked), finding.ok, finding.summary, distance, finding.evidence)


def _form(actual: Tensor, expected: Tensor) -> str:
    if actual.dtype != expected.dtype:
        return f"dtype {dtype_name(actual.dtype)} where {dtype_name(expected.dtype)} was expected"
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} where {list(expected.shape)} was expected"
    return ""


def _changed(distance: Distance) -> str:
    return f"{distance.num_changed:,} of {distance.num_elements:,} differ, the first at {list(distance.first_index or ())}"


def _bitwise(tier: Tier, actual: Tensor, expected: Tensor, distance: Distance, context: Mapping[str, Tensor]) -> _Finding:
    by = f"by at most {distance.max_abs:.6g}" if distance.max_abs else "all of them in the sign of 0 or the bits of NaN only"
    return _Finding(False, f"{_changed(distance)}, {by}", {})


def _ulp(tier: Tier, actual: Tensor, expected: Tensor, distance: Distance, context: Mapping[str, Tensor]) -> _Finding:
    assert isinstance(tier, T1)
    if not is_floating(expected.dtype):
        return _Finding(False, f"{_changed(distance)}; integers have no ulp and must be equal", {})
    apart = ulp_distance(actual, expected)
    if tier.at == "tensor" and expected.dtype != torch.float8_e8m0fnu:
        units = absolute_error(actual, expected) / unit_of(expected)
        worst, position = float(units.max()), int(units.amax(dim=1).argmax())
    else:
        worst, position = float(apart.max()), int(apart.amax(dim=1).argmax())
    where = list(index_of(position, tuple(expected.shape)))
    text = f"{worst:.4g} ulp apart at {where}, where {tier.max_ulp} are allowed; {_changed(distance)}"
    return _Finding(worst <= tier.max_ulp, text, {"ulp_of_tier": worst})


def _ties(tier: Tier, actual: Tensor, expected: Tensor, distance: Distance, context: Mapping[str, Tensor]) -> _Finding:
    assert isinstance(tier, T2)
    before_N, eps = _before_rounding(tier, expected, context)
    changed = differs(actual, expected)
    one, two = widen(actual)[:, 0], widen(expected)[:, 0]
    is_tie = (before_N - (one + two) / 2).abs() < 4 * eps * before_N.abs()
    excused = changed & is_tie & (_steps(actual, expected) == 1)
    bad = changed & ~excused
    share = distance.share
    evidence = {"ties_moved": int(excused.sum()), "not_excused": int(bad.sum()), "share": share}
    if bad.any():
        index = list(index_of(int(bad.int().argmax()), tuple(expected.shape)))
        text = f"{int(bad.sum()):,} of {distance.num_elements:,} codes moved away from any tie, the first at {index}"
        return _Finding(False, text, evidence)
    text = f"{int(excused.sum()):,} of {distance.num_elements:,} codes moved by one step, all at ties"
    return _Finding(share <= tier.max_share, f"{text}; at most a share of {tier.max_share:g} may", evidence)


def _steps(actual: Tensor, expected: Tensor) -> Tensor:
    """How many codes lie between the two, [N]: of integers, of the numbers of one byte, or of those that occur in wider floats."""
    one_N, two_N = widen(actual)[:, 0], widen(expected)[:, 0]
    if not is_floating(expected.dtype):
        return (one_N - two_N).abs()
    if expected.dtype.itemsize > 1:
        grid = torch.cat([one_N, two_N]).unique()
        is_whole = bool((grid == grid.round()).all())
        return (one_N - two_N).abs() if is_whole else (torch.searchsorted(grid, one_N) - torch.searchsorted(grid, two_N)).abs()
    (sign, one), (other_sign, two) = ordered(actual), ordered(expected)
    return torch.where(sign == other_sign, (one - two).abs(), one + two)[:, 0]


def _before_rounding(tier: T2, codes: Tensor, context: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """The values that were rounded, float64 [N], and the eps of the dtype in which they were computed."""
    if widen(codes).shape[1] != 1:
        raise UserInputError(f"{tier}: {dtype_name(codes.dtype)} holds two values an element; give unpacked codes, one for each value")
    missing = [name for name in (tier.values, tier.scale, tier.zero_point) if name and name not in context]
    if missing:
        raise UserInputError(
            f"{tier}: there is no tensor {missing[0]!r} beside the codes; store it in the same golden, or name another one"
        )
    values = context[tier.values]
    if values.shape != codes.shape:
        raise UserInputError(
            f"{tier}: {tier.values!r} has shape {list(values.shape)} where the codes have {list(codes.shape)}; "
            "give unpacked codes, one for each value"
        )
    if not is_floating(values.dtype) or values.dtype.is_complex:
        raise UserInputError(f"{tier}: {tier.values!r} is {dtype_name(values.dtype)}, and ties lie between real values; store those")
    wide = widen(values).reshape(values.shape)
    if tier.scale:
        wide = wide / _spread(context[tier.scale], values, tier.scale)
    if tier.zero_point:
        wide = wide + _spread(context[tier.zero_point], values, tier.zero_point)
    return wide.reshape(-1), float(torch.finfo(values.dtype).eps)


def _spread(part: Tensor, values: Tensor, name: str) -> Tensor:
    """Bring a scale or a zero point to the shape of the values: by broadcasting, or a column of groups for each last dimension."""
    wide = widen(part).reshape(part.shape)
    if values.ndim and part.ndim == values.ndim and part.shape[-1] > 1 and values.shape[-1] % part.shape[-1] == 0:
        wide = wide.repeat_interleave(values.shape[-1] // part.shape[-1], dim=-1)
    try:
        return wide.expand(values.shape)
    except RuntimeError as error:
        raise UserInputError(
            f"T2: {name!r} of shape {list(part.shape)} does not fit values of {list(values.shape)}; store it so"
        ) from error


def _functional(tier: Tier, actual: Tensor, expected: Tensor, distance: Distance, context: Mapping[str, Tensor]) -> _Finding:
    assert isinstance(tier, T3)
    facts: list[tuple[bool, str]] = []
    if tier.min_sqnr_db is not None:
        facts.append((distance.sqnr_db >= tier.min_sqnr_db, f"SQNR {distance.sqnr_db:.4g} dB (at least {tier.min_sqnr_db:g})"))
    if tier.max_relative_error is not None:
        error = distance.relative_error
        facts.append((error <= tier.max_relative_error, f"relative error {error:.4g} (at most {tier.max_relative_error:g})"))
    if tier.max_kl is not None:
        kl = mean_kl(actual, expected)
        facts.append((kl <= tier.max_kl, f"KL {kl:.4g} nats (at most {tier.max_kl:g})"))
    if tier.max_loss_ratio is not None:
        ratio = 1.0 if distance.max_abs == 0 else _loss_ratio(actual, expected)  # 0 and -0: other bits, the same loss
        facts.append((ratio <= tier.max_loss_ratio, f"loss ratio {ratio:.6g} (at most {tier.max_loss_ratio:g}, either way)"))
    shown = [text for ok, text in facts if not ok] or [text for _, text in facts]
    return _Finding(all(ok for ok, _ in facts), "; ".join(shown), {})


def _loss_ratio(actual: Tensor, expected: Tensor) -> float:
    """The larger of mean(actual) / mean(expected) and its inverse, of the worse part; infinite where a mean is not above zero."""
    one_K, two_K = widen(actual).mean(dim=0), widen(expected).mean(dim=0)
    if not ((one_K > 0) & (two_K > 0) & one_K.isfinite() & two_K.isfinite()).all():
        return math.inf
    return float(torch.maximum(one_K / two_K, two_K / one_K).max())


def _statistical(tier: Tier, actual: Tensor, expected: Tensor, distance: Distance, context: Mapping[str, Tensor]) -> _Finding:
    from harness.validation.behaviour.bootstrap import mcnemar, percentile_interval, power_of, resample_sums

    assert isinstance(tier, T4)
    difference_NK = (widen(actual) - widen(expected)).numpy()
    if len(difference_NK) < 2 or not np.isfinite(difference_NK).all():
        return _Finding(False, f"{len(difference_NK)} pairs, and T4 needs 2 or more, all finite", {})
    means = resample_sums(difference_NK, tier.num_resamples, tier.seed) / len(difference_NK)
    pairs = zip(difference_NK.T, means.T, strict=True)
    parts = [percentile_interval(float(own.mean()), drawn, tier.confidence, len(own)) for own, drawn in pairs]
    interval = max(parts, key=lambda part: max(-part.low, part.high))  # of a complex tensor the part that is farther off
    power = power_of(interval.standard_error, tier.margin, tier.confidence)
    evidence: dict[str, Any] = {**interval.to_dict(), **power.to_dict()}
    text = f"mean difference {interval.estimate:+.4g} [{interval.low:+.4g}, {interval.high:+.4g}], margin {tier.margin:g} either way"
    text += f"; power {power.probability:.0%}"
    if expected.dtype == torch.bool:
        evidence["mcnemar_p"] = mcnemar(int((difference_NK > 0).sum()), int((difference_NK < 0).sum()))
        text += f"; McNemar p = {evidence['mcnemar_p']:.3g}"
    return _Finding(-tier.margin <= interval.low and interval.high <= tier.margin, text, evidence)


_RULES: Mapping[type[Tier], Callable[[Tier, Tensor, Tensor, Distance, Mapping[str, Tensor]], _Finding]] = {
    T0: _bitwise,
    T1: _ulp,
    T2: _ties,
    T3: _functional,
    T4: _statistical,
}
