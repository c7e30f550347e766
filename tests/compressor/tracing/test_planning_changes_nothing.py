"""However planning, a proof, a stage or a run ends, the model is as before, bit for bit; and each forward is that of a fresh model."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import queue
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.tracing import Engine, Plan, footprint, trace

WIDTH = 4
ENGINES: tuple[Engine, ...] = ("graph", "suspend", "auto")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + x


class Model(nn.Module):
    """Three layers, and something that the forward does to the model before, between and behind them."""

    total = 0
    mean: Tensor

    def __init__(self, deed: Callable[[Any, Tensor], Any], place: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(()))
        self.done, self.count, self.seen, self.by_name = False, 0, [0], {"x": 0}
        self.helper = types.SimpleNamespace(count=0, seen=[0])
        self.kept, self.array = torch.ones(2), np.ones(2)
        self.generator = torch.Generator().manual_seed(1)
        self.dice, self.numbers = random.Random(2), np.random.default_rng(3)
        vars(self).update(deed=deed, place=place)

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place == self.place:
                self.deed(self, x)
            x = layer(x)
        x = x + self.mean * 0.5
        return x / 2 if self.done else x


def divides_once(model: Any, x: Tensor) -> None:
    if not model.done:
        for layer in (*model.layers, model.spare):
            layer.lin.weight.div_(2) if isinstance(layer, Layer) else layer.weight.div_(2)
        model.done = True


def divides_spare_once(model: Any, x: Tensor) -> None:
    if not model.done:
        model.spare.weight.data.div_(2)
        model.done = True


def divides_once_by_number(model: Any, x: Tensor) -> None:
    if model.count == 0:
        model.spare.weight.div_(2)
        model.count = 1


def divides_each_time(model: Any, x: Tensor) -> None:
    model.layers[2].lin.weight.div_(2)


def divides_spare_each_time(model: Any, x: Tensor) -> None:
    model.spare.weight.data.div_(2)


def swaps_data(model: Any, x: Tensor) -> None:
    model.layers[2].lin.weight.data = model.layers[2].lin.weight.data / 2


def swaps_data_once(model: Any, x: Tensor) -> None:
    if not model.done:
        model.spare.weight.data, model.done = model.spare.weight.data / 2, True


def new_parameter(model: Any, x: Tensor) -> None:
    model.spare.weight = nn.Parameter(model.spare.weight / 2)


def writes_statistics(model: Any, x: Tensor) -> None:
    model.mean.mul_(0.9).add_(x.mean() * 0.1)


def counts(model: Any, x: Tensor) -> None:
    model.count += 1
    model.helper.count += 1
    type(model).total += 1


def grows(model: Any, x: Tensor) -> None:
    model.seen.append(x)
    model.helper.seen.append(1)
    model.by_name[len(model.by_name)] = x


def hooks(model: Any, x: Tensor) -> None:
    model.layers[0].register_forward_hook(lambda *args: None)
    model.spare.weight.register_hook(lambda grad: grad)
    model.spare.train()


def hooks_once(model: Any, x: Tensor) -> None:
    if not model.done:
        model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
        model.done = True


def draws(model: Any, x: Tensor) -> None:
    torch.rand((), generator=model.generator)
    model.dice.random()
    model.numbers.random()
    torch.rand(())


def draws_elsewhere(model: Any, x: Tensor) -> None:
    random.random()
    np.random.rand()


def writes_attributes(model: Any, x: Tensor) -> None:
    model.kept.add_(1)
    model.array += 1
    model.spare.bias.grad = torch.ones(WIDTH)
    model.spare.bias.requires_grad_(False)


def refused_midway(model: Any, x: Tensor) -> None:
    divides_once(model, x)
    if x.numpy().sum() > 1e6:
        model.count = 5


def fails_for_three(model: Any, x: Tensor) -> None:
    divides_each_time(model, x)
    if len(x) == 3:
        raise RuntimeError("three")


DEEDS = [value for value in list(globals().values()) if isinstance(value, types.FunctionType) and value.__module__ == __name__]
ONCE = (divides_once, divides_spare_once, divides_once_by_number, swaps_data_once, refused_midway)


def look(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """All that can be seen of a model, in plain values: written without a look at how the product does it."""
    if isinstance(value, Tensor):
        hooks = [*(value._backward_hooks or {})] if value.requires_grad else None
        raw = value.detach().numpy().tobytes()
        return id(value), value.data_ptr(), tuple(value.shape), raw, value.requires_grad, look(value.grad), hooks
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random | np.random.Generator):
        return repr(value.getstate() if isinstance(value, random.Random) else value.bit_generator.state)
    if id(value) in seen:
        return "again"
    seen = (*seen, id(value))
    if isinstance(value, dict):
        return [(key, look(item, seen)) for key, item in value.items()]
    if isinstance(value, list | tuple | set):
        return type(value).__name__, [look(item, seen) for item in value]
    if isinstance(value, nn.Module | types.SimpleNamespace):
        return id(value), look(vars(value), seen)
    return value if isinstance(value, int | float | str | None) else id(value)


def everything(model: Model) -> Any:
    states = torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state(legacy=False))
    return look(model), type(model).total, torch.is_grad_enabled(), states


def batches() -> list[Batch]:
    numbers = torch.Generator().manual_seed(5)
    return [(torch.randn(rows, WIDTH, generator=numbers),) for rows in (1, 2, 1)]


def fresh_outputs(deed: Callable[..., Any], place: int) -> list[Tensor]:
    with torch.no_grad():
        made = []
        for batch in batches():
            torch.manual_seed(7)
            random.seed(7)
            np.random.seed(7)
            made.append(call_model(Model(deed, place).eval(), batch))
        return made


@pytest.fixture(params=["copied", "watched"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "watched":
        monkeypatch.setattr(footprint, "COPIED_BYTES", 0)
    yield request.param
    Model.total = 0


def ran(plan: Plan) -> list[Tensor]:
    run = plan.run(batches(), keep_outputs=True, watched=lambda: [name for name, _ in plan.model.named_modules() if "lin" in name])
    with run:
        for stage in run:
            stage.calibrate()
            stage.propagate()
    return list(run.outputs)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_planning_and_runs_leave_the_model_as_it_was(deed: Callable[..., Any], engine: Engine, place: int, size: str) -> None:
    if size == "watched" and deed is writes_attributes:
        pytest.skip("numpy writes past torch; below")
    expected, model, given = fresh_outputs(deed, place), Model(deed, place).eval(), batches()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    before, outputs = everything(model), []
    with contextlib.suppress(TracingError):
        plan = trace(model, given, engine=engine)
        assert everything(model) == before
        outputs = ran(plan)
    assert everything(model) == before
    can_follow = deed in (draws, draws_elsewhere, divides_spare_each_time) or (deed in ONCE and place == 0)
    assert outputs or engine == "graph" or not can_follow
    assert not outputs or all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forward_that_fails_midway_leaves_nothing(engine: Engine, size: str) -> None:
    model, given = Model(fails_for_three, 1).eval(), [*batches(), (torch.zeros(3, WIDTH),)]
    before = everything(model)
    with pytest.raises(TracingError):
        trace(model, given, engine=engine)
    assert everything(model) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_is_left_early_leaves_nothing(engine: Engine, size: str) -> None:
    model = Model(divides_once).eval()
    before = everything(model)
    plan = trace(model, batches(), engine=engine)
    assert set(plan.rewritten) == {f"{name}.weight" for name in ("spare", "layers.0.lin", "layers.1.lin", "layers.2.lin")}
    with pytest.raises(KeyError), plan.run(batches()) as run:
        for stage in run:
            stage.rehearse()
            raise KeyError
    assert everything(model) == before


def test_what_others_change_during_a_run_stays() -> None:
    model = Model(divides_once).eval()
    plan, base = trace(model, batches()), model.layers[0].lin.weight.detach().clone()
    with plan.run(batches()) as run:
        for stage in run:
            stage.propagate()
            run.give_back(["layers.0.lin"])
            if stage.index == 0:
                assert torch.equal(model.layers[0].lin.weight, base)
                model.layers[0].lin.weight.data.zero_()
                model.layers[2].lin, model.note, model.count = nn.Linear(WIDTH, WIDTH), "mine", 3
    assert not model.layers[0].lin.weight.any() and model.note == "mine" and model.count == 3 and not model.done


def test_a_large_model_that_is_written_to_past_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "COPIED_BYTES", 0)

    def by_numpy(model: Any, x: Tensor) -> None:
        model.spare.weight.detach().numpy()[0] /= 2

    with pytest.raises(TracingError, match=r"^spare.weight: forward writes to it past torch"):
        trace(Model(by_numpy).eval(), batches(), engine="suspend")


class Flagged(Model):
    """The first layer sets a flag by what it is given, and the last one goes by it."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0].is_positive = bool(x.sum() > 0)
        for layer in self.layers:
            x = layer(x)
        return x * 2 if self.layers[0].is_positive else x


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flag_of_one_sample_is_not_that_of_the_next(engine: Engine) -> None:
    given: list[Batch] = [(sign * torch.ones(1, WIDTH),) for sign in (1, -1, 1)]
    with torch.no_grad():
        expected = [call_model(Flagged(counts).eval(), batch) for batch in given]
    outputs, model = [], Flagged(counts).eval()
    before = everything(model)
    with contextlib.suppress(TracingError):
        run = trace(model, given, engine=engine).run(given, keep_outputs=True)
        for stage in run:
            stage.propagate()
        outputs = run.outputs
    assert everything(model) == before
    assert not outputs or all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
    assert outputs or engine != "graph"


