"""What a forward writes to its inputs: it meets a copy, in which twins are still twins; the caller's batches stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor import GPTQModifier, oneshot
from compressor.data.collate import Batch, call_model, copied_batch
from compressor.errors import DatasetError
from compressor.tracing import Engine, trace

WIDTH = 8
RUNS: tuple[dict[str, Any], ...] = ({"engine": "graph"}, {"engine": "suspend"}, {"pipeline": "basic"})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + x


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x.add_(0.5)
            x = layer(x + y)
        return x


def twins() -> Batch:
    one = torch.randn(2, 5, WIDTH)
    return {"x": one, "y": one}


def views() -> Batch:
    many = torch.randn(9, 3, 6, WIDTH)
    return {"x": many[2, :, :5], "y": many[2, :, 1:]}


def apart() -> Batch:
    return {"x": torch.randn(1, 7, WIDTH), "y": torch.randn(1, 7, WIDTH)}


def two_with_one() -> list[Batch]:
    one = torch.randn(2, 5, WIDTH)
    return [{"x": one, "y": torch.randn(2, 5, WIDTH)}, {"x": one, "y": torch.randn(2, 5, WIDTH)}]


BATCHES: dict[str, Callable[[], list[Batch]]] = {
    "twins": lambda: [twins(), twins()],
    "views": lambda: [views(), views()],
    "mixed": lambda: [twins(), apart(), views(), apart()],
    "two with one": two_with_one,
}


@pytest.fixture
def model() -> Writes:
    torch.manual_seed(0)
    return Writes().eval()


def contents(batches: list[Batch]) -> list[Tensor]:
    return [tensor.clone() for batch in batches for tensor in (batch.values() if isinstance(batch, dict) else batch)]


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_forwards_that_write_to_inputs_give_what_plain_ones_give(make: Callable[[], list[Batch]], engine: Any, model: Writes) -> None:
    batches = make()
    before = contents(batches)
    with trace(model, batches, ["Layer"], engine=engine).run(batches, keep_outputs=True) as run:
        for stage in run:
            stage.calibrate()
            stage.propagate()
    assert all(map(torch.equal, contents(batches), before))
    for batch, output in zip(batches, run.outputs, strict=True):
        with torch.no_grad():
            assert torch.equal(output, call_model(model, copied_batch(batch)))


def test_a_copy_of_views_takes_no_more_than_what_they_look_at() -> None:
    copied = copied_batch(views())
    assert isinstance(copied, dict)
    assert copied["x"].untyped_storage().nbytes() == 3 * 6 * WIDTH * 4
    copied["x"][:, 1:].fill_(7.0)
    assert (copied["y"][:, :4] == 7.0).all()
    assert not (copied["y"][:, 4:] == 7.0).any()


def test_rows_far_apart_in_one_file_are_copied_alone() -> None:
    many = torch.zeros(1000, 4)
    copied = copied_batch((many[1], many[999], many[1:3], torch.zeros(0)))
    assert isinstance(copied, tuple)
    assert [one.untyped_storage().nbytes() for one in copied] == [32, 16, 32, 0]
    copied[0].fill_(1.0)
    assert copied[2][0].eq(1.0).all()
    assert not many.any()


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_run_leaves_the_callers_batches_alone(run: dict[str, Any], model: Writes) -> None:
    batches = BATCHES["mixed"]()
    before = contents(batches)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    oneshot(model, recipe=GPTQModifier(targets=["Linear"], scheme="W8A8"), dataset=loader, **run)
    assert all(map(torch.equal, contents(batches), before))


class _Marked(nn.Module):
    """Reads what a batch is beside its numbers, and keeps a list in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor, mark: Tensor, seen: list[int]) -> Tensor:
        for layer in self.layers:
            x = (
                layer(x)
                * (2 if mark.requires_grad else 1)
                * (3 if isinstance(mark, nn.Parameter) else 1)
                * (5 if hasattr(mark, "tag") else 1)
            )
            seen.append(len(seen))
        return x * len(seen)


def _tagged() -> Tensor:
    mark = torch.ones(1)
    mark.tag = 1  # type: ignore[attr-defined]
    return mark


MARKS: dict[str, Callable[[], Tensor]] = {
    "gradient": lambda: torch.ones(1, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(1), requires_grad=False),
    "attribute": _tagged,
}


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("kind", MARKS)
def test_copies_are_what_the_batch_is_and_its_lists_stay(kind: str, engine: Engine) -> None:
    model = _Marked().eval()
    batches: list[Any] = [{"x": torch.randn(1, length, 4), "mark": MARKS[kind](), "seen": []} for length in (3, 5)]
    with torch.no_grad():
        wanted = [model(**batch | {"seen": []}) for batch in batches]
    with trace(model, batches, ["Sequential"], engine=engine).run(batches, keep_outputs=True) as run:
        for stage in run:
            stage.calibrate()
            stage.propagate()
    assert all(map(torch.equal, run.outputs, wanted))
    assert [batch["seen"] for batch in batches] == [[], []]


def test_a_force_model_takes_gradients_of_its_input() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

        def forward(self, places: Tensor) -> Tensor:
            with torch.enable_grad():
                hidden = places
                for layer in self.layers:
                    hidden = layer(hidden)
                (force,) = torch.autograd.grad(hidden.pow(2).sum(), places)
            return force

    batches: list[Any] = [{"places": torch.randn(1, length, 3).requires_grad_()} for length in (2, 4)]
    model = Force().eval()
    with trace(model, batches, ["Sequential"]).run(batches, keep_outputs=True) as run:
        for stage in run:
            stage.propagate()
    assert all(torch.equal(output, model(**batch)) for output, batch in zip(run.outputs, batches, strict=True))


def test_what_cannot_be_copied_is_named() -> None:
    batches: list[Any] = [{"x": torch.randn(1, 3, 4), "mark": torch.ones(1), "seen": (number for number in ())}]
    with pytest.raises(DatasetError, match="a generator in it cannot be copied"):
        trace(_Marked().eval(), batches, ["Sequential"])
