"""A tensor that passes from layer to layer past the arguments, the same in all batches but one: refused before any stage.

A few batches would prove nothing, and Python reads no value.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.errors import TracingError
from compressor.pipelines.offload.activation_store import ActivationStore
from compressor.tracing import Engine, trace

WIDTH = 4
BUS: dict[str, Any] = {}
FLOOR = 8.0


def largest(x: Tensor, so_far: Tensor) -> Tensor:
    return torch.maximum(so_far, x.abs().max())


def carried(layer: Any, x: Tensor) -> Tensor:
    """What the layer before cut off is taken away; a new tensor in a global."""
    y = x - 2 * BUS.get("over", torch.zeros(()))
    BUS["over"] = torch.relu(y - FLOOR)
    return y


def in_attribute(layer: Any, x: Tensor) -> Tensor:
    return x / layer.held.copy_(largest(x, layer.held))


def in_list(layer: Any, x: Tensor) -> Tensor:
    return x / layer.several[0].copy_(largest(x, layer.several[0]))


def in_view(layer: Any, x: Tensor) -> Tensor:
    part = layer.several[0].view(1)
    return x / part.copy_(largest(x, part))


def in_buffer(layer: Any, x: Tensor) -> Tensor:
    return x / layer.kept.copy_(largest(x, layer.kept))


def as_it_is(layer: Any, x: Tensor) -> Tensor:
    """Memory of its own, written to in place, is nobody else's."""
    y = x + 1
    return y.mul_(2).add_(torch.zeros_like(y).copy_(x.topk(1).values))


def leave(x: Tensor) -> Tensor:
    """Returns what it was given; another tensor stays behind in a global."""
    BUS["over"] = torch.relu(x.abs().max() - FLOOR)
    return x


def count(x: Tensor) -> Tensor:
    """Leaves a number that the graph engine follows: how many are loud."""
    BUS["over"] = torch.masked_select(x, x.abs() > FLOOR).numel()
    return x


def take(x: Tensor) -> Tensor:
    return x - 2 * BUS["over"]


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return leave(x)


class Layer(nn.Module):
    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.way = nn.Linear(WIDTH, WIDTH), way
        self.held, self.several = torch.tensor(FLOOR), [torch.tensor(FLOOR)]
        self.register_buffer("kept", torch.tensor(FLOOR))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x) + torch.tanh(self.lin(x))


class Model(nn.Module):
    def __init__(self, way: Callable[[Any, Tensor], Tensor], around: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(as_it_is if around else way) for _ in range(3))
        self.way = way if around else None
        self.held, self.several = torch.tensor(FLOOR), [torch.tensor(FLOOR)]
        self.register_buffer("kept", torch.tensor(FLOOR))

    def forward(self, x: Tensor) -> Tensor:
        BUS.clear()
        for layer in self.layers:
            x = layer(x if self.way is None else self.way(self, x))
        return x


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(0.1 * torch.randn(2, WIDTH, generator=generator) * size,) for size in (1, 1, 1, 1, 500, 1)]


def run(model: nn.Module, targets: list[str], engine: Engine) -> Any:
    given = batches()
    plan = trace(model.eval(), given[:1], targets, engine=engine)
    with ActivationStore(torch.device("cpu"), 1 << 20) as store, plan.run(given, store if plan.engine == "graph" else None) as running:
        for stage in running:
            stage.calibrate()
            stage.propagate()
    return plan


@pytest.mark.parametrize("engine", ["graph", "suspend", "auto"])
@pytest.mark.parametrize(
    ("way", "targets"),
    [(carried, "Layer"), *((way, targets) for way in (in_attribute, in_list, in_view, in_buffer) for targets in ("Layer", "Linear"))],
)
def test_a_tensor_that_is_another_in_one_batch_is_refused(way: Any, targets: str, engine: Engine) -> None:
    with pytest.raises(TracingError):
        run(Model(way, around=False), [targets], engine)


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_the_code_between_layers_is_looked_at_too(engine: Engine) -> None:
    with pytest.raises(TracingError):
        run(Model(in_attribute, around=True), ["Layer"], engine)


class Around(nn.Module):
    """Leaves a tensor before the first layer, and the last one takes it, or code before it does."""

    def __init__(self, leaves: Callable[[Tensor], Tensor] | None, takes: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        ways = (as_it_is, as_it_is, as_it_is if takes else lambda layer, x: take(x))
        self.layers = nn.ModuleList(Layer(way) for way in ways)
        self.leaves, self.takes = leaves, takes
        if leaves is None:
            self.layers[0].register_forward_pre_hook(lambda layer, args: (leave(args[0]),))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.leaves is None else self.leaves(x)
        for place, layer in enumerate(self.layers):
            x = layer(self.takes(x) if self.takes is not None and place == 2 else x)
        return x


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("leaves", [leave, count, Leaves(), None], ids=["code", "number", "module", "hook"])
@pytest.mark.parametrize("takes", [None, take], ids=["layer", "code"])
def test_whoever_leaves_it_the_samples_get_their_own_or_it_is_refused(leaves: Any, takes: Any, engine: Engine) -> None:
    model, given, got = Around(leaves, takes).eval(), batches(), []
    try:
        plan = trace(model, given[:1], ["Layer"], engine=engine)
        with plan.run(given, keep_outputs=True) as running:
            for stage in running:
                stage.propagate()
            got = running.outputs
    except TracingError:
        return
    assert takes is not None and engine == "graph"  # the recorder knows what code between layers makes, wherever it is left
    with torch.no_grad():
        assert all(torch.equal(one, model(*batch)) for one, batch in zip(got, given, strict=True))


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_memory_of_its_own_costs_no_wider_proof(engine: Engine) -> None:
    assert "all batches" not in run(Model(as_it_is, around=False), ["Layer"], engine).report()


class Caching(nn.Module):
    """Keeps what the first batch of a size had, before the first layer."""

    cache_of_class: dict[int, Any] = {}  # noqa: RUF012 - one for all

    def __init__(self, cache: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(as_it_is) for _ in range(2))
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        found, size = self.cache_of_class if self.cache is None else self.cache, len(x)
        if isinstance(found, set):
            x = x if size in found else 2 * x
            found.add(size)
        elif isinstance(found, SimpleNamespace):
            found.mean = getattr(found, "mean", None) if getattr(found, "size", size) == size else None
            found.mean, found.size = x.mean() if found.mean is None else found.mean, size
            x = x + found.mean
        else:
            kept = found[size] if isinstance(found, list) else found.get(size)
            found[size] = x.mean() if kept is None else kept
            x = x + found[size]
        for layer in self.layers:
            x = layer(x)
        return x


CACHES = {
    "dict": dict,
    "ordered": OrderedDict,
    "list": lambda: [None] * 4,
    "object": SimpleNamespace,
    "set": set,
    "class": lambda: None,
}


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
def test_what_only_a_later_batch_finds_is_right_or_refused(cache: Any, engine: Engine) -> None:
    """The proof takes a batch of each size, and none of them finds what another has left."""
    Caching.cache_of_class.clear()
    generator, alone = torch.Generator().manual_seed(0), []
    given = [(torch.randn(rows, WIDTH, generator=generator),) for rows in (3, 2, 3, 3)]
    for batch in given:
        Caching.cache_of_class.clear()
        with torch.no_grad():
            alone.append(Caching(cache()).eval()(*batch))
    Caching.cache_of_class.clear()
    model = Caching(cache()).eval()
    try:
        plan = trace(model, given, ["Layer"], engine=engine)
    except TracingError:
        return
    assert engine == "graph"
    with plan.run(given, keep_outputs=True) as running:
        for stage in running:
            stage.propagate()
    assert all(torch.equal(one, other) for one, other in zip(running.outputs, alone, strict=True))


class Later(nn.Module):
    """Keeps something of its fourth size in an object, and uses it at the fifth: a proof takes neither size where two others come first."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.kept = inside, SimpleNamespace(mean=None)
        self.layers = nn.ModuleList(Layer(self._step if inside and place == 0 else as_it_is) for place in range(2))

    def _step(self, layer: Any, x: Tensor) -> Tensor:
        return later(self.kept, x)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.inside else later(self.kept, x)
        for layer in self.layers:
            x = layer(x)
        return x


def later(kept: SimpleNamespace, x: Tensor) -> Tensor:
    if len(x) == 5:
        kept.mean = x.mean()
    return x if len(x) != 6 or kept.mean is None else x + kept.mean


def sizes_in_turn() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, WIDTH, generator=generator),) for rows in (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_what_a_batch_outside_of_the_proof_leaves_before_the_layers_is_refused(engine: Engine) -> None:
    with pytest.raises(TracingError, match=r"differs|do not give"):
        trace(Later(inside=False).eval(), sizes_in_turn(), ["Layer"], engine=engine, max_variants=1)


def test_what_a_layer_leaves_in_a_later_batch_is_found_before_by_suspend_and_named_afterwards_by_the_graph() -> None:
    with pytest.raises(TracingError, match="do not give"):
        trace(Later(inside=True).eval(), sizes_in_turn(), ["Layer"], engine="suspend")
    with pytest.raises(TracingError, match="differs"):  # here the proof takes the batch that leaves something
        trace(Later(inside=True).eval(), [sizes_in_turn()[place] for place in (0, 3, 4)], ["Layer"], engine="graph")
    model, given = Later(inside=True).eval(), sizes_in_turn()
    plan = trace(model, given, ["Layer"], engine="graph")
    named = []
    for batches_of_run in (given[:3], given):
        with plan.run(batches_of_run) as running:
            for stage in running:
                stage.propagate()
        named.append(plan.unproved)
        model.kept.mean = None
    assert named == ["", "kept"]


class Writing(nn.Module):
    """Writes to a buffer, an array or a module in a list at its fourth size, before the first layer; later batches find it."""

    def __init__(self, write: Callable[[Any], object], read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.read = write, read
        self.register_buffer("seen", torch.zeros(2))
        self.array, self.beside = np.zeros(2), [nn.Module()]
        self.beside[0].n = 0.0
        self.layers = nn.ModuleList(Layer(as_it_is) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = written_at_five(self, x)
        for layer in self.layers:
            x = layer(x)
        return x


def written_at_five(model: Writing, x: Tensor) -> Tensor:
    if len(x) == 5:
        model.write(model)
    return x * (1 + model.read(model))


WRITES: dict[str, tuple[Callable[[Any], object], Callable[[Any], Any]]] = {
    "buffer": (lambda model: model.seen.fill_(3.0), lambda model: model.seen[0].clone()),
    "buffer through numpy": (lambda model: model.seen.numpy().fill(3.0), lambda model: model.seen[0].clone()),
    "array": (lambda model: model.array.fill(3.0), lambda model: torch.tensor(model.array[0])),
    "module in a list": (lambda model: setattr(model.beside[0], "n", 3.0), lambda model: torch.tensor(model.beside[0].n)),
}


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("place", WRITES)
@pytest.mark.parametrize("first", [0, 3])
def test_what_a_batch_writes_is_refused_or_each_sample_has_its_own(first: int, place: str, engine: Engine) -> None:
    """The last of several rounds of a proof is not the end of the run: batches behind it meet what is left."""
    given, got = [*sizes_in_turn()[first:], *(sizes_in_turn()[:4])], []
    model = Writing(*WRITES[place]).eval()
    try:
        plan = trace(model, given, ["Layer"], engine=engine, max_variants=1)
        with plan.run(given, keep_outputs=True) as running:
            for stage in running:
                stage.propagate()
            got = running.outputs
    except TracingError:
        return
    with torch.no_grad():
        assert all(torch.equal(one, Writing(*WRITES[place]).eval()(*batch)) for one, batch in zip(got, given, strict=True))


class Back(nn.Module):
    """Leaves 3 where a mask is given, and 0 where none is, at one length: the first batch writes 0, one in the middle 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.box = [0.0]
        self.layers = nn.ModuleList(Layer(as_it_is) for _ in range(2))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = back(self, x, attention_mask)
        for layer in self.layers:
            x = layer(x)
        return x


def back(model: Back, x: Tensor, mask: Tensor | None) -> Tensor:
    if len(x) == 4:
        model.box[0] = 0.0 if mask is None else 3.0
    return x * (1 + model.box[0])


def test_no_batch_of_a_proof_runs_again_before_those_behind_it_in_the_run() -> None:
    """The first one had taken part in each round of four, and took back what another had left for the next round."""
    generator = torch.Generator().manual_seed(0)
    given = [{"x": torch.randn(rows, WIDTH, generator=generator)} for rows in (4, 3, 5, 4, 3)]
    given[3]["attention_mask"] = torch.zeros(4)
    with pytest.raises(TracingError, match="verify: batch 4"):
        trace(Back().eval(), given, ["Layer"], engine="graph", verify="all")


class Installing(Later):
    """Installs a hook at its first forward, and its class gets annotations when somebody asks for them."""

    def __init__(self) -> None:
        super().__init__(inside=False)
        self.layers[0].has_hook = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.layers[0].has_hook:
            self.layers[0].has_hook = True
            self.layers[0].register_forward_hook(lambda layer, args, output: None)
        assert not Installing.__annotations__
        return super().forward(x)


def test_hooks_that_a_forward_installs_and_what_python_adds_to_classes_count_for_nothing() -> None:
    model, given = Installing().eval(), sizes_in_turn()[:3]
    plan = trace(model, given, ["Layer"], engine="suspend")
    with plan.run(given) as running:
        for stage in running:
            stage.propagate()
    assert not plan.widened and not plan.unproved


def handed(layer: Any, x: Tensor) -> Tensor:
    """Keeps something in the fourth batch, and takes it in the fifth: a graph for each, and both are proved in other rounds."""
    if len(x) == 4:
        layer.several[:] = [x.mean(0)]
    return x + layer.several[0] if len(x) == 5 else x


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_all_batches_meet_what_any_of_them_has_left(engine: Engine) -> None:
    given = [(torch.ones(rows, WIDTH),) for rows in (1, 2, 3, 4, 5)]
    model = nn.Sequential(Layer(as_it_is), Layer(handed), Layer(as_it_is)).eval()
    with pytest.raises(TracingError):
        trace(model, given, ["Layer"], engine=engine, verify="all")
    plan = trace(model, given[:1], ["Layer"], engine=engine, verify="all")
    with pytest.raises(TracingError):
        for several in (*([one] for one in given[:4]), given):  # each was proved, but alone
            with plan.run(several) as running:
                for stage in running:
                    stage.propagate()


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_what_a_hook_of_the_model_keeps_on_a_module_is_the_samples_own(engine: Engine) -> None:
    model, given = Model(as_it_is, around=False).eval(), batches()
    first, last = model.layers[0], model.layers[2]
    first.register_forward_pre_hook(lambda layer, args: setattr(layer, "held", torch.relu(args[0].abs().max() - FLOOR)))
    vars(last)["way"] = lambda layer, x: x - first.held
    with trace(model, given, ["Layer"], engine=engine).run(given, keep_outputs=True) as running:
        for stage in running:
            hook = stage.module.register_forward_pre_hook(lambda layer, args: setattr(layer, "seen", args[0]))
            stage.calibrate()
            hook.remove()
            stage.propagate()
    with torch.no_grad():
        assert all(torch.equal(got, model(*batch)) for got, batch in zip(running.outputs, given, strict=True))