class Slots:
    __slots__ = ("__hidden", "late", "n", "seen")

    def __init__(self) -> None:
        self.n, self.seen, self.__hidden = 0, [0], 0

    def count(self) -> None:
        self.n += 1
        self.__hidden += 1
        self.seen.append(1)
        self.late = self.n

    def state(self) -> Any:
        return self.n, self.__hidden, list(self.seen), hasattr(self, "late")


class SlotsBelow(Slots):
    __slots__ = ()


class SlotsAndMore(Slots):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    n: int = 0

    def count(self) -> None:
        object.__setattr__(self, "n", self.n + 1)

    def state(self) -> int:
        return self.n


class Attributes:
    n = 0

    def count(self) -> None:
        self.n += 1

    def state(self) -> int:
        return self.n


class NamedList(list[int], Attributes):
    pass


class NamedTuple(tuple[int, ...], Attributes):
    pass


def add_attribute(function: Any) -> None:
    function.calls = getattr(function, "calls", 0) + 1
    function.inner.append(1)


def named_function() -> Any:
    def made() -> None: ...

    vars(made)["inner"] = []
    return made


def write_first(raw: Any) -> None:
    raw[0] += 1


def grow(raw: Any) -> None:
    raw.extend(raw[:1])


def with_defaults() -> Any:
    def made(seen: list[int] = [0], *, more: list[int] = [0]) -> tuple[list[int], list[int]]:  # noqa: B006 - what is tested
        return seen, more

    return made


