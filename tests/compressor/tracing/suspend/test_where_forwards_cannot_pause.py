"""Transforms of torch.func, threads and TorchScript: glue may use them, targets inside them are refused in true words."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor import GPTQModifier, oneshot
from compressor.data.collate import call_model, copied_batch
from compressor.errors import CalibrationError, TracingError
from compressor.tracing import trace
from compressor.tracing.suspend import standstill

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

WIDTH = 8
BATCHES: list[Any] = [(torch.randn(2, 5, WIDTH),), (torch.randn(1, 7, WIDTH),)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + x


class Model(nn.Module):
    def __init__(self, way: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.several = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.script = torch.jit.script(nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh()))
        self.way = way
        if way is among_layers:
            self.layers.insert(1, self.script)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def in_turn(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def ensemble(model: Model, x: Tensor) -> Tensor:
    stacked: Any = torch.func.stack_module_state(list(model.several))

    def one(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model.several[0], (parameters, buffers), (x,))
        return found

    return in_turn(model, x + torch.vmap(one, (0, 0, None))(*stacked, x).mean(0))


def scripted(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = model.script(layer(x))
    return x


def mapped(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = torch.vmap(layer)(x)
    return x


def threaded(model: Model, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda layer: layer(x), model.layers), torch.zeros(()))


def among_layers(model: Model, x: Tensor) -> Tensor:
    return in_turn(model, x)


@pytest.mark.parametrize("engine", ["auto", "graph", "suspend"])
@pytest.mark.parametrize("way", [ensemble, scripted, among_layers], ids=lambda way: way.__name__)
def test_glue_gives_what_it_gives_alone(way: Any, engine: Any) -> None:
    model = Model(way).eval()
    with trace(model, BATCHES, None if way is among_layers else ["Layer"], engine=engine).run(BATCHES, keep_outputs=True) as run:
        for stage in run:
            stage.propagate()
    for batch, output in zip(BATCHES, run.outputs, strict=True):
        with torch.no_grad():
            assert torch.equal(output, call_model(model, copied_batch(batch)))


@pytest.mark.parametrize(
    ("way", "engine", "words"),
    [
        (mapped, "auto", r"^layers.0: is called inside a transform of torch.func"),
        (mapped, "suspend", r"^layers.0: is called inside a transform of torch.func"),
        (mapped, "graph", r"layers.0 is a sequential target and is called inside leaf call_mapped"),
        (threaded, "auto", r"^layers.\d: is called from a thread of its own"),
        (threaded, "suspend", r"^layers.\d: is called from a thread of its own"),
    ],
)
def test_targets_are_refused(way: Any, engine: Any, words: str) -> None:
    with pytest.raises(TracingError, match=words):
        trace(Model(way).eval(), BATCHES, ["Layer"], engine=engine)


@pytest.mark.parametrize("engine", ["auto", "graph", "suspend"])
def test_a_model_in_torchscript_is_refused(engine: Any) -> None:
    with pytest.raises(TracingError, match=r"^the model: is TorchScript, where nothing can be followed; give the model as it was before"):
        trace(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH))), BATCHES, engine=engine)


def test_statistics_of_a_mapped_layer_are_refused() -> None:
    loader: Any = torch.utils.data.DataLoader(BATCHES, batch_size=None)  # type: ignore[arg-type]
    recipe = GPTQModifier(targets=["re:layers.*lin"], scheme="W8A8")
    with pytest.raises(CalibrationError, match=r"layers.0.lin: is called inside a transform of torch.func"):
        oneshot(Model(mapped), recipe=recipe, dataset=loader, pipeline="basic")


class Remembers(Layer):
    last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x + Remembers.last)
        Remembers.last = float(x.mean())
        return x


def test_what_both_engines_refuse_advises_neither() -> None:
    model = Model(in_turn).eval()
    model.layers = nn.ModuleList(Remembers() for _ in range(3))
    with pytest.raises(TracingError, match=r"the graph engine refused: ") as caught:
        trace(model, BATCHES, ["Remembers"])
    assert 'engine="suspend"' not in str(caught.value)


def test_a_foreign_message_becomes_one_line() -> None:
    def complains(model: Model, x: Tensor) -> Tensor:
        raise ValueError("so\n  many\n" + "words " * 200)

    with pytest.raises(TracingError, match="the model itself raises ValueError: so many words") as caught:
        trace(Model(complains).eval(), BATCHES, ["Layer"])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


LOCK, TICKETS = threading.Lock(), queue.Queue[int]()
TICKETS.put(1)


def with_lock(model: Model, x: Tensor) -> Tensor:
    with LOCK:
        return in_turn(model, x)


def with_ticket(model: Model, x: Tensor) -> Tensor:
    ticket = TICKETS.get()
    try:
        return in_turn(model, x)
    finally:
        TICKETS.put(ticket)


@pytest.mark.parametrize("way", [with_lock, with_ticket])
def test_a_forward_that_waits_for_one_that_is_paused_is_an_error(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of waiting for ever; nothing is held any more afterwards."""
    monkeypatch.setattr(standstill, "PATIENCE_SECONDS", 0.6)
    first = way.__code__.co_firstlineno + 1
    with pytest.raises(TracingError, match=rf"test_where_forwards_cannot_pause.py:{first}: batch 1 waits there .*pipeline=\"basic\""):
        trace(Model(way).eval(), BATCHES, engine="suspend")
    assert LOCK.acquire(blocking=False) and TICKETS.qsize() == 1
    LOCK.release()
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL
