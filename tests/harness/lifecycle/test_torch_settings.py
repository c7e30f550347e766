"""Every setting of torch that the table names can be read and set, is told when a modifier leaves it changed, and is put back."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compressor import Event, Modifier, State
from harness import verify
from harness.lifecycle.driving.torch_settings import TORCH_SETTINGS
from harness.lifecycle.process_state import settings_kept

# What each becomes that is no flag; None where it needs a package that may not be here.
OTHERS: dict[str, Any] = {
    "torch.backends.quantized.engine": "onednn",
    "dtype of autocast on the CPU": torch.float16,
    "dtype of autocast on CUDA": torch.bfloat16,
    "sharing between processes": "file_system",
    "what torch.load takes for safe": [io.StringIO],
    "mapping of torch.load": 1,
    "byte order of torch.load": torch.serialization.LoadEndianness.BIG,
    "order of attention kernels": [0, 1, 2, 3, 4],
    "library of products": None,
    "library of decompositions": None,
    "reduced precision of float16 sums on the CPU": None,
    "kernels of depthwise convolutions": "cudnn",
    "torch.backends.cudnn.benchmark_limit": 3,
    "operators without a gradient": "nothing",
    "fusion strategy of torch.jit": [("STATIC", 1)],
    "debugging of torch.distributed": torch.distributed.DebugLevel.DETAIL,
    "reduced precision of float16 sums": (False, False),
    "reduced precision of bfloat16 sums": (False, False),
    "torch.backends.opt_einsum.enabled": None,
    "torch.backends.opt_einsum.strategy": None,
}


def other(name: str, value: Any) -> Any:
    if name == "float32 precision":
        return (*value[:2], "tf32", *value[3:])
    return OTHERS.get(name, not value)


@pytest.mark.parametrize("name", [name for name in TORCH_SETTINGS if OTHERS.get(name, "") is not None])
def test_a_setting_is_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame", raising=False)  # another test may have compiled
    read, write = TORCH_SETTINGS[name]
    before = read()
    with settings_kept():
        write(other(name, before))
        assert read() != before
    assert read() == before


# What torch can set and tell, and is no setting that a modifier could leave behind; what has a table of its own stands first.
ELSEWHERE = {
    *("default_dtype", "default_tensor_type", "deterministic_algorithms", "grad_enabled", "warnAlways", "check_sparse_tensor_invariants"),
    *("cublas_allow_tf32", "cudnn_allow_tf32", "float32_matmul_precision", "onednn_allow_tf32"),  # float32 precision, by older names
    *("deterministic_fill_uninitialized_memory", "qengine", "dispatch_mode", "torch_function_state", "thread_name"),
    *("graph_exec_group", "tracing_state", "value_trace", "tensor_metadata", "graph_executor_optimize"),  # of torch.jit
    *("miopen_immediate", "rocm_fa_preferred_backend", "sm_carveout_experimental", "dtensor_allow_implicit_replication"),
    *("backcompat_broadcast_warn", "backcompat_keepdim_warn", "only_lift_cpu_tensors", "meta_in_tls_dispatch_include"),
    *("grad_layout_enforcement_enabled", "override_stale_capture_stream", "warn_on_accumulate_grad_stream_mismatch"),
}


def test_the_table_names_all_that_torch_can_set_and_tell() -> None:
    """A new version of torch brings new ones: each belongs into the table, or among those that are looked after elsewhere."""
    asks = {repr(ask) for ask, _ in TORCH_SETTINGS.values()}
    missing = []
    for name in sorted(name.removeprefix("_set_") for name in dir(torch._C) if name.startswith("_set_")):
        tellers = [f"_get_{name}", f"_is_{name}", f"_{name}", f"_get_{name.replace('sdp_use_', '')}_sdp_enabled"]
        found = [repr(getattr(torch._C, teller)) for teller in tellers if hasattr(torch._C, teller)]
        if found and not asks.intersection(found) and name not in ELSEWHERE:
            missing.append(name)
    assert not missing


def setting(change: Callable[[], object]) -> type[Modifier]:
    class LeavesIt(Modifier):
        def on_initialize(self, state: State) -> bool:
            return True

        def on_calibration_start(self, state: State, event: Event) -> None:
            change()

    return LeavesIt


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("what torch.load takes for safe", lambda: torch.serialization.add_safe_globals([io.StringIO])),
        ("folder of torch.hub", lambda: torch.hub.set_dir("elsewhere")),
        ("checksums of torch.save", lambda: torch.serialization.set_crc32_options(False)),
        ("byte order of torch.load", lambda: torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG)),
        ("profiling executor of torch.jit", lambda: torch._C._jit_set_profiling_executor(False)),
        ("fusion strategy of torch.jit", lambda: torch._C._jit_set_fusion_strategy([("STATIC", 1)])),
        ("debugging of torch.distributed", lambda: torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)),
        ("half precision in attention of plain products", lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)),
        ("float32 precision", lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")),
    ],
)
def test_a_modifier_that_leaves_one_is_told(name: str, change: Callable[[], object]) -> None:
    read, _ = TORCH_SETTINGS[name]
    before = read()
    report = verify(setting(change), checks=["lifecycle.nothing_left"])
    assert any(name in record.summary for record in report.records if record.outcome.value == "fail")
    assert read() == before