def a_class(name: str = "Held") -> Any:
    return type(name, (), {"count": 0})


class Dice(random.Random):
    count = 0


def count_up(kind: Any) -> None:
    kind.count += 1


# what a module holds: how it is made, what a forward does to it, and how it looks
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "bytearray, written": (lambda: bytearray(3), write_first, bytes),
    "bytearray, grown": (lambda: bytearray(3), grow, bytes),
    "array of int": (lambda: array.array("q", [1 << 40, 2]), write_first, list),
    "array of float, grown": (lambda: array.array("d", [float("nan")]), grow, array.array.tobytes),
    "slots": (Slots, Slots.count, Slots.state),
    "slots of a base": (SlotsBelow, Slots.count, Slots.state),
    "slots beside attributes": (SlotsAndMore, Slots.count, Slots.state),
    "slots of a frozen class": (Frozen, Frozen.count, Frozen.state),
    "function": (named_function, add_attribute, lambda function: repr(vars(function))),
    "partial": (lambda: functools.partial(print), lambda one: vars(one).update(n=1), lambda one: dict(vars(one))),
    "list with attributes": (NamedList, Attributes.count, Attributes.state),
    "tuple with attributes": (NamedTuple, Attributes.count, Attributes.state),
    "queue": (queue.Queue, lambda held: held.put(1), lambda held: (list(held.queue), held.unfinished_tasks)),
    "tensor": (lambda: torch.zeros(2), write_first, Tensor.tolist),
    "numpy array": (lambda: np.zeros(2), write_first, np.ndarray.tolist),
    "generator": (lambda: random.Random(0), random.Random.random, random.Random.getstate),
    "function of a staticmethod": (
        lambda: staticmethod(named_function()),
        lambda held: add_attribute(held.__func__),
        lambda held: repr(vars(held.__func__)),
    ),
    "function of a property": (
        lambda: property(named_function()),
        lambda held: add_attribute(held.fget),
        lambda held: repr(vars(held.fget)),
    ),
    "defaults of a function": (with_defaults, lambda held: [seen.append(1) for seen in held()], lambda held: repr(held())),
    "keywords of a partial": (
        lambda: functools.partial(print, end=[0]),
        lambda held: held.keywords["end"].append(1),
        lambda held: list(held.keywords["end"]),
    ),
    "attribute of a tensor": (
        lambda: torch.zeros(2),
        lambda held: setattr(held, "count", getattr(held, "count", 0) + 1),
        lambda held: getattr(held, "count", 0),
    ),
    "mapping proxy": (
        lambda: types.MappingProxyType({"seen": [0]}),
        lambda held: held["seen"].append(1),
        lambda held: list(held["seen"]),
    ),
    "metaclass": (lambda: type("Meta", (type,), {"count": 0})("Held", (), {}), lambda held: count_up(type(held)), lambda held: held.count),
    "generator with attributes": (Dice, lambda held: setattr(held, "count", held.count + 1), lambda held: held.count),
    "class": (a_class, count_up, lambda held: held.count),
    "class in a list": (lambda: [a_class()], lambda held: count_up(held[0]), lambda held: held[0].count),
    "slots in a list": (lambda: [Slots()], lambda held: held[0].count(), lambda held: held[0].state()),
    "function in slots": (lambda: Wrapping(named_function()), lambda held: add_attribute(held.n), lambda held: repr(vars(held.n))),
}


