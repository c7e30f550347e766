"""Tensors of every dtype as bits, as ordered integers and as float64, exactly.

torch computes with few of its dtypes: fp8 cannot be subtracted, fp4 not even copied, unsigned integers not compared. All of them can be
seen as bytes, and that is where equality is decided. Element order is that of the contiguous tensor.

Shapes: N elements, B bytes of an element, K parts of an element (2 for complex numbers and packed fp4, else 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import UserInputError

_SIGN_MAGNITUDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, without its sign
FAR = (1 << 63) - 1
"""More units apart than two numbers of any dtype: the distance of NaN or an infinity from whatever else."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as manifests hold it: `float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Args:
        name: as `dtype_name` gives it.

    Returns:
        The dtype.

    Raises:
        UserInputError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserInputError(f"dtype {name!r}: does not exist in torch {torch.__version__}; a newer torch may have written it")
    return dtype


def without_bytes(tensor: Tensor) -> str:
    """Return what kind of tensor it is, if it has no bytes of its own that say all it holds: `sparse_coo`; nothing for all others."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        return "quantized"
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors
        return type(tensor).__name__
    return "meta" if tensor.untyped_storage().device.type == "meta" else ""  # fake ones among them


def to_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of every element, uint8 [N, B]; a view where the tensor is contiguous."""
    flat = _flat(tensor)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _flat(tensor: Tensor) -> Tensor:
    """The elements in memory order; a single one may carry any stride, which no view as another dtype takes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat if flat.numel() > 1 else flat.as_strided((flat.numel(),), (1,))


def from_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor that has these bytes.

    Args:
        data: uint8, as many as the shape needs.
        dtype: of the tensor.
        shape: of the tensor.

    Returns:
        A tensor on the memory of `data`.
    """
    flat = data.reshape(-1)
    if flat.numel() == 0:  # a view of nothing does not know its width
        return torch.empty(shape, dtype=dtype)
    return flat.view(dtype).reshape(shape)


def differs(left: Tensor, right: Tensor) -> Tensor:
    """Say of each element whether any bit differs, bool [N]; both tensors have one dtype and shape."""
    return (to_bytes(left) != to_bytes(right)).any(dim=1)


def is_floating(dtype: torch.dtype) -> bool:
    """Say whether values of this dtype have units in the last place; packed fp4 counts as codes."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype != torch.float4_e2m1fn_x2


def widen(tensor: Tensor) -> Tensor:
    """Return the values as float64 [N, K]; exact but for integers beyond 2^53."""
    dtype = tensor.dtype
    if dtype in _PARTS:
        return _flat(tensor).view(_PARTS[dtype]).to(torch.float64).reshape(-1, 2)
    data = to_bytes(tensor)
    if dtype == torch.float4_e2m1fn_x2:
        nibbles = torch.cat([data & 0xF, data >> 4], dim=1).long()
        table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)], dtype=torch.float64, device=data.device)
        return table[nibbles]
    try:
        return tensor.detach().reshape(-1, 1).to(torch.float64)
    except (NotImplementedError, RuntimeError):  # shells without arithmetic, such as torch.int4: one byte a code
        return data.to(torch.float64)


def ordered(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return sign (bool) and magnitude (int64), each [N, K]: neighbouring floats have neighbouring magnitudes.

    Args:
        tensor: of a floating or complex dtype.

    Returns:
        Sign and magnitude; the magnitude of infinity follows that of the largest number.
    """
    part = _PARTS.get(tensor.dtype, tensor.dtype)
    width = torch.empty(0, dtype=part).element_size()
    raw = _flat(tensor).view(_SIGN_MAGNITUDE[width]).reshape(tensor.numel(), -1)
    if part == torch.float8_e8m0fnu:  # an exponent and nothing else
        return torch.zeros_like(raw, dtype=torch.bool), raw.long()
    top = 1 << (8 * width - 1)
    bits = raw.long()
    return (bits & top).bool() if width == 1 else bits < 0, bits & (top - 1)


def ulp_distance(left: Tensor, right: Tensor) -> Tensor:
    """Count the representable numbers between two tensors, int64 [N, K].

    Args:
        left: of a floating or complex dtype.
        right: of the same dtype and shape.

    Returns:
        0 for equal values, +0 and -0, and NaN against NaN; `FAR` where only one side is NaN or infinite, and one less
        where float64 numbers of unequal sign are so far apart, or farther.
    """
    sign, magnitude = ordered(left)
    other_sign, other = ordered(right)
    apart = (magnitude - other).abs()
    across = torch.minimum(magnitude, FAR - 1 - other) + other  # which no int64 could hold else
    distance = torch.where(sign == other_sign, apart, across)
    distance = torch.where(widen(left).isnan() & widen(right).isnan(), torch.zeros_like(distance), distance)
    return torch.where(misplaced(left, right), torch.full_like(distance, FAR), distance)


def misplaced(left: Tensor, right: Tensor) -> Tensor:
    """Say where NaN or an infinity on one side stands against anything else on the other, bool [N, K]."""
    one, two = widen(left), widen(right)
    same = (one == two) | (one.isnan() & two.isnan())
    return ~same & ~(one.isfinite() & two.isfinite())


def unit_of(tensor: Tensor) -> float:
    """Return one unit in the last place at the largest finite magnitude of a floating tensor; the smallest one where that is 0."""
    values = widen(tensor)
    finite = values[values.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    info = torch.finfo(_PARTS.get(tensor.dtype, tensor.dtype))
    exponent = torch.frexp(torch.tensor(max(largest, info.smallest_normal), dtype=torch.float64)).exponent
    return float(info.eps) * 2.0 ** (int(exponent) - 1)
