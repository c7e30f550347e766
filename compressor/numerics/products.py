"""Codes times codes, summed exactly: what a quantized layer computes where it does not multiply dequantized values.

Products of int8 codes are summed in int32 by `torch._int_mm`, or in float64 where that has no kernel for the shape or the device; both sums
are exact, so both give the same bits. Products of fp8 codes are summed by `torch._scaled_mm` on GPUs that have it, in float32 as the
hardware orders it, and in float64 elsewhere: an fp8 product has 8 significant bits and a unit of 2^-18, so a float64 sum of up to 2^17 of
them is exact. Scales (and zero points) come after the sum, once per run of columns that shares them:

    y = sum over runs of  scale_x * scale_w * (sum (x - zero_x) (w - zero_w))

Shapes: N tokens, R rows of the weight, C columns, K runs of columns.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
from torch import Tensor

from compressor.errors import SchemeError
from compressor.numerics.qparams import QParams
from compressor.numerics.scheme import QuantizationArgs

ProductPath = Literal["int_mm", "int_exact", "scaled_mm", "fp8_exact"]

# 2^31 divided by the largest product of two int8 codes, (-128)^2.
_MAX_INT32_COLUMNS = (1 << 17) - 1
_CUDA_INT_MULTIPLE, _CUDA_INT_MIN_ROWS, _CUDA_FP8_MULTIPLE = 8, 17, 16
_FP8_CAPABILITY = (8, 9)


def product_path(x_dtype: torch.dtype, device: torch.device, num_tokens: int, num_columns: int, num_rows: int) -> ProductPath:
    """Say which product runs for codes of a shape on a device.

    Args:
        x_dtype: of the codes: torch.int8 or torch.float8_e4m3fn.
        device: where the codes are.
        num_tokens: N.
        num_columns: columns that one product sums over.
        num_rows: R.

    Returns:
        "int_mm" or "scaled_mm" where torch has a kernel for it, else "int_exact" or "fp8_exact".
    """
    is_cuda = device.type == "cuda"
    if x_dtype == torch.int8:
        fits_cuda = num_tokens >= _CUDA_INT_MIN_ROWS and num_columns % _CUDA_INT_MULTIPLE == 0 and num_rows % _CUDA_INT_MULTIPLE == 0
        # torch 2.13 on CPU gives garbage for a single column (and more than one row), so that one column counts as no kernel.
        runs = fits_cuda if is_cuda else device.type == "cpu" and cpu_int_mm_is_exact()
        has_kernel = num_tokens > 0 and 1 < num_columns <= _MAX_INT32_COLUMNS and runs
        return "int_mm" if has_kernel else "int_exact"
    fits = is_cuda and num_tokens > 0 and num_columns % _CUDA_FP8_MULTIPLE == 0 and num_rows % _CUDA_FP8_MULTIPLE == 0
    return "scaled_mm" if fits and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY else "fp8_exact"


@functools.cache
def cpu_int_mm_is_exact() -> bool:
    """Whether this CPU's kernel sums exactly: without VNNI instructions oneDNN saturates sums of two products at 16 bits, silently."""
    codes = (torch.arange(64 * 32) * 37 % 256 - 128).to(torch.int8)
    codes[:64] = 127
    x_NC, weight_RC = codes.reshape(64, 32)[:33], codes.reshape(64, 32)[31:]
    return torch.equal(torch._int_mm(x_NC.contiguous(), weight_RC.contiguous().t()).double(), x_NC.double() @ weight_RC.double().t())


def code_product(x_NC: Tensor, weight_RC: Tensor, path: ProductPath) -> Tensor:
    """Multiply codes with codes and sum over the columns.

    Args:
        x_NC: [N, C] int8 or float8_e4m3fn.
        weight_RC: [R, C], same dtype.
        path: as `product_path` gives it.

    Returns:
        [N, R], int32 (int64 beyond 131071 columns) or float32.
    """
    if path == "int_mm":
        return torch._int_mm(x_NC.contiguous(), weight_RC.contiguous().t())
    if path == "scaled_mm":
        one = torch.ones((), dtype=torch.float32, device=x_NC.device)
        return torch._scaled_mm(
            x_NC.contiguous(), weight_RC.contiguous().t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False
        )
    product = x_NC.double() @ weight_RC.double().t()
    if path == "fp8_exact":
        return product.float()
    return product.to(torch.int32 if x_NC.shape[1] <= _MAX_INT32_COLUMNS else torch.int64)


