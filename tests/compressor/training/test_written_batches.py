"""What a step puts into its batch is refused by name: a caller would find it there after an eager step, and not after a replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.errors import BindError, EscapedTensorError, GuardDriftError, ReplayError
from compressor.training import Snapshot, Trainer, TrainStep, adamw, sgd

MODES = ("capture", "replay")


def classify(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def trainer(loss_fn: Any, mode: Any, **settings: Any) -> Trainer:
    torch.manual_seed(7)
    model = nn.Linear(8, 4)
    return Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2), **settings), mode, audit_every=0)


def logits(model: nn.Module, batch: Any) -> None:
    batch["logits"] = model(batch["x"]).detach()


def nested(model: nn.Module, batch: Any) -> None:
    batch["more"][0]["kept"] = [batch["x"] * 2]


def in_a_list(model: nn.Module, batch: Any) -> None:
    batch["more"].append(batch["x"] + 1)


def replaced(model: nn.Module, batch: Any) -> None:
    batch["x"] = batch["x"] * 1.0


def attribute(model: nn.Module, batch: Any) -> None:
    batch["x"].logits = model(batch["x"]).detach()


def number(model: nn.Module, batch: Any) -> None:
    batch["seen"] = True


def renamed(model: nn.Module, batch: Any) -> None:
    batch["again"] = batch["x"]


def note(model: nn.Module, batch: Any) -> None:
    batch["y"].note = "targets"


PUT: dict[Callable[[nn.Module, Any], None], tuple[type[Exception], str]] = {
    logits: (EscapedTensorError, r"batch\['logits'\]: the step puts a tensor there that op \d+ \(forward"),
    nested: (EscapedTensorError, r"batch\['more'\]\[0\]\['kept'\]"),
    in_a_list: (EscapedTensorError, r"batch\['more'\]\[1\]"),
    replaced: (EscapedTensorError, r"batch\['x'\]"),
    attribute: (EscapedTensorError, r"batch\['x'\]\['logits'\]"),
    number: (GuardDriftError, r"batch\['seen'\]: the step puts a bool there"),
    renamed: (GuardDriftError, r"batch\['again'\]: the step puts a Tensor there"),
    note: (GuardDriftError, r"batch\['y'\]\['note'\]: the step puts a str there"),
}


@pytest.mark.parametrize("put", PUT)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_step_puts_into_its_batch_is_refused_by_name(batches: Any, mode: Any, put: Any, accumulate: int) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        put(model, batch)
        return classify(model, batch)

    run = trainer(loss_fn, mode, accumulate=accumulate)
    made = [[{**batches(n), "more": [{"z": torch.ones(1)}]} for _ in range(accumulate)] for n in range(3)]
    given = [batch if accumulate > 1 else batch[0] for batch in made]
    for batch in given[:2]:
        run.train_step(batch)
    before = Snapshot.take(run.step)
    error, match = PUT[put]
    with pytest.raises(error, match=match.replace("batch", r"batch(\[\d\])?")):
        run.train_step(given[2])
    assert before.differences(Snapshot.take(run.step)) == [] and sorted(made[2][0]) == ["more", "x", "y"]


TAKEN: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a key": (lambda batch: batch.pop("hard", None), True),
    "a key of a dict inside": (lambda batch: batch["more"][0].clear(), True),
    "a dict, and a key of it": (lambda batch: batch.pop("targets", {}).pop("z", None), True),
    "from a list": (lambda batch: batch["more"].pop(), False),
    "the order of a list": (lambda batch: batch["weights"].reverse(), False),
    "the order of keys": (lambda batch: batch.update(x=batch.pop("x")), False),
    "a number once more": (lambda batch: batch["weights"].append(batch["weights"][0]), False),
}


@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_that_come_again_are_as_an_eager_step_leaves_them(batches: Any, mode: Any, how: str, accumulate: int) -> None:
    take, is_repeated = TAKEN[how]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        take(batch)
        return classify(model, batch) * (2.0 if "hard" in batch else 3.0)

    def run(mode: Any) -> tuple[list[float], list[Any]]:
        made = [
            {**batches(n), "hard": 1, "targets": {"z": 1}, "more": [{"z": 1, "t": torch.ones(1)}], "weights": [1, 2]}
            for n in range(4 * accumulate)
        ]
        given = [made[n * accumulate :][:accumulate] if accumulate > 1 else made[n] for n in range(4)]
        return trainer(loss_fn, mode, accumulate=accumulate).fit(lambda number: given[number % 4], 16), made

    if not is_repeated:
        with pytest.raises(GuardDriftError, match="the step changes its length or order"):
            run(mode)
        return
    (losses, left), (ours, also) = run("eager"), run(mode)
    assert losses == ours
    assert [[*batch, *batch["more"][0]] for batch in left] == [[*batch, *batch["more"][0]] for batch in also]


@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_dict_that_a_batch_holds_twice_may_not_lose_a_key(batches: Any, mode: Any, accumulate: int) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * (1.0 + batch["one"].pop("hard", 1.0))

    def batch_at(number: int) -> Any:
        inner = {"hard": 2.0, "z": torch.ones(1)}
        batch = {**batches(number), "one": inner, "other": inner}
        return [batch] * accumulate if accumulate > 1 else batch

    with pytest.raises(GuardDriftError, match="it holds one dict or list in two places"):
        trainer(loss_fn, mode, accumulate=accumulate).fit(batch_at, 8)


@pytest.mark.parametrize("mode", ["capture", "replay"])
def test_a_deque_of_a_batch_may_not_change(batches: Any, mode: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        batch["queue"].rotate()
        return classify(model, batch)

    with pytest.raises(GuardDriftError, match=r"batch\['queue'\]: the step changes its length or order"):
        trainer(loss_fn, mode).fit(lambda number: {**batches(number), "queue": deque([1.0, 2.0])}, 8)


def test_taking_from_a_batch_is_no_writing(batches: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        y = batch.pop("y")
        return cross_entropy(model(batch["x"]), y)

    assert trainer(loss_fn, "eager").fit(batches, 8) == trainer(loss_fn, "replay").fit(batches, 8)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_in_words_and_runs_eagerly() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.nested.to_padded_tensor(batch, 0.0)).pow(2).mean()

    def ragged(number: int) -> Tensor:
        return torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)])

    assert len(trainer(loss_fn, "eager").fit(ragged, 2)) == 2
    for mode in MODES:
        with pytest.raises(BindError, match="a nested tensor cannot be copied into a fixed buffer"):
            trainer(loss_fn, mode).fit(ragged, 2)


class Buffered(nn.Module):
    """A step of it leaves its buffer in another shape."""

    def __init__(self, moved: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self._moved = nn.Linear(4, 3), moved
        self.register_buffer("kept", torch.zeros(20, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self._moved(self.kept, x.detach())
        return self.inner(x + self.kept.mean(0) if self.kept.shape[-1] == 4 else x)


SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grows": lambda kept, x: torch.cat([kept, x[:1]]),
    "shrinks": lambda kept, x: kept[1:],
    "transposed": lambda kept, x: kept.t(),
    "resized": lambda kept, x: kept.resize_(len(kept) + 1, 4).zero_(),
    "expanded": lambda kept, x: x[:1].expand(len(kept) + 1, 4),
}


@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize("how", SHAPES)
def test_a_buffer_that_changes_its_shape_is_refused_and_the_state_is_as_before(how: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Buffered(SHAPES[how])
    step = TrainStep(model, lambda model, batch: model(batch["x"]).square().mean(), sgd(model.parameters(), 0.1))
    trainer = Trainer(step, mode)
    batches = [{"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(number))} for number in range(6)]
    before = [Snapshot.take(step)]
    with pytest.raises(ReplayError, match=r"kept|resize_"):
        for batch in batches:
            before.append(Snapshot.take(step))
            trainer.train_step(batch)
    assert before[-1].differences(Snapshot.take(step)) == []


@pytest.mark.parametrize("mode", ["capture", "replay"])
def test_a_tensor_beside_the_model_that_changes_its_shape_is_refused_in_our_words(mode: str) -> None:
    kept, model = torch.ones(1), nn.Linear(4, 3)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kept.resize_(len(kept) + 1)
        return model(batch["x"]).square().mean()

    trainer = Trainer(TrainStep(model, loss_fn, sgd(model.parameters(), 0.1)), mode)
    with pytest.raises(ReplayError, match="resize_"):
        trainer.fit(lambda number: {"x": torch.ones(2, 4) * number}, 6)
