"""A state holds all that a step goes on from, or is refused by name; and it is taken by the trainer that it was made for only."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from compressor.errors import ResumeError
from compressor.training import Snapshot, Trainer, TrainStep, adamw, load_training, save_training, warmup_cosine


class Rated(optim.SGD):
    """Has a rate that follows what it keeps on itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 * float(self.rate())
        super().step()


class Counter:
    """An object of one's own."""

    n = 0


def keeping(first: Any, move: Any) -> type[Rated]:
    class Keeping(Rated):
        _kept: Any = None

        def rate(self) -> float:
            self._kept = first() if self._kept is None else self._kept
            moved = move(self._kept)
            self._kept = self._kept if moved is None else moved
            return {
                list: lambda kept: 1 / len(kept),
                deque: lambda kept: 1 / sum(kept),
                dict: lambda kept: 1 / kept["n"],
                SimpleNamespace: lambda kept: 1 / kept.n,
                Tensor: lambda kept: 1 / kept.sum(),
                tuple: lambda kept: 1 / kept[0][0],
                np.ndarray: lambda kept: 1 / kept[0],
                torch.Generator: lambda kept: torch.rand((), generator=kept),
                random.Random: lambda kept: kept.random(),
                np.random.Generator: lambda kept: kept.random(),
                np.random.RandomState: lambda kept: kept.rand(),
            }[type(self._kept)](self._kept)

    return Keeping


def add(kept: Any) -> None:
    kept += 1


def count(kept: Any) -> None:
    kept["n"] += 1


ATTRIBUTES = {
    "list": keeping(list, lambda kept: kept.append(1)),
    "deque": keeping(lambda: deque([1], maxlen=4), lambda kept: kept.append(kept[-1] + 1)),
    "dict": keeping(lambda: {"n": 0}, count),
    "namespace": keeping(lambda: SimpleNamespace(n=0), lambda kept: setattr(kept, "n", kept.n + 1)),
    "tensor": keeping(lambda: torch.zeros(2), add),
    "new tensor": keeping(lambda: torch.zeros(2), lambda kept: kept + 1),
    "tuple of lists of tensors": keeping(lambda: ([torch.zeros(())],), lambda kept: add(kept[0][0])),
    "array": keeping(lambda: np.zeros(1), add),
    "generator of torch": keeping(lambda: torch.Generator().manual_seed(1), lambda kept: None),
    "generator of Python": keeping(lambda: random.Random(1), lambda kept: None),
    "generator of numpy": keeping(lambda: np.random.default_rng(1), lambda kept: None),
    "old generator of numpy": keeping(lambda: np.random.RandomState(1), lambda kept: None),
}


class Lookahead(optim.Optimizer):
    """Slow weights behind another optimizer, whose groups it shares."""

    def __init__(self, params: Any) -> None:
        self.fast = optim.SGD(params, lr=0.1, momentum=0.9)
        super().__init__(self.fast.param_groups, {})
        self.param_groups = self.fast.param_groups
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.count = Counter()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()
        self.count.n += 1
        if self.count.n % 3 == 0:
            for parameter, slow in self.slow.items():
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.own = nn.Linear(8, 4), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + torch.randn(x.shape, generator=self.own))


