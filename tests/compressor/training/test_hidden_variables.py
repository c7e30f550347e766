"""What a loss function reads in places that are easy to forget: a change between two steps is named, never missed."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from compressor.errors import DynamicShapeError, GuardDriftError, ProofError, ReplayError, UserInputError
from compressor.training import Trainer, TrainStep, adamw, sgd

SETTINGS = types.ModuleType("settings_of_the_test")
SETTINGS.scale = 1.0  # type: ignore[attr-defined]


class Slots:
    __slots__ = ("scale",)


class Settings:
    """A class whose attribute is read, and one behind a property."""

    scale = 1.0
    scales = [1.0]  # noqa: RUF012 - exchanged in place, which is the point

    @property
    def first(self) -> float:
        return self.scales[0]


class Case(NamedTuple):
    """What the loss is multiplied with, and what changes it."""

    scale: Callable[[], Any]
    change: Callable[[], Any]


def module_attribute() -> Case:
    SETTINGS.scale = 1.0  # type: ignore[attr-defined]
    return Case(lambda: SETTINGS.scale, lambda: setattr(SETTINGS, "scale", 2.0))  # type: ignore[attr-defined]


def environment() -> Case:
    os.environ["SCALE"] = "1"
    return Case(lambda: float(os.environ["SCALE"]), lambda: os.environ.__setitem__("SCALE", "2"))


def getenv() -> Case:
    os.environ["SCALE"] = "1"
    return Case(lambda: float(os.getenv("SCALE", "")), lambda: os.environ.__setitem__("SCALE", "2"))


def member_of_a_set() -> Case:
    names: set[str] = set()
    return Case(lambda: 2 if "twice" in names else 1, lambda: names.add("twice"))


def end_of_a_deque() -> Case:
    values = collections.deque([1.0])
    return Case(lambda: values[-1], lambda: values.append(2.0))


def slot() -> Case:
    slots = Slots()
    slots.scale = 1.0
    return Case(lambda: slots.scale, lambda: setattr(slots, "scale", 2.0))


def class_attribute() -> Case:
    Settings.scale = 1.0
    return Case(lambda: Settings.scale, lambda: setattr(Settings, "scale", 2.0))


def behind_a_property() -> Case:
    Settings.scales[0] = 1.0
    settings = Settings()
    return Case(lambda: settings.first, lambda: Settings.scales.__setitem__(0, 2.0))


def context_variable() -> Case:
    variable = contextvars.ContextVar("variable", default=1.0)
    return Case(variable.get, lambda: variable.set(2.0))


def bound_by_partial() -> Case:
    held = {"scale": 1.0}

    def read(held: dict[str, float]) -> float:
        return held["scale"]

    return Case(functools.partial(read, held=held), lambda: held.__setitem__("scale", 2.0))


def numpy_array() -> Case:
    values = np.ones(3)
    return Case(lambda: float(values[0]), lambda: values.__setitem__(0, 2.0))


def numpy_array_of_an_object() -> Case:
    held = types.SimpleNamespace(array=np.ones(3))
    return Case(lambda: float(held.array[0]), lambda: held.array.__setitem__(0, 2.0))


class Heir(Settings):
    """Inherits what is read of it."""


def class_attribute_that_a_helper_reads() -> Case:
    Settings.scale = 1.0
    heir = Heir()

    def read(settings: Settings) -> float:
        return settings.scale

    return Case(lambda: read(heir), lambda: setattr(Settings, "scale", 2.0))


def bytes_in_place() -> Case:
    values = bytearray([1])
    return Case(lambda: float(values[0]), lambda: values.__setitem__(0, 2))


def array_of_python() -> Case:
    values = array.array("d", [1.0])
    return Case(lambda: values[0], lambda: values.__setitem__(0, 2.0))


def array_in_a_list() -> Case:
    values = [array.array("d", [1.0])]
    return Case(lambda: values[0][0], lambda: values[0].__setitem__(0, 2.0))


def method_of_an_object() -> Case:
    held = [1.0]

    class Reader:
        def scale(self) -> float:
            return held[0]

    reader = Reader()
    return Case(lambda: reader.scale(), lambda: held.__setitem__(0, 2.0))


_RATES = [1.0]


@torch.library.custom_op("hidden_variables::scaled", mutates_args=())
def _scaled(x: Tensor) -> Tensor:
    return x * _RATES[0]


_scaled.register_autograd(lambda ctx, gradient: gradient)


def operator() -> Case:
    _RATES[0] = 1.0
    return Case(lambda: _scaled(torch.ones(())), lambda: _RATES.__setitem__(0, 2.0))


def operator_by_its_name() -> Case:
    _RATES[0] = 1.0
    return Case(lambda: torch.ops.hidden_variables.scaled(torch.ones(())), lambda: _RATES.__setitem__(0, 2.0))


class Scaled(Tensor):
    factor = 1.0

    def scaled(self) -> Tensor:
        return self * type(self).factor


def method_of_a_tensor() -> Case:
    Scaled.factor = 1.0
    return Case(lambda: torch.ones(()).as_subclass(Scaled).scaled().as_subclass(Tensor), lambda: setattr(Scaled, "factor", 2.0))


class Overriding(Tensor):
    rate = 1.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * cls.rate if func is torch.relu else found


def override_of_a_tensor() -> Case:
    Overriding.rate = 1.0
    return Case(lambda: torch.relu(torch.ones(()).as_subclass(Overriding)).as_subclass(Tensor), lambda: setattr(Overriding, "rate", 2.0))


CASES = (
    *(method_of_a_tensor, override_of_a_tensor),
    *(operator, operator_by_its_name),
    *(module_attribute, environment, getenv, member_of_a_set, end_of_a_deque, slot, class_attribute),
    *(behind_a_property, context_variable, bound_by_partial, method_of_an_object),
    *(numpy_array, numpy_array_of_an_object, class_attribute_that_a_helper_reads),
    *(bytes_in_place, array_of_python, array_in_a_list),
)


def trainer(loss_fn: Callable[[nn.Module, Any], Tensor], model: nn.Module | None = None) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(8, 4) if model is None else model
    return Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2)), "replay", audit_every=0)


class Hook:
    """A hook that is no function."""

    scale = 1.0

    def __call__(self, *given: Any) -> Any:
        return given[-1] * self.scale


@pytest.mark.parametrize("place", ["module", "parameter"])
def test_a_hook_that_is_an_object_is_looked_into(place: str, batches: Callable[..., Any]) -> None:
    run, hook = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"])), Hook()
    run.step.model.register_forward_hook(hook) if place == "module" else run.step.model.weight.register_hook(hook)  # type: ignore[operator]
    hook.scale = 1.0
    run.fit(batches, 6)
    hook.scale = 2.0
    with pytest.raises(GuardDriftError, match="attribute 'scale' of a hook"):
        run.train_step(batches(6))


def test_a_hook_that_is_an_object_and_counts_is_refused_for_its_counter(batches: Callable[..., Any]) -> None:
    class Counting(Hook):
        def __call__(self, *given: Any) -> Any:
            self.scale += 0.1
            return super().__call__(*given)

    run, hook = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"])), Counting()
    hook.scale = 1.0
    run.step.model.register_forward_hook(hook)
    with pytest.raises(GuardDriftError, match="the step changes the host: attribute 'scale' of a hook"):
        run.fit(batches, 6)


def test_an_iterator_out_of_sight_is_among_the_causes_that_a_message_names(batches: Callable[..., Any]) -> None:
    numbers = (float(number) for number in range(1, 99))
    hidden = weakref.ref(numbers)
    run = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]) * next(hidden()))
    with pytest.raises(ProofError, match=r"something that moves on with each call \(a counter, an iterator\)"):
        run.fit(batches, 6)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_value_that_changes_between_two_steps_is_named(make: Callable[[], Case], batches: Callable[..., Any]) -> None:
    case = make()
    run = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]) * case.scale())
    run.fit(batches, 6)
    assert run.last_action == "replay"
    case.change()
    with pytest.raises(GuardDriftError):
        run.train_step(batches(6))


@pytest.mark.parametrize(
    ("held", "changed"),
    [
        (np.arange(7000.0), r"values' that loss_fn closes over was 12.0 at place 12 and is now 0.5, among 7000 numbers"),
        (array.array("f", range(50)), r"was 12.0 at place 12 and is now 0.5, among 50 numbers"),
        (bytearray(range(50)), r"was 12 at place 12 and is now 0, among 50 numbers"),
        (["x" * 9000], r"was \(list, 'x+\.\.\.x+'\) and is now \(list, 0\.5\)"),
    ],
    ids=["numpy", "array", "bytearray", "text"],
)
def test_of_a_large_value_the_number_that_has_changed_is_named(held: Any, changed: str, batches: Callable[..., Any]) -> None:
    values = held
    run = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]) * (len(str(values)) > 0))
    run.fit(batches, 6)
    values[min(12, len(values) - 1)] = 0 if isinstance(values, bytearray) else 0.5
    with pytest.raises(GuardDriftError, match=changed) as caught:
        run.train_step(batches(6))
    assert len(str(caught.value)) < 1000


def test_a_variable_of_the_environment_is_named_without_the_others(batches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_TEST", "hush")
    monkeypatch.setenv("SCALE", "1")
    run = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]) * float(os.environ["SCALE"]))
    run.fit(batches, 6)
    monkeypatch.setenv("SCALE", "2")
    with pytest.raises(GuardDriftError, match="SCALE") as caught:
        run.train_step(batches(6))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "values", "plans"), [("replay", (0.0, -0.0), 2), ("replay", ("nan", "nan"), 1), ("capture", (1.0, 1.0), 0)]
)
def test_constants_of_a_batch_are_told_apart_by_their_bits(mode: Any, values: Any, plans: int, batches: Callable[..., Any]) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"]) + torch.full((), batch["w"]).atan2(torch.full((), -1.0)).nan_to_num()

    def batch_at(number: int) -> Any:
        return {**batches(number), "w": float(values[number >= 8])}

    eager, run = trainer(loss_fn), trainer(loss_fn)
    eager.mode, run.mode = "eager", mode
    assert eager.fit(batch_at, 14) == run.fit(batch_at, 14)
    assert len(run.plans) == plans


def test_a_function_of_torch_that_is_exchanged_is_named(batches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(lambda model, batch: functional.cross_entropy(functional.relu(model(batch["x"])), batch["y"]))
    run.fit(batches, 6)
    monkeypatch.setattr(functional, "relu", torch.sigmoid)
    with pytest.raises(GuardDriftError, match=r"'relu' of module torch\.nn\.functional"):
        run.train_step(batches(6))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_cannot_be_guarded_or_has_no_fixed_size_is_refused_by_name(batches: Callable[..., Any]) -> None:
    def plain(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    def nested(model: nn.Module, batch: Any) -> Tensor:
        rows = torch.nested.nested_tensor(list(batch["x"]))
        return functional.cross_entropy(model(torch.nested.to_padded_tensor(rows, 0.0)), batch["y"])

    with pytest.raises(ReplayError, match=r"torch\.jit"):
        trainer(plain, torch.jit.script(nn.Linear(8, 4))).fit(batches, 6)
    with pytest.raises(DynamicShapeError, match="nested tensor"):
        trainer(nested).fit(batches, 6)


@contextmanager
def doubling_every_linear() -> Iterator[None]:
    handle = register_module_forward_hook(lambda module, args, output: 2 * output)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def other_attention() -> Iterator[None]:
    with sdpa_kernel([SDPBackend.MATH]):
        yield


@pytest.mark.parametrize(("change", "named"), [(doubling_every_linear, "global hooks"), (other_attention, "flash attention")])
def test_a_setting_of_torch_that_changes_what_runs_is_named(change: Any, named: str, batches: Callable[..., Any]) -> None:
    run = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]))
    run.fit(batches, 6)
    with change(), pytest.raises(GuardDriftError, match=named):
        run.train_step(batches(6))
    run.fit(batches, 8)
    assert run.last_action == "replay"


def test_another_optimizer_is_named(batches: Callable[..., Any]) -> None:
    run = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]))
    run.fit(batches, 6)
    run.step.optimizer = adamw(run.step.model.parameters(), lr=1e-2)
    with pytest.raises(ReplayError, match=r"parts of the step|group0"):
        run.train_step(batches(6))


def test_code_that_logs_and_settings_that_stay_are_no_drift(batches: Callable[..., Any]) -> None:
    import logging

    log = logging.getLogger("a test of variables")

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        log.debug("a step of %d rows on %s", len(batch["x"]), sys.platform)
        return functional.cross_entropy(model(batch["x"]), batch["y"]) * Settings().first

    run = trainer(loss_fn)
    run.fit(batches, 6)
    log.setLevel(logging.DEBUG)
    run.fit(batches, 8)
    assert run.last_action == "replay"


def test_what_a_library_holds_is_its_own_affair(batches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss says `.modules()` of a model, and `sys` has a table of that name, which grows whenever something is imported."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        scale = len(list(model.modules())) if sys.platform else 0
        return functional.cross_entropy(model(batch["x"]), batch["y"]) * scale

    run = trainer(loss_fn)
    run.fit(batches, 6)
    monkeypatch.setitem(sys.modules, "a_module_that_came_later", types.ModuleType("a_module_that_came_later"))
    run.fit(batches, 8)
    assert run.last_action == "replay"


def test_containers_that_hold_themselves_and_long_chains_of_methods_have_an_end(batches: Callable[..., Any]) -> None:
    held: dict[str, Any] = {"scale": 1.0}
    held["itself"] = held
    names = [f"method_{number}" for number in range(400)]
    text = [f"lambda self, n: self.{after}(n - 1) if n else 1.0" for after in names[1:]] + ["lambda self, n: 1.0"]
    chain = type("Chain", (), {name: eval(body) for name, body in zip(names, text, strict=True)})()  # 400 methods, each names the next
    run = trainer(lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]) * held["scale"] * chain.method_0(3))
    run.fit(batches, 6)
    assert run.last_action == "replay"
    held["scale"] = 2.0
    with pytest.raises(GuardDriftError):
        run.train_step(batches(6))


def _batch_of(number):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": (x.sum(1) > 0).long()}


def _loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class Counting(torch.nn.Linear):
    """Counts on its weight, on a buffer, or nowhere."""

    def __init__(self, where):
        super().__init__(8, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.where = where

    def forward(self, x):
        if self.where:
            holder = getattr(self, self.where)
            holder.calls = getattr(holder, "calls", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize("where", ["weight", "seen"])
def test_a_counter_on_a_tensor_is_refused(where, mode):
    model = Counting(where)
    trainer = Trainer(TrainStep(model, _loss_of, torch.optim.SGD(model.parameters(), lr=0.1)), mode)
    with pytest.raises(GuardDriftError, match=f"attribute 'calls' of {where}"):
        trainer.fit(_batch_of, 6)


@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize("of", ["modules", "optimizers"])
def test_a_counter_in_a_hook_of_all_modules_or_optimizers_is_refused(of, mode):
    seen, model = [0], Counting("")

    def hook(*args):
        seen[0] += 1

    register = {
        "modules": register_module_forward_hook,
        "optimizers": register_optimizer_step_post_hook,
    }[of]
    handle = register(hook)
    try:
        trainer = Trainer(TrainStep(model, _loss_of, sgd(model.parameters(), lr=0.1)), mode)
        with pytest.raises(GuardDriftError, match=f"'seen' that a hook of all {of}"):
            trainer.fit(_batch_of, 6)
    finally:
        handle.remove()


@pytest.mark.parametrize("mode", ["eager", "capture", "replay"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_an_error_of_the_steps_own_leaves_what_an_ordinary_loop_leaves(at, mode, tmp_path):
    armed = tmp_path / "armed"  # a file, which no guard follows

    def loss_fn(model, batch):
        loss = _loss_of(model, batch)
        if armed.exists():
            armed.unlink()
            raise ValueError("once")
        return loss

    def run(mode):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 2))
        optimizer = adamw(model.parameters(), lr=0.01)
        trainer = None if mode is None else Trainer(TrainStep(model, loss_fn, optimizer), mode)
        losses = []
        for number in range(10):
            if number == at:
                armed.touch()
            try:
                if trainer is not None:
                    losses.append(trainer.train_step(_batch_of(number)).item())
                    continue
                optimizer.zero_grad()
                loss = loss_fn(model, _batch_of(number))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            except ValueError:
                losses.append(None)
        return losses

    assert run(mode) == run(None)


@pytest.mark.parametrize("mode", ["eager", "capture", "replay"])
@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(8, 2, bias=False), lambda: torch.nn.Linear(8, 2)], ids=["one", "two"])
def test_gradients_of_a_single_parameter_are_clipped_in_every_mode(make, mode):
    def run(mode):
        torch.manual_seed(0)
        model = make()
        step = TrainStep(model, _loss_of, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=0.1)
        return Trainer(step, mode).fit(_batch_of, 8)

    assert run(mode) == run("eager")


def test_a_loss_that_takes_gradients_says_how_it_can_be_evaluated():
    def penalized(model, batch):
        x = batch["x"].clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(model(x), batch["y"])
        return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()

    def enabled(model, batch):
        with torch.enable_grad():
            return penalized(model, batch)

    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserInputError, match=r"evaluate: the loss asks for gradients .* torch\.enable_grad\(\)"):
        Trainer(TrainStep(model, penalized, optimizer)).evaluate([_batch_of(0)])
    assert Trainer(TrainStep(model, enabled, optimizer)).evaluate([_batch_of(0)]) > 0
