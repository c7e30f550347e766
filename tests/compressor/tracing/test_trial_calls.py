"""Calibration calls run to their end on copies: what they leave is what plain calls leave, and no other pass sees what they wrote."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.data import call_model
from compressor.tracing import Engine, trace

WATCHED = tuple(f"layers.{number}.{name}" for number in range(3) for name in ("up", "down"))
STACK: list[Any] = []
LOCAL = threading.local()
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)


class Block(nn.Module):
    """A layer whose last product is a linear one, between a beginning and an end that belong together."""

    def __init__(self, around: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.around = around
        self.scale = 1.0
        self.stack: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.around is not None:
            self.around[0](self)
        made = x + self.down(torch.tanh(self.up(x)) * self.scale)
        if self.around is not None:
            self.around[1](self)
        return made


class Model(nn.Module):
    def __init__(self, *args: Any, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(block(*args) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden) if mask is None else layer(hidden, mask)
        return self.head(hidden)


def ids(*shapes: tuple[int, int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"ids": torch.randint(0, 32, shape, generator=generator)} for shape in shapes or ((2, 5), (1, 7), (3, 4))]


@contextmanager
def seen_by(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect what watched modules are given."""
    seen: dict[str, list[Tensor]] = {name: [] for name in WATCHED}

    def note(name: str) -> Callable[..., None]:
        return lambda module, args: seen[name].append(args[0].clone())

    with ExitStack() as hooks:
        for name in WATCHED:
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(note(name)).remove)
        yield seen


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = list(left.values()), list(right.values())
    if isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert torch.equal(left, right)


def check(model: nn.Module, batches: list[dict[str, Tensor]], engine: Engine) -> None:
    """Calibrate stage by stage; what hooks see and what comes out is what plain forwards give."""
    with torch.no_grad(), seen_by(model) as expected:
        outputs = [call_model(model, copy.deepcopy(batch)) for batch in batches]
    calibrated: dict[str, list[Tensor]] = {}
    plan = trace(model, batches, engine=engine)
    with seen_by(model) as seen, plan.run(batches, keep_outputs=True, watched=lambda: WATCHED) as run:
        for stage in run:
            stage.calibrate()
            calibrated |= {name: list(seen[name]) for name in stage.module_names if name in seen}
            stage.propagate()
    assert_same(calibrated, expected)
    assert_same(run.outputs, outputs)


def swap(layer: Any) -> None:
    layer.held = layer.up.weight
    layer.up.weight = nn.Parameter(layer.up.weight * 2)


def swap_back(layer: Any) -> None:
    layer.up.weight = layer.held
    del layer.held


def set_depth(change: int) -> Callable[[Any], Any]:
    return lambda layer: VARIABLE.set(VARIABLE.get() + change)


def local_depth(change: int) -> Callable[[Any], Any]:
    return lambda layer: setattr(LOCAL, "depth", getattr(LOCAL, "depth", 0) + change)


def hang(layer: Any) -> None:
    object.__setattr__(layer, "handle", layer.up.register_forward_hook(lambda module, args, output: output * 1.5))


AROUND: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "weights are swapped": (swap, swap_back),
    "bytes are written and put back": (lambda layer: layer.up.weight.data.mul_(2), lambda layer: layer.up.weight.data.mul_(0.5)),
    "a hook is registered and removed": (hang, lambda layer: layer.handle.remove()),
    "a global list": (lambda layer: STACK.append(layer), lambda layer: STACK.pop()),
    "a list of the module": (lambda layer: layer.stack.append(1), lambda layer: layer.stack.pop()),
    "an attribute": (lambda layer: setattr(layer, "scale", 2.0), lambda layer: setattr(layer, "scale", 1.0)),
    "an attribute past the module": (
        lambda layer: object.__setattr__(layer, "scale", 2.0),
        lambda layer: object.__setattr__(layer, "scale", 1.0),
    ),
    "a class attribute": (lambda layer: setattr(Block, "depth", 1), lambda layer: delattr(Block, "depth")),
    "a thread's own": (local_depth(1), local_depth(-1)),
    "a context variable": (set_depth(1), set_depth(-1)),
    "gradients are switched": (lambda layer: torch.set_grad_enabled(True), lambda layer: torch.set_grad_enabled(False)),
}


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("what", AROUND)
def test_what_a_target_begins_it_also_ends(what: str, engine: Engine) -> None:
    model = Model(AROUND[what]).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, depth = dict(model.named_parameters()), VARIABLE.get()
    check(model, ids(), engine)
    assert not STACK and not any(layer.stack for layer in model.layers) and not hasattr(Block, "depth")
    assert getattr(LOCAL, "depth", 0) == 0 and VARIABLE.get() == depth
    assert all(layer.scale == 1.0 and not layer.up._forward_hooks for layer in model.layers)
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert_same(dict(model.state_dict()), before)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda x: x.data.mul_(2),
    "detached": lambda x: x.detach().mul_(2),
    "numpy": lambda x: x.numpy().__imul__(2),
    "in place": lambda x: x.mul_(2),
    "a slice": lambda x: x[..., :3].data.zero_(),
    "the storage": lambda x: x.untyped_storage().fill_(0),
    "out": lambda x: torch.mul(x, 2, out=x),
}
WHEN: dict[str, Callable[[Tensor], bool]] = {
    "always": lambda x: True,
    "short": lambda x: x.shape[1] == 4,
    "by value": lambda x: float(x[0, 0, 0]) > 0.3,
}