class Shuffled(nn.Module):
    """Draws from generators of Python and numpy that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.own, self.other = nn.Linear(8, 4), random.Random(1), np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * self.own.random() + self.other.random())


class Counting(nn.Module):
    """Counts in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.n = nn.Linear(8, 4), {"calls": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.n["calls"][0] += 1
        return self.last(x) / self.n["calls"][0]

    def get_extra_state(self) -> Any:
        return self.n

    def set_extra_state(self, state: Any) -> None:
        self.n = state


def classify(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def drawing(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * (1 + np.random.rand())


def of(model: Any = lambda: nn.Linear(8, 4), optimizer: Any = lambda params: adamw(params, lr=1e-2), loss_fn: Any = classify) -> Any:
    def make(mode: Any) -> Trainer:
        torch.manual_seed(7)
        np.random.seed(7)
        made = model()
        return Trainer(TrainStep(made, loss_fn, optimizer(made.parameters())), mode, audit_every=0)

    return make


RUNS = {
    **{
        f"optimizer keeps a {name}": (of(optimizer=lambda params, made=made: made(params, lr=0.1)), True)
        for name, made in ATTRIBUTES.items()
    },
    "optimizer keeps an optimizer and an object": (of(optimizer=Lookahead), True),
    "module draws from its generator": (of(Noisy), True),
    "module draws from generators of the host": (of(Shuffled), False),
    "module has extra state": (of(Counting), False),
    "loss draws from numpy": (of(loss_fn=drawing), False),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_a_step_goes_on_from_is_in_its_state(batches: Any, tmp_path: Any, name: str) -> None:
    make, can_replay = RUNS[name]
    for mode in ("eager", "replay") if can_replay else ("eager",):
        whole = make(mode)
        whole.fit(batches, 7)
        path = save_training(whole, tmp_path / mode)
        rest = whole.fit(batches, 14)
        end = Snapshot.take(whole.step)
        resumed = make(mode)
        load_training(resumed, path)
        assert resumed.fit(batches, 14) == rest
        assert end.differences(Snapshot.take(resumed.step)) == []


def test_a_tensor_that_a_module_holds_and_a_flag_come_back_or_are_named(batches: Any, tmp_path: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.norm, self.scale = nn.Linear(8, 4), nn.BatchNorm1d(4), torch.ones(())

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.last(x)) * self.scale

    make = of(Scaled)
    for mode in ("eager", "replay"):
        whole = make(mode)
        whole.fit(batches, 5)
        whole.step.model.scale.fill_(0.5)
        whole.fit(batches, 7)
        path = save_training(whole, tmp_path / mode)
        rest = whole.fit(batches, 14)
        resumed = make(mode)
        load_training(resumed, path)
        assert resumed.fit(batches, 14) == rest
        resumed = make(mode)
        resumed.step.model.norm.eval()
        with pytest.raises(ResumeError, match="training of norm was True when it was stored, and is False"):
            load_training(resumed, path)
        assert resumed.step.model.scale == 1


class Opaque:
    """Keeps its value where nobody can write it down."""

    __slots__ = ("value",)


def test_what_no_file_keeps_is_refused_when_it_is_saved(batches: Any, tmp_path: Any) -> None:
    for name, value in (("_slots", Opaque()), ("batches", iter([1])), ("teacher", nn.Linear(1, 1)), ("nested", [{"key": (iter([1]),)}])):
        trainer = of()("eager")
        setattr(trainer.step.optimizer, name, value)
        with pytest.raises(ResumeError, match=f"attribute '{name}' of AdamW.*which no file of tensors and JSON keeps"):
            save_training(trainer, tmp_path / "state")
    trainer = of(Counting)("eager")
    trainer.step.model.n = {"object": Counter()}
    with pytest.raises(ResumeError, match=r"extra state of the model\['object'\]: it holds a Counter"):
        save_training(trainer, tmp_path / "state")
    assert not list(tmp_path.iterdir())


class Odd(optim.SGD):
    """Keeps something for all parameters in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["global"] = self.state.get("global", 0) + 1  # type: ignore[index]


class Bare(optim.SGD):
    """Keeps one tensor for each parameter, without a name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = 0.9 * self.state.get(parameter, 0) + parameter.grad
            parameter.sub_(self.state[parameter], alpha=0.1)


@pytest.mark.parametrize("cls", [Odd, Bare])
def test_an_optimizer_whose_state_is_no_dict_trains_in_every_mode_and_is_named_when_it_is_saved(batches, tmp_path, cls) -> None:
    ends = [of(optimizer=lambda params: cls(params, lr=0.1))(mode) for mode in ("eager", "capture", "replay")]
    losses = [trainer.fit(batches, 9) for trainer in ends]
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(ResumeError, match=f"{cls.__name__}: its state '.*' is neither a tensor nor a number of a parameter"):
        save_training(ends[2], tmp_path / "state")


def layers(middle: nn.Module, frozen: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 4))
    model[0].requires_grad_(not frozen)
    return model


def test_a_state_goes_to_the_trainer_that_it_was_made_for(batches: Any, tmp_path: Any) -> None:
    usual = warmup_cosine(2, 20)

    def make(model: nn.Module | None = None, schedule: Any = usual, lr: float = 0.01, **settings: Any) -> Trainer:
        made = layers(nn.ReLU()) if model is None else model
        return Trainer(TrainStep(made, classify, adamw(made.parameters(), lr=lr), **{"clip_norm": 1.0, **settings}), schedule=schedule)

    trainer = make()
    trainer.fit(batches, 1)
    path = save_training(trainer, tmp_path / "state")
    for other, match in (
        (make(layers(nn.GELU())), "class of 1 was ReLU when it was stored, and is GELU"),
        (make(layers(nn.ReLU(), frozen=True)), r"requires_grad of 0\.weight was True|lacks|has besides grad:0"),
        (make(clip_norm=0.1), "clip_norm was 1.0 when it was stored, and is 0.1"),
        (make(clip_norm=None), "clip_norm was 1.0 when it was stored, and is None"),
        (make(accumulate=2), "accumulate was 1 when it was stored, and is 2"),
        (make(autocast=torch.bfloat16), "autocast was None when it was stored, and is torch.bfloat16"),
        (make(schedule=None), "schedule was .* and is None"),
        (make(schedule=warmup_cosine(2, 50)), "schedule was .*'20'.* and is .*'50'"),
        (make(lr=0.1), "schedule was .*0.01.* and is .*0.1"),
        (make(schedule=lambda step: 0.25), "schedule was"),
        (make(Noisy()), "the file"),
    ):
        before = Snapshot.take(other.step)
        with pytest.raises(ResumeError, match=match):
            load_training(other, path)
        assert before.differences(Snapshot.take(other.step)) == [] and not other.step.optimizer.state
    load_training(make(), path)


class _Shifted(nn.Module):
    """A buffer that is asked for its gradient, which adds up over the steps: no optimizer has it."""

    def __init__(self, asked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.register_buffer("shift", torch.zeros(4, requires_grad=asked))

    def forward(self, x):
        return self.layer(x) + self.shift


def test_the_gradient_of_a_buffer_is_alike_in_all_modes_and_stored(mlp_trainer, batches, tmp_path):
    ends = {}
    for mode in ("eager", "capture", "replay"):
        trainer = mlp_trainer(_Shifted(), mode=mode)
        trainer.fit(batches, 6)
        path = save_training(trainer, tmp_path / mode)
        trainer.fit(batches, 9)
        resumed = mlp_trainer(_Shifted(), mode=mode)
        load_training(resumed, path)
        resumed.fit(batches, 9)
        ends[mode] = trainer.step.model.shift.grad
        assert ends[mode].any() and torch.equal(ends[mode], resumed.step.model.shift.grad)
    assert all(torch.equal(ends["eager"], end) for end in ends.values())
    with pytest.raises(ResumeError, match="requires_grad of shift"):
        load_training(mlp_trainer(_Shifted(asked=False)), path)


def test_a_number_too_long_to_be_written_out_is_refused_where_it_is_stored_and_told_apart_where_not(tmp_path: Any) -> None:
    class Masked(nn.Linear):
        def __init__(self, mask: int) -> None:
            super().__init__(2, 2)
            self.mask = mask

    def trainer(model: nn.Module, kind: type[optim.Optimizer] = optim.SGD) -> Trainer:
        return Trainer(TrainStep(model, lambda model, batch: model(batch["x"]).sum(), kind(model.parameters(), lr=0.1)))

    path = save_training(trainer(Masked(1 << 20000)), tmp_path / "state")
    load_training(trainer(Masked(1 << 20000)), path)
    with pytest.raises(ResumeError, match="settings of the model"):
        load_training(trainer(Masked((1 << 20000) + 1)), path)
    holding = trainer(nn.Linear(2, 2), type("Holding", (optim.SGD,), {}))
    vars(holding.step.optimizer)["mask"] = 1 << 20000
    with pytest.raises(ResumeError, match="a number of the state cannot be written down"):
        save_training(holding, tmp_path / "other")


@pytest.mark.parametrize("mode", ["eager", "capture", "replay"])
def test_a_parameter_that_is_out_of_its_group_for_a_while_finds_its_moments_again(batches: Any, tmp_path: Any, mode: str) -> None:
    def new() -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        return Trainer(TrainStep(model, lambda m, batch: cross_entropy(m(batch["x"]), batch["y"]), adamw(model.parameters())), mode)

    def trained(trainer: Trainer, own: bool, first: int = 0) -> Trainer:
        group = trainer.step.optimizer.param_groups[0]["params"]
        for number in range(first, 14):
            if number == 6:
                group.pop(0)
            if number == 10:
                if not (own or first):
                    save_training(trainer, tmp_path / "out.safetensors")
                group.insert(0, trainer.step.model[0].weight)
            if not own:
                if number in (6, 10):
                    trainer.forget_plans()
                trainer.train_step(batches(number))
                continue
            trainer.step.optimizer.zero_grad()
            trainer.step.loss_fn(trainer.step.model, batches(number)).backward()
            trainer.step.optimizer.step()
        return trainer

    resumed = new()
    expected = trained(new(), own=True).step.tensors()
    found = [trained(new(), own=False).step.tensors()]
    resumed.step.optimizer.param_groups[0]["params"].pop(0)
    load_training(resumed, tmp_path / "out.safetensors")
    found.append(trained(resumed, own=False, first=10).step.tensors())
    kept = [name for name in expected if name.startswith(("param:", "opt."))]
    assert len(kept) == 4 * 4  # two moments and a count beside each parameter
    assert all(torch.equal(expected[name], tensors[name]) for tensors in found for name in kept)


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_a_state_whose_gradients_were_cleared_is_taken_and_goes_on_alike(batches: Any, tmp_path: Any, mode: str) -> None:
    def new() -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        return Trainer(TrainStep(model, lambda m, batch: cross_entropy(m(batch["x"]), batch["y"]), adamw(model.parameters())), mode)

    first, resumed = new(), new()
    for number in range(3):
        first.train_step(batches(number))
    first.step.optimizer.zero_grad()
    save_training(first, tmp_path / "state.safetensors")
    load_training(resumed, tmp_path / "state.safetensors")
    assert all(parameter.grad is None for parameter in resumed.step.model.parameters())
    first.forget_plans()
    for trainer in (first, resumed):
        for number in range(3, 8):
            trainer.train_step(batches(number))
    assert Snapshot.take(first.step).differences(Snapshot.take(resumed.step)) == []
