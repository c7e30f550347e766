"""Settings of torch that hold for the whole process, by the names that a finding has for them: how to read each, and how to set it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributions import Distribution
from torch.sparse import check_sparse_tensor_invariants
from torch.utils import deterministic

from compressor.numerics.precision import float32_precisions, set_float32_precisions


def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how to read an attribute, and how to set it."""
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _set_sparse_checks(enabled: bool) -> None:
    (check_sparse_tensor_invariants.enable if enabled else check_sparse_tensor_invariants.disable)()


def _safe_globals() -> list[Any]:
    return sorted((one for one in torch.serialization.get_safe_globals() if not _is_of_torch(one)), key=str)


def _set_safe_globals(allowed: list[Any]) -> None:
    of_torch = [one for one in torch.serialization.get_safe_globals() if _is_of_torch(one)]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*of_torch, *allowed])


def _is_of_torch(allowed: Any) -> bool:
    """Parts of torch allow their own classes when they are first imported."""
    return getattr(allowed, "__module__", "").split(".")[0] == "torch"


def _checks_of_distributions() -> bool:
    """Whether they are on; once something was compiled they are off, which is torch's doing and nobody's setting."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return Distribution._validate_args or (dynamo is not None and dynamo.TorchPatcher.patch.cache_info().currsize > 0)


_cuda, _future, _processes, _files = torch.backends.cuda, torch.__future__, torch.multiprocessing, torch.serialization
TORCH_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = MappingProxyType(
    {
        "float32 precision": (float32_precisions, set_float32_precisions),
        "reduced precision of float16 sums": attribute(_cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        "reduced precision of bfloat16 sums": attribute(_cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        "float16 accumulation": attribute(_cuda.matmul, "allow_fp16_accumulation"),
        "torch.backends.cudnn.enabled": attribute(torch.backends.cudnn, "enabled"),
        "torch.backends.cudnn.benchmark": attribute(torch.backends.cudnn, "benchmark"),
        "torch.backends.cudnn.deterministic": attribute(torch.backends.cudnn, "deterministic"),
        "torch.backends.mkldnn.enabled": attribute(torch.backends.mkldnn, "enabled"),
        "torch.backends.mkldnn.deterministic": attribute(torch.backends.mkldnn, "deterministic"),
        "torch.backends.nnpack": (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
        "torch.backends.opt_einsum.enabled": attribute(torch.backends.opt_einsum, "enabled"),
        "torch.backends.opt_einsum.strategy": attribute(torch.backends.opt_einsum, "strategy"),
        "torch.backends.quantized.engine": attribute(torch.backends.quantized, "engine"),
        "fast path of attention": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
        "flash attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
        "memory-efficient attention": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
        "attention of plain products": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
        "attention of cuDNN": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
        "dtype of autocast on the CPU": (lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype)),
        "dtype of autocast on CUDA": (lambda: torch.get_autocast_dtype("cuda"), lambda dtype: torch.set_autocast_dtype("cuda", dtype)),
        "cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "filling of new memory": attribute(deterministic, "fill_uninitialized_memory"),
        "warning each time": (torch.is_warn_always_enabled, torch.set_warn_always),
        "checks of distributions": (_checks_of_distributions, Distribution.set_default_validate_args),
        "checks of sparse tensors": (check_sparse_tensor_invariants.is_enabled, _set_sparse_checks),
        "overwriting of converted parameters": (
            _future.get_overwrite_module_params_on_conversion,
            _future.set_overwrite_module_params_on_conversion,
        ),
        "swapping of converted parameters": (_future.get_swap_module_params_on_conversion, _future.set_swap_module_params_on_conversion),
        "sharing between processes": (_processes.get_sharing_strategy, _processes.set_sharing_strategy),
        "what torch.load takes for safe": (_safe_globals, _set_safe_globals),
        "mapping of torch.load": (_files.get_default_mmap_options, _files.set_default_mmap_options),
    }
)