def scaled_product(
    x: Tensor, x_qparams: QParams, x_args: QuantizationArgs, weight_RC: Tensor, weight_qparams: QParams, weight_args: QuantizationArgs
) -> Tensor:
    """Multiply quantized inputs with a quantized weight: exact sums of codes, then the scales.

    Args:
        x: codes [..., C], int8 or float8_e4m3fn.
        x_qparams: of x, as the strategy shapes them.
        x_args: format of x.
        weight_RC: codes [R, C], same dtype.
        weight_qparams: of the weight.
        weight_args: format of the weight.

    Returns:
        [..., R] float32.

    Raises:
        SchemeError: x and weight are of different kinds of codes, or a scale stands above others (NVFP4).
    """
    if x.dtype != weight_RC.dtype or x_args.has_global_scale or weight_args.has_global_scale:
        raise SchemeError(
            f"product of codes: {x.dtype} ({x_args.strategy}) times {weight_RC.dtype} ({weight_args.strategy}) has none; dequantize first"
        )
    num_columns = x.shape[-1]
    x_NC = x.reshape(-1, num_columns)
    width = run_width(num_columns, x_args, weight_args)
    path = product_path(x.dtype, x.device, len(x_NC), width, len(weight_RC))
    x_spread = x_qparams.map(lambda part: _spread_tokens(part, x, x_args, num_columns // width))
    w_spread = weight_qparams.map(lambda part: _spread_rows(part, len(weight_RC), num_columns // width, width, weight_args))
    total = torch.zeros(len(x_NC), len(weight_RC), dtype=torch.float32, device=x.device)
    for k in range(num_columns // width):
        columns = slice(k * width, (k + 1) * width)
        x_run, w_run = _run(x_spread, k), _run(w_spread, k)
        product = code_product(x_NC[:, columns], weight_RC[:, columns], path)
        product = _without_zero_points(product, x_NC[:, columns], x_run.zero_point, weight_RC[:, columns], w_run.zero_point)
        total += product.float() * (x_run.scale.float() * w_run.scale.float().t())
    return total.reshape(*x.shape[:-1], len(weight_RC))


def run_width(num_columns: int, x_args: QuantizationArgs, weight_args: QuantizationArgs) -> int:
    """Return how many columns share all their scales: what one product sums over.

    Args:
        num_columns: C.
        x_args: format of the input.
        weight_args: format of the weight.

    Returns:
        C where nothing is grouped; else the largest width that fits groups and blocks alike.
    """
    widths = [args.group_size for args in (x_args, weight_args) if args.is_grouped and args.group_size]
    if weight_args.block_structure is not None:
        widths.append(weight_args.block_structure[1])
    return math.gcd(num_columns, *widths)


def _spread_tokens(part: Tensor, x: Tensor, args: QuantizationArgs, num_runs: int) -> Tensor:
    """Scales (or zero points) of x as [N, K]."""
    if args.is_grouped:
        return part.reshape(-1, part.shape[-1]).repeat_interleave(num_runs // part.shape[-1], 1)
    return part.expand(*x.shape[:-1], 1).reshape(-1, 1).expand(-1, num_runs)


def _spread_rows(part: Tensor, num_rows: int, num_runs: int, width: int, args: QuantizationArgs) -> Tensor:
    """Scales (or zero points) of the weight as [R, K]; a last block may be cut short on either side."""
    if args.block_structure is not None:
        part = part.repeat_interleave(args.block_structure[0], 0)[:num_rows]
        return part.repeat_interleave(args.block_structure[1] // width, 1)[:, :num_runs]
    part = part.reshape(-1, part.shape[-1]).expand(num_rows, -1)
    return part.repeat_interleave(num_runs // part.shape[1], 1)


def _run(spread: QParams, index: int) -> QParams:
    return spread.map(lambda part: part[:, index : index + 1])


def _without_zero_points(product: Tensor, x_NC: Tensor, x_zero: Tensor | None, weight_RC: Tensor, w_zero: Tensor | None) -> Tensor:
    """sum (x - zx)(w - zw) from sum x w, in integers: the sum of x w - zx sum w - zw sum x + C zx zw."""
    if x_zero is None and w_zero is None:
        return product
    product = product.to(torch.int64)
    zx = torch.zeros(1, 1, dtype=torch.int64, device=product.device) if x_zero is None else x_zero.to(torch.int64)
    zw = torch.zeros(1, 1, dtype=torch.int64, device=product.device) if w_zero is None else w_zero.to(torch.int64).t()
    product -= zx * weight_RC.sum(1, dtype=torch.int64)
    product -= zw * x_NC.sum(1, dtype=torch.int64, keepdim=True)
    return product + x_NC.shape[1] * zx * zw
