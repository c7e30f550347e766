"""What a step takes from something that moves on by itself is refused by name; what it only writes, or reads in place, is not."""

from __future__ import annotations

import csv
import io
import itertools
import mmap
import queue
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.errors import GuardDriftError
from compressor.training import Trainer, TrainStep, sgd


def filled_queue() -> queue.SimpleQueue[float]:
    held: queue.SimpleQueue[float] = queue.SimpleQueue()
    for _ in range(20):
        held.put(1.0)
    return held


def mapped() -> mmap.mmap:
    held = mmap.mmap(-1, 20)
    held[:] = b"1" * 20
    return held


def trainer(scale: Callable[[], float]) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"]) * scale()

    return Trainer(TrainStep(model, loss, sgd(model.parameters(), lr=0.1)), "replay")


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.rand(5, 4, generator=generator), "y": torch.randint(3, (5,), generator=generator)}


TAKES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "lines": (lambda: io.StringIO("1\n" * 20), lambda held: float(held.readline())),
    "the next line": (lambda: io.StringIO("1\n" * 20), lambda held: float(next(held))),
    "bytes": (lambda: io.BytesIO(b"1" * 20), lambda held: float(held.read(1))),
    "a map": (mapped, lambda held: float(held.read(1))),
    "a queue": (filled_queue, lambda held: held.get()),
    "a scanner": (lambda: re.compile(".").scanner("1" * 20), lambda held: float(held.match().group())),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("what", TAKES)
def test_what_moves_on_in_a_step_is_refused_by_name(what: str) -> None:
    make, take = TAKES[what]
    held = make()
    run = trainer(lambda: take(held))
    with pytest.raises(GuardDriftError, match=r"variable 'held' .*a replay would not.*with the batch"):
        run.fit(batch, 8)


def drawn() -> Iterator[float]:
    while True:
        yield 1.0


def counted() -> Iterator[float]:
    given = [0]
    while True:
        given[0] += 1
        yield 1.0


def from_a_list() -> Iterator[float]:
    yield from [1.0] * 20


class Numbers(torch.utils.data.Dataset[float]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> float:
        return 1.0


class Mine:
    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        self.given += 1
        return 1.0


GIVING: dict[str, Callable[[], Any]] = {
    "a list": lambda: iter([1.0] * 20),
    "values of a dict": lambda: iter(dict.fromkeys(range(20), 1.0).values()),
    "a zip": lambda: (one for one, _ in zip([1.0] * 20, [1.0] * 20, strict=True)),
    "a chain": lambda: itertools.chain([1.0] * 3, [1.0] * 20),
    "a round": lambda: itertools.cycle([1.0] * 3),
    "a slice": lambda: itertools.islice([1.0] * 20, 15),
    "one of two": lambda: itertools.tee([1.0] * 20)[0],
    "lines": lambda: map(len, csv.reader(iter(["a"] * 20))),
    "a generator": from_a_list,
    "a generator that counts": counted,
    "one of one's own": Mine,
    "a loader": lambda: map(len, torch.utils.data.DataLoader(Numbers(), batch_size=1)),
    "a function": lambda: iter(lambda: 1.0, 2.0),
    "finds": lambda: map(len, map(str, re.finditer("1", "1" * 20))),
    "a scanner": lambda: map(bool, iter(re.compile(".").scanner("1" * 20).match, None)),  # type: ignore[attr-defined]
}


def in_an_object(held: Any) -> Callable[[], Any]:
    place = types.SimpleNamespace(q=held)
    return lambda: place.q


PLACES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "an object": in_an_object,
    "a list": lambda held: lambda place=[held]: place[0],
    "a tuple in a dict": lambda held: lambda place={"q": (0, held)}: place["q"][1],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", GIVING)
def test_what_is_taken_from_an_iterator_that_something_holds_is_refused(what: str, place: str) -> None:
    """All give the same number at first, so that no audit would meet another step."""
    find = PLACES[place](GIVING[what]())
    run = trainer(lambda: float(next(find(), 1.0)))
    with pytest.raises(GuardDriftError, match=r"iterator \(.*(moves on in the step|does not show where it stands).*with the batch"):
        run.fit(batch, 8)


def test_what_a_model_takes_is_refused_and_what_nobody_takes_from_is_not() -> None:
    run = trainer(lambda: 1.0)
    rest = [itertools.repeat(1.0), itertools.cycle([1.0, 2.0]), iter([1.0]), counted(), filled_queue(), io.StringIO("1"), Mine()]
    run.step.model.rest = [*rest, iter(torch.utils.data.DataLoader(Numbers(), batch_size=1))]
    next(rest[1])
    run.fit(batch, 8)
    assert run.last_action in ("replay", "audit")
    taking = trainer(lambda: float(next(taking.step.model.rest)))
    taking.step.model.rest = iter([1.0] * 20)
    with pytest.raises(
        GuardDriftError, match=r"attribute 'rest' of the model: it is an iterator \(list_iterator\) and moves on in the step"
    ):
        taking.fit(batch, 8)


@pytest.mark.parametrize("what", ["lines", "a map", "a queue"])
def test_a_stream_that_an_object_holds_is_watched_too(what: str) -> None:
    make, take = TAKES[what]
    place = types.SimpleNamespace(held=make())
    with pytest.raises(GuardDriftError, match=r"held'?: .*a replay would not"):
        trainer(lambda: take(place.held)).fit(batch, 8)


def test_what_is_written_into_a_stream_or_read_in_place_is_not_taken_from_it() -> None:
    log, held, closed = io.StringIO(), mapped(), io.BytesIO()
    closed.close()

    def scale() -> float:
        log.write("a step\n")
        return float(held[:1]) + closed.closed

    run = trainer(scale)
    run.fit(batch, 8)
    assert run.last_action in ("replay", "audit") and log.getvalue()


def test_the_object_that_holds_the_trainer_may_be_what_a_loss_reads_from() -> None:
    """Its trainer counts its steps, which is another step only where the loss asks for it."""
    place = types.SimpleNamespace(scale=1.0)
    place.trainer = trainer(lambda: place.scale)
    place.trainer.fit(batch, 8)
    assert place.trainer.last_action in ("replay", "audit")
    place.trainer = trainer(lambda: float(place.trainer.num_steps // 4 + 1))
    with pytest.raises(GuardDriftError, match="'num_steps', 2"):
        place.trainer.fit(batch, 8)
