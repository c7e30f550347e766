"""Round-to-nearest: every weight to the closest value of its grid, each on its own.

The division runs in float32 whatever the dtype of the weight: a bfloat16 quotient near 127 has a spacing of one half, so that codes
of 8 bits would be off by one. Shapes: R rows, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import quantize, values_as_read
from compressor.numerics.scheme import QuantizationArgs


@dataclass(frozen=True)
class RoundedWeight:
    """Codes of one weight and their relative squared error, ||W - Q||^2 / ||W||^2."""

    codes_RC: Tensor
    relative_error: float


def round_to_nearest(weight_RC: Tensor, qparams: QParams, args: QuantizationArgs) -> RoundedWeight:
    """Quantize one weight by rounding.

    Args:
        weight_RC: [R, C] float; not modified.
        qparams: scale and zero point, as they will be stored.
        args: number format.

    Returns:
        The codes and the relative error of what a loader will read.

    Raises:
        NumericsError: the weight holds NaN or infinity.
        SchemeError: the group size does not divide C.
    """
    weight_RC = weight_RC.detach()  # a Parameter needs no gradient of what is only measured
    codes_RC = nearest_codes(weight_RC, qparams, args)
    error, squares = squared_sums(weight_RC, codes_RC, qparams, args)
    return RoundedWeight(codes_RC, error / squares if squares else 0.0)


def squared_sums(weight_RC: Tensor, codes_RC: Tensor, qparams: QParams, args: QuantizationArgs) -> tuple[float, float]:
    """Measure what rounding has done to a weight, or to some of its rows.

    Args:
        weight_RC: [R, C] float; not modified.
        codes_RC: [R, C], its codes.
        qparams: scale and zero point, as they will be stored.
        args: number format.

    Returns:
        ||W - Q||^2 and ||W||^2, where Q is what a layer multiplies with that a loader makes of the codes.
    """
    largest = float(weight_RC.abs().max()) if weight_RC.numel() else 0.0
    if largest == 0:
        return 0.0, 0.0
    unit = 1.0 if 1e-15 < largest < 1e15 else largest  # beyond, the squares would leave float32

    def measured(values: Tensor) -> Tensor:
        return values.float() if unit == 1.0 else values.float() / unit

    error = measured(values_as_read(codes_RC, qparams, args, weight_RC.dtype)) - measured(weight_RC)
    return float(error.square().sum()) * unit**2, float(measured(weight_RC).square().sum()) * unit**2


def nearest_codes(weight_RC: Tensor, qparams: QParams, args: QuantizationArgs, *, checked: bool = True) -> Tensor:
    """Round every weight to its nearest code.

    Args:
        weight_RC: [R, C] float; not modified.
        qparams: scale and zero point, as they will be stored.
        args: number format.
        checked: False reads nothing on the host: NaN then becomes some code.

    Returns:
        [R, C] codes.

    Raises:
        NumericsError: the weight holds NaN or infinity.
        SchemeError: the group size does not divide C.
    """
    wide = qparams._replace(scale=qparams.scale.float())
    return quantize(weight_RC.float(), wide, args, checked=checked)
