"""The same operator in float64, on the same values: what a kernel and its variant are both measured against.

The distance to the truth is given in units in the last place of the result's own dtype, so 0.5 is a perfectly rounded result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from compressor.training.capture.operators import Op
from harness.replay.kernels.exchange import overlap, results_of, targets, tensor_arguments, written
from harness.tolerance.bits import widen
from harness.tolerance.measures import absolute_error

_WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
MARGIN = 0.02
"""Errors that differ by less, as a share, count as alike."""
_EXACT = frozenset({torch.float64, torch.complex128})


@dataclass(frozen=True)
class Truth:
    """How far kernel and variant are from a run in float64.

    Attributes:
        original_max: largest error of the original.
        variant_max: largest error of the variant.
        original_rms: root of the mean square of the original's errors.
        variant_rms: that of the variant.
        original_ulp: largest error of the original, in units in the last place.
        variant_ulp: that of the variant.
    """

    original_max: float
    variant_max: float
    original_rms: float
    variant_rms: float
    original_ulp: float
    variant_ulp: float

    @property
    def nearness(self) -> str:
        """`nearer`, `farther`, `as near` (within MARGIN), or `mixed` where the largest and the mean error disagree."""
        signs = {_sign(self.variant_max, self.original_max), _sign(self.variant_rms, self.original_rms)} - {0}
        return {frozenset(): "as near", frozenset({-1}): "nearer", frozenset({1}): "farther"}.get(frozenset(signs), "mixed")

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self) | {"nearness": self.nearness}


def _sign(variant: float, original: float) -> int:
    return 1 if variant > original * (1 + MARGIN) else -1 if variant * (1 + MARGIN) < original else 0


def true_results(op: Op, draws: bool) -> list[Tensor] | str:
    """Run an operator in float64 on copies of its arguments as they are now.

    Args:
        op: the operator, before it has run.
        draws: it draws random numbers.

    Returns:
        What it gives, in the order of `left_by`; or the reason why there is no such run.
    """
    reason = _hindrance(op, draws)
    if reason is not None:
        return reason
    copies: dict[int, Tensor] = {}

    def widened(leaf: object) -> object:
        if isinstance(leaf, torch.dtype):
            return _wide(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.to(_wide(leaf.dtype), copy=True)
        return copies[id(leaf)]

    args, kwargs = tree_map(widened, op.args), tree_map(widened, op.kwargs)
    try:
        results = results_of(op.func._op(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return f"the op has no float64 run: {' '.join(str(error).split())[:120]}"
    if len(results) != len(op.outs):
        return f"in float64 the op returns {len(results)} tensors instead of {len(op.outs)}"
    found = [results[position] for position, _ in targets(op)] + [copies[id(tensor)] for tensor in written(op)]
    for tensor, own in zip(found, left_by(op), strict=True):
        if tensor.shape != own.shape or (own.dtype.is_floating_point and tensor.dtype != torch.float64):
            return f"in float64 the op returns {tensor.dtype} {list(tensor.shape)}"
    return found


def _hindrance(op: Op, draws: bool) -> str | None:
    if draws:
        return "the op draws random numbers"
    floats = [tensor for tensor in left_by(op) if tensor.dtype.is_floating_point or tensor.dtype.is_complex]
    if not floats:
        return "the op gives no floating numbers"
    if all(tensor.dtype in _EXACT for tensor in floats):
        return "the op computes in float64 itself"
    given, writes = tensor_arguments(op), written(op)
    if any(one is not other and overlap(one, other) for one in writes for other in given):
        return "arguments of the op overlap"
    return None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else _WIDE.get(dtype, dtype)


def left_by(op: Op) -> list[Tensor]:
    """List what an operator leaves: its new results, then the arguments that it writes."""
    return [*(out for _, out in targets(op)), *written(op)]


def against_truth(original: Tensor, variant: Tensor, truth: Tensor) -> Truth | None:
    """Measure two results against the true one.

    Args:
        original: what the operator gave.
        variant: what the variant gave.
        truth: float64, of the same shape.

    Returns:
        The distances; None where there is nothing to measure.
    """
    if not original.numel() or not original.dtype.is_floating_point:
        return None
    unit = _units(truth, original.dtype)
    errors = [absolute_error(tensor.to(torch.float64), truth).reshape(-1) for tensor in (original, variant)]
    maxima = [float(error.max()) for error in errors]
    means = [_rms(error) for error in errors]
    ulps = [float((error / unit).max()) for error in errors]
    return Truth(maxima[0], maxima[1], means[0], means[1], ulps[0], ulps[1])


def _rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def _units(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of `dtype` at each true value."""
    info = torch.finfo(dtype)
    values = widen(truth).reshape(-1).abs()
    finite = torch.where(values.isfinite(), values, torch.full_like(values, info.max)).clamp(min=info.smallest_normal)
    return torch.ldexp(torch.full_like(finite, info.eps), torch.frexp(finite).exponent - 1)


def names_of(op: Op) -> Sequence[str]:
    """Name what an operator leaves, in the order of `left_by`: `result`, `result 1`, or the name of a written argument."""
    fresh = [("result" if len(op.outs) == 1 else f"result {position}") for position, _ in targets(op)]
    return [*fresh, *(_argument_name(op, tensor) for tensor in written(op))]


def _argument_name(op: Op, tensor: Tensor) -> str:
    for position, argument in enumerate(op.func._schema.arguments):
        value = op.args[position] if position < len(op.args) else op.kwargs.get(argument.name)
        if value is tensor:
            return str(argument.name)
        if isinstance(value, list | tuple):
            number = next((k for k, item in enumerate(value) if item is tensor), None)
            if number is not None:
                return f"{argument.name}[{number}]"
    return "argument"
