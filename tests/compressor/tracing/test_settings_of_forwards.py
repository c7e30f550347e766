"""Settings of torch that a forward exchanges around its layers: each sample keeps its own, and the process finds its own again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.tracing import Engine, trace
from compressor.tracing.graph.nested_values import Modes

WIDTH = 4


@contextmanager
def exchanged(ask: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = ask()
    put(value)
    try:
        yield
    finally:
        put(before)


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "default dtype": lambda: exchanged(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "mkldnn": lambda: exchanged(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "attention kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "fast path": lambda: exchanged(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    "deterministic": lambda: exchanged(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    "precision": lambda: exchanged(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "cached parametrizations": parametrize.cached,
}


class Model(nn.Module):
    """Its glue makes numbers of the default dtype, within the setting for long batches only."""

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.setting = setting

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] < 3:
            return self.run_layers(x)
        with self.setting():
            return self.run_layers(x)

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (torch.ones(1) / 3).to(x.dtype) + torch.is_inference_mode_enabled()
        return x


def settings() -> tuple[Any, ...]:
    return (*Modes.current(), torch.is_inference_mode_enabled())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["auto", "suspend"])
@pytest.mark.parametrize("is_left", [False, True], ids=["to its end", "left at the second layer"])
def test_each_sample_has_its_own_settings_and_the_process_keeps_its_own(way: str, engine: Engine, is_left: bool) -> None:
    torch.manual_seed(0)
    model = Model(WAYS[way]).eval()
    batches: list[Batch] = [{"x": torch.randn(rows, WIDTH)} for rows in (2, 3, 4, 1)]
    before = settings()
    with torch.no_grad():
        plain = [call_model(model, batch) for batch in batches]
    with trace(model, batches, ["Linear"], engine=engine).run(batches, keep_outputs=True) as run:
        for stage in run:
            assert settings() == before, "between two passes"
            if is_left and stage.index == 1:
                break
            stage.calibrate()
            stage.propagate()
    assert settings() == before
    if not is_left:
        assert all(torch.equal(got, want) for got, want in zip(run.outputs, plain, strict=True))


class Parametrized(Model):
    """Computes its weights anew in every call, or once in a forward; a layer may be called twice."""

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]], times: int) -> None:
        super().__init__(setting)
        self.times = times
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", nn.Tanh())

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in [one for one in self.layers for _ in range(self.times)]:
            x = layer(x)
        return x


@contextmanager
def cached_twice() -> Iterator[None]:
    with parametrize.cached(), parametrize.cached():
        yield


@pytest.mark.parametrize("setting", [parametrize.cached, cached_twice, nullcontext])
def test_a_parametrization_that_is_cached_is_computed_anew_when_its_weight_is_compressed(setting: Any) -> None:
    batches: list[Batch] = [{"x": torch.randn(rows, WIDTH)} for rows in (3, 4, 1)]
    for engine, times in (("graph", 1), ("suspend", 1), ("suspend", 2)):
        torch.manual_seed(0)
        model = Parametrized(setting, times).eval()
        with trace(model, batches, ["re:layers[.][0-9]$"], engine=engine).run(batches, keep_outputs=True) as run:
            for stage in run:
                layer: Any = stage.module
                layer.parametrizations.weight.original.data.mul_(0.5)
                stage.propagate()
        with torch.no_grad():
            expected = [call_model(model, batch) for batch in batches]
        assert all(torch.equal(got, want) for got, want in zip(run.outputs, expected, strict=True)), (engine, times)


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_a_cache_of_parametrizations_around_the_run_is_refused(engine: Engine) -> None:
    model, batches = Parametrized(nullcontext, 1).eval(), [{"x": torch.randn(3, WIDTH)}]
    with parametrize.cached(), pytest.raises(TracingError, match=r"weight.original: forward makes something of it once and keeps it"):
        trace(model, batches, ["re:layers[.][0-9]$"], engine=engine)


class Adds(TorchFunctionMode):
    """Adds a number of one sample to what linear layers give."""

    def __init__(self, number: Tensor) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made + self.number if func is nn.functional.linear else made


class InMode(Model):
    def forward(self, x: Tensor) -> Tensor:
        with Adds(torch.relu(x.max() - 1)):
            return self.run_layers(x)


def test_each_sample_has_its_own_modes() -> None:
    model, batches = InMode(nullcontext).eval(), [{"x": torch.full((2, WIDTH), size)} for size in (0.5, 0.7, 5.0)]
    with trace(model, batches, ["Linear"]).run(batches, keep_outputs=True) as run:
        for stage in run:
            assert not torch.overrides._get_current_function_mode_stack()
            stage.propagate()
    with torch.no_grad():
        assert all(torch.equal(got, call_model(model, batch)) for got, batch in zip(run.outputs, batches, strict=True))
    with pytest.raises(TracingError, match=r"a Adds \(a mode of torch\) is entered around the call of a module"):
        trace(model, batches, ["Linear"], engine="graph")


class Replaces(nn.Module):
    """Deletes its buffer and registers another."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before: Any = self.kept
        del self.kept
        self.register_buffer("kept", before + x.mean(0))
        return self.lin(x) + self.kept


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_a_buffer_that_is_deleted_and_made_anew_is_the_samples_own(engine: Engine) -> None:
    model, batches = nn.Sequential(Replaces(), Replaces()).eval(), [(torch.full((2, WIDTH), size),) for size in (0.5, 0.7, 5.0)]
    with trace(model, batches, ["Replaces"], engine=engine).run(batches, keep_outputs=True) as run:
        for stage in run:
            stage.propagate()
    for got, batch in zip(run.outputs, batches, strict=True):
        with torch.no_grad():
            assert torch.equal(got, model(*batch))
        for layer in model:
            layer.kept = torch.zeros(WIDTH)
