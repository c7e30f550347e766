"""What a step takes from something that moves on by itself is refused by name; what it only writes, or reads in place, is not."""

from __future__ import annotations

import io
import mmap
import queue
import re
from collections.abc import Callable
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


def test_what_is_written_into_a_stream_or_read_in_place_is_not_taken_from_it() -> None:
    log, held, closed = io.StringIO(), mapped(), io.BytesIO()
    closed.close()

    def scale() -> float:
        log.write("a step\n")
        return float(held[:1]) + closed.closed

    run = trainer(scale)
    run.fit(batch, 8)
    assert run.last_action in ("replay", "audit") and log.getvalue()
