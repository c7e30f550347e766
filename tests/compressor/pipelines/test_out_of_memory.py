"""When memory runs out, the error names stage, work, module sizes and remedies; whatever else goes wrong stays what it is."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from pydantic import PrivateAttr
from torch import nn

from compressor.data import CalibrationData, load_dataset_source
from compressor.errors import CalibrationError, OutOfMemoryError
from compressor.lifecycle import CalibrationNeed, Event, Modifier, Session, State
from compressor.pipelines import SequentialSettings, run_pipeline
from compressor.pipelines.memory import memory_explained
from compressor.progress import SilentProgress
from tests import tiny

CPU_WORDS = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 123456 bytes."
FAILURES: dict[str, Exception] = {
    "host": RuntimeError(CPU_WORDS),
    "python": MemoryError(),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1 GiB"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


class Hungry(Modifier):
    """Fails where it is told to, with the error that it is given."""

    calibration: ClassVar[CalibrationNeed] = "sequential"
    where: str = ""
    _error: Any = PrivateAttr(default=None)

    def on_initialize(self, state: State) -> bool:
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        for index in range(3):
            linear = state.model.get_submodule(f"model.layers.{index}.mlp.up_proj")
            self.register_hook(linear, lambda module, args, index=index: self._look(f"hook {index}"), "forward_pre")

    def _look(self, where: str) -> None:
        if where == self.where:
            raise self._error

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        self._look("compress" if "model.layers.1" in event.modules else "elsewhere")

    def on_calibration_end(self, state: State, event: Event) -> None:
        self._look("end")


def tokens() -> CalibrationData:
    generator = torch.Generator().manual_seed(0)
    return load_dataset_source([torch.randint(1, 64, (6,), generator=generator) for _ in range(3)], batch_size=1)


def llama() -> Any:
    return tiny.llama(hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=24, num_key_value_heads=1)


def run(where: str, error: Exception, pipeline: str = "sequential") -> None:
    modifier = Hungry(where=where)
    modifier._error = copy.copy(error)
    with Session(State(llama()), [modifier]) as session:
        session.initialize()
        settings = SequentialSettings(passes="two") if pipeline == "sequential" else None
        run_pipeline(pipeline, session, tokens() if pipeline != "data_free" else None, progress=SilentProgress(), settings=settings)
        session.finalize()


@pytest.mark.parametrize("kind", FAILURES)
def test_a_stage_that_runs_out_while_it_is_calibrated_is_named(kind: str) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        run("hook 1", FAILURES[kind])
    message = str(caught.value)
    assert message.startswith("model.layers.1: memory ran out while it was calibrated (")
    for part in (
        "MB are free on cpu",
        "model.layers.1.mlp.",
        "24x16",
        "batch_size=1",
        'sequential_targets=["Linear"]',
        "offload_dir",
        "compressor plan",
    ):
        assert part in message
    assert isinstance(caught.value, MemoryError) and type(caught.value.__cause__) is type(FAILURES[kind])


def test_the_size_that_was_asked_for_is_repeated() -> None:
    for kind, words in (("host", "you tried to allocate 123456 bytes"), ("cuda", "Tried to allocate 20.00 MiB"), ("python", "MemoryError")):
        with pytest.raises(OutOfMemoryError, match=words):
            run("hook 0", FAILURES[kind])


@pytest.mark.parametrize(("where", "pipeline"), [("compress", "sequential"), ("hook 2", "basic")])
def test_compression_and_whole_forwards_are_named_too(where: str, pipeline: str) -> None:
    expected = {
        "compress": r"model\.layers\.1: memory ran out while it was compressed .*scale_search",
        "hook 2": "the model: memory ran out while",
    }
    with pytest.raises(OutOfMemoryError, match=expected[where]):
        run(where, FAILURES["host"], pipeline)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), CalibrationError("x: no memory of it; wait"), KeyError("memory")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        run("hook 1", error)
    assert not isinstance(caught.value, MemoryError)


def test_a_model_without_tensors_and_modules_that_are_gone_do_not_hide_the_error() -> None:
    with (
        pytest.raises(OutOfMemoryError, match="its modules hold no tensors"),
        memory_explained(nn.ReLU(), "s", "traced", ["", "gone.by.now"]),
    ):
        raise MemoryError


@pytest.mark.parametrize("work", ["traced", "calibrated", "compressed", "propagated"])
def test_every_kind_of_work_has_remedies(work: Any) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"while it was {work} .*take smaller"), memory_explained(llama(), "s", work, ["lm_head"]):
        raise MemoryError