class Writing(Block):
    """Writes to its input behind its last linear, where torch may not see it, in some batches."""

    def __init__(self, how: str, when: str) -> None:
        super().__init__()
        self.how, self.when = how, when

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x).clone()
        if WHEN[self.when](x):
            WRITES[self.how](x)
        return made


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_an_input_reaches_no_other_pass(how: str, when: str, engine: Engine) -> None:
    check(Model(how, when, block=Writing).eval(), ids((2, 5), (1, 7), (3, 4), (2, 4)), engine)


class Masked(Block):
    """Writes to a mask that all layers share, past torch, where it holds a zero."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        made = super().forward(x * mask[..., None])
        if bool((mask == 0).any()):
            mask.numpy()[...] *= 0.5
        return made


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("padded", [0, 2])
def test_what_is_written_to_a_shared_mask_is_written_once_for_each_layer(padded: int, engine: Engine) -> None:
    batches = ids((2, 5), (1, 7), (3, 4))
    for number, batch in enumerate(batches):
        batch["mask"] = torch.ones(batch["ids"].shape)
        if number == padded:
            batch["mask"][0, -1] = 0
    check(Model(block=Masked).eval(), batches, engine)


class Views(nn.Module):
    """Takes a tensor and a view of it, writes through one and reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        part.data.mul_(2)
        return x + self.down(torch.tanh(self.up(x)))


class Viewing(Model):
    def __init__(self) -> None:
        super().__init__(block=Views)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, hidden[..., :4])
        return self.head(hidden)


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_views_of_one_memory_stay_views_of_one_memory(engine: Engine) -> None:
    check(Viewing().eval(), ids(), engine)


class _Stops(ValueError):
    """What a layer raises for some samples, and its caller handles."""


class _Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = x + torch.tanh(self.a(x))
        if x.shape[1] == 3:
            raise _Stops
        return made


class _Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Raising() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with contextlib.suppress(_Stops):
                x = layer(x)
        return x


def _seen_by_a_hook(engine: Engine, hook: Callable[[nn.Module, Any], None]) -> None:
    batches = [torch.randn(1, length, 4) for length in (3, 5, 3)]
    with trace(_Caller().eval(), batches, ["_Raising"], engine=engine).run(batches) as run:
        for stage in run:
            handle = stage.module.a.register_forward_pre_hook(hook)
            stage.calibrate()
            handle.remove()
            stage.propagate()


def test_hooks_see_a_sample_once_whose_layer_raises() -> None:
    seen: list[int] = []
    _seen_by_a_hook("suspend", lambda module, args: seen.append(args[0].shape[1]))
    assert seen == [3, 5, 3, 3, 5, 3]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_error_of_a_calibration_hook_comes_out_and_at_once(at: int) -> None:
    seen: list[int] = []

    def statistics(module: nn.Module, args: Any) -> None:
        seen.append(args[0].shape[1])
        if len(seen) == at:
            raise ZeroDivisionError("a bug in the statistics")

    with pytest.raises(ZeroDivisionError, match="a bug in the statistics"):
        _seen_by_a_hook("suspend", statistics)
    assert len(seen) == at
