"""In which precision products are summed: float32 by torch's settings, bfloat16 and float16 on a CPU that is slow at them as float32;
and by which other settings of the process torch chooses how it computes.

For float32 torch has one setting for each backend and kind of operator;
`torch.get_float32_matmul_precision()` raises once somebody has set one of them by itself (`torch.backends.cuda.matmul.fp32_precision`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_PLACES = (("generic", "all"), *((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("all", "matmul", "conv", "rnn")))
_OLDER_NAMES = MappingProxyType({"ieee": "highest", "tf32": "high", "bf16": "medium"})


def float32_precisions() -> tuple[str, ...]:
    """Return what holds in each place, for `set_float32_precisions`."""
    return tuple(map(_at, _PLACES))


def set_float32_precisions(precisions: tuple[str, ...]) -> None:
    """Put back what `float32_precisions` gave. Changes settings of the process."""
    of_place = dict(zip(_PLACES, precisions, strict=True))
    # The older settings, over two places each, have memories of their own, and can be read only where the places agree with those.
    on_cuda, on_cpu = (of_place[backend, "matmul"] for backend in ("cuda", "mkldnn"))
    torch.set_float32_matmul_precision(_OLDER_NAMES["bf16" if (on_cuda, on_cpu) == ("tf32", "bf16") else on_cuda])
    torch._C._set_cudnn_allow_tf32("tf32" in (of_place["cuda", "conv"], of_place["cuda", "rnn"]))
    for place, precision in of_place.items():
        for value in ("none", precision):  # none: a place goes on following what is set for all
            if _at(place) != precision:
                torch._C._set_fp32_precision_setter(*place, value)


def matmul_precision(device: torch.device) -> str:
    """Return the precision of products on a device, by the names of `torch.set_float32_matmul_precision`."""
    return _OLDER_NAMES[_at(("cuda" if device.type == "cuda" else "mkldnn", "matmul"))]


def _at(place: tuple[str, str]) -> str:
    """Where nothing is set, all digits count; torch.set_float32_matmul_precision("highest") says so."""
    precision: str = torch._C._get_fp32_precision_getter(*place)
    return "ieee" if precision == "none" else precision


# Which of its implementations torch may choose from, and how they add up: all of it decides about the last bits.
#
# By the functions of torch's C++ side, a few of which come and go with its versions: asked for with each call of a module, the properties
# in front of them would take ten times as long.

_C, _matmul = torch._C, torch.backends.cuda.matmul
_BY_NAME = {
    "flash attention": ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    "memory-efficient attention": ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    "attention of plain products": ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    "attention of cuDNN": ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    "attention of a backend's own": ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    "FlashAttention 3": ("_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    "order of attention kernels": ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    "half precision in attention of plain products": (
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    "float16 accumulation": ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    "reduced precision of float16 sums on the CPU": (
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
    ),
    "library of products": ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    "library of decompositions": ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    "torch.backends.cudnn.enabled": ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    "torch.backends.cudnn.benchmark": ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    "torch.backends.cudnn.deterministic": ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    "kernels of depthwise convolutions": ("_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel"),
    "torch.backends.mkldnn.enabled": ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    "torch.backends.mkldnn.deterministic": ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    "torch.backends.nnpack": ("_get_nnpack_enabled", "_set_nnpack_enabled"),
}


def _cudnn_benchmark_limit() -> int | None:
    """Without CUDA torch has no function for it, and a plain attribute in its place."""
    limit: int | None = torch.backends.cudnn.benchmark_limit
    return limit


KERNEL_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = MappingProxyType(
    {
        **{name: (getattr(_C, ask), getattr(_C, put)) for name, (ask, put) in _BY_NAME.items() if hasattr(_C, ask) and hasattr(_C, put)},
        "reduced precision of float16 sums": (
            _C._get_cublas_allow_fp16_reduced_precision_reduction,
            partial(setattr, _matmul, "allow_fp16_reduced_precision_reduction"),
        ),
        "reduced precision of bfloat16 sums": (
            _C._get_cublas_allow_bf16_reduced_precision_reduction,
            partial(setattr, _matmul, "allow_bf16_reduced_precision_reduction"),
        ),
        "torch.backends.cudnn.benchmark_limit": (_cudnn_benchmark_limit, partial(setattr, torch.backends.cudnn, "benchmark_limit")),
        "fast path of attention": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    }
)
"""How to ask for each and how to set it, by the names that messages have for them; float32 apart."""


# bfloat16 and float16 on a CPU that has no instructions for them.
#
# There, on most people's machines, torch multiplies number by number: the forward of a small Llama takes six times as long as in float32.

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # what linear layers, matmul, einsum and their gradients come down to
MAX_WIDENED = 1 << 24  # numbers: the head of a large vocabulary would otherwise stand in memory once more, twice as wide
_open: list[torch.library.Library] = []


@cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """Name the dtypes whose products torch computes without the help of oneDNN on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()  # another build, of which nothing is known
    has = {torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported, torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported}
    return frozenset(dtype for dtype, supported in has.items() if not supported())


@contextmanager
def widened_products() -> Iterator[None]:
    """Compute products in half precision on the CPU as float32 while open, where this CPU is slow at them; elsewhere change nothing.

    Sums are in float32 and rounded once, as torch's own are; only their order differs. The kernels are exchanged below autograd and every
    mode, for the whole process, so that all ways to run a model (eager, traced, replayed) still get the same bits. May be nested.
    """
    if _open or not slow_dtypes():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    _open.append(library)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="[^$]*previously registered kernel", category=UserWarning)
            for name in _PRODUCTS:
                library.impl(name, _widened(name), "CPU", with_keyset=True)
                library.impl(f"{name}.out", _widened_into(name), "CPU", with_keyset=True)
        yield
    finally:
        _open.remove(library)
        library._destroy()


def _widened(name: str) -> Callable[..., Tensor]:
    """Return a product's own kernel, given float32 where the dtype is a slow one."""
    kernel, slow = torch.library.get_kernel(f"aten::{name}", "CPU"), slow_dtypes()

    def product(keys: Any, *factors: Tensor, **scales: float) -> Tensor:
        right = factors[-1]
        if right.dtype not in slow or any(factor.dtype != right.dtype for factor in factors):  # mixed ones torch refuses
            result: Tensor = kernel.call_boxed(keys, *factors, **scales)
            return result
        if name == "mm" and right.numel() > MAX_WIDENED and right.shape[1] > 1:
            parts = right.split(max(1, MAX_WIDENED // right.shape[0]), dim=1)
            return torch.cat([product(keys, *factors[:-1], part) for part in parts], dim=1)
        result = kernel.call_boxed(keys, *(factor.float() for factor in factors), **scales)
        return result.to(right.dtype)

    return product


def _widened_into(name: str) -> Callable[..., Tensor]:
    """Return the form of a product that writes into a given tensor."""
    kernel, slow, product = torch.library.get_kernel(f"aten::{name}.out", "CPU"), slow_dtypes(), _widened(name)

    def into(keys: Any, *factors: Tensor, out: Tensor, **scales: float) -> Tensor:
        if any(tensor.dtype != out.dtype for tensor in factors) or out.dtype not in slow:
            kernel.call_boxed(keys, *factors, out=out, **scales)
            return out
        result = product(keys, *factors, **scales)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return into