class Wrapping(Slots):
    def __init__(self, n: Any) -> None:
        self.n = n


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", HELD)
def test_whatever_a_module_holds_is_put_back(kind: str, place: int) -> None:
    make, change, look_at = HELD[kind]
    for engine in ENGINES:
        model = Model(lambda model, x: change(model.held), place).eval()
        model.held = make()
        before = look_at(model.held)
        with contextlib.suppress(TracingError):
            plan = trace(model, batches()[:2], engine=engine)
            assert look_at(model.held) == before, engine
            ran(plan)
        assert look_at(model.held) == before, engine
        change(model.held)
        assert look_at(model.held) != before


class OnClass(Model):
    """Its class holds things, and so does the class of something that it holds."""


def change_class(model: Any, x: Tensor) -> None:
    for kind, (_, change, _) in HELD.items():
        change(vars(OnClass)[kind])
    Attributes.seen.append(1)  # type: ignore[attr-defined]


def test_what_classes_of_modules_and_of_objects_hold_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, (make, _, _) in HELD.items():
        monkeypatch.setattr(OnClass, kind, make(), raising=False)
    monkeypatch.setattr(Attributes, "seen", [], raising=False)

    def looks() -> list[Any]:
        return [look_at(vars(OnClass)[kind]) for kind, (_, _, look_at) in HELD.items()]

    for engine in ENGINES[:2]:
        model: Any = OnClass(change_class, 2).eval()
        model.one = Attributes()
        before = looks()
        with contextlib.suppress(TracingError):
            plan = trace(model, batches()[:2], engine=engine)
            assert looks() == before and Attributes.seen == [], engine  # type: ignore[attr-defined]
            ran(plan)
        assert looks() == before and Attributes.seen == [], engine  # type: ignore[attr-defined]
    change_class(model, torch.ones(1))
    assert all(now != then for now, then in zip(looks(), before, strict=True))


@pytest.mark.nightly
def test_experts_by_the_thousand_are_looked_at_in_whole() -> None:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(6000))
    before = [layer.weight.item() for layer in model]
    with footprint.Footprint(model), torch.no_grad():
        for layer in model:
            layer.weight.add_(1)
    assert [layer.weight.item() for layer in model] == before
