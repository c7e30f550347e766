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
        ("checksums of torch.save", lambda: torch.serialization.set_crc32_options(False)),
        ("byte order of torch.load", lambda: torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG)),
        ("profiling executor of torch.jit", lambda: torch._C._jit_set_profiling_executor(False)),
        ("float32 precision", lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")),
    ],
)
def test_a_modifier_that_leaves_one_is_told(name: str, change: Callable[[], object]) -> None:
    read, _ = TORCH_SETTINGS[name]
    before = read()
    report = verify(setting(change), checks=["lifecycle.nothing_left"])
    assert any(name in record.summary for record in report.records if record.outcome.value == "fail")
    assert read() == before
