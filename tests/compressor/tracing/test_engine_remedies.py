"""What a refusal says is true, and what it offers works."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.tracing import Engine, trace

WIDTH = 4
TARGETS = ["re:layers[.][0-9]$"]
Way = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.more: Callable[[Tensor], Any] = lambda x: x
        self.less: Callable[[Any], Tensor] = lambda x: x

    def forward(self, x: Any) -> Any:
        return self.more(torch.tanh(self.lin(self.less(x))))


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.way = way
        self.generator, self.dice = torch.Generator().manual_seed(1), random.Random(2)
        self.numbers, self.older = np.random.default_rng(3), np.random.RandomState(4)
        self.generators = [torch.Generator().manual_seed(5)]
        self.holder = types.SimpleNamespace(generator=torch.Generator().manual_seed(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def batches() -> list[Batch]:
    numbers = torch.Generator().manual_seed(5)
    return [(torch.randn(rows, 5, WIDTH, generator=numbers),) for rows in (2, 1, 3)]


def check(model: nn.Module, engine: Engine) -> None:
    """Compress stage by stage; the forwards give what plain ones of the compressed model give, each from the state at the start."""
    state = [torch.Generator.get_state(one) for one in (model.generator, *model.generators)]  # type: ignore[union-attr, arg-type, misc]
    with trace(model, batches(), TARGETS, engine=engine).run(batches(), keep_outputs=True) as run:
        for stage in run:
            hook = stage.module.register_forward_pre_hook(lambda *args: None)
            stage.calibrate()
            hook.remove()
            stage.module.lin.weight.data.mul_(0.5)  # type: ignore[union-attr, operator]
            stage.propagate()
    assert all(map(torch.equal, state, [one.get_state() for one in (model.generator, *model.generators)]))  # type: ignore[union-attr, operator, misc]
    for got, batch in zip(run.outputs, batches(), strict=True):
        fresh: Any = Model(model.way)  # type: ignore[arg-type]
        fresh.load_state_dict(model.state_dict())
        for layer, like in zip(fresh.layers, model.layers, strict=True):  # type: ignore[arg-type]
            layer.more, layer.less = like.more, like.less
        with torch.no_grad():
            assert torch.equal(got, call_model(fresh.eval(), batch))


def around(make: Callable[[Any, Tensor], Any]) -> Way:
    def way(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x * make(model, x))
        return x

    return way


def weight_behind(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        x = x if layer.lin.weight.abs().max() > 0.3 else x * 2
    return x


def weight_before(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x if layer.lin.weight.abs().max() > 0.3 else x * 2)
    return x


def number_of_a_weight(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        x = x if round(layer.lin.weight.sum().item()) > 1 else x * 2
    return x


@pytest.mark.parametrize("way", [weight_behind, weight_before, number_of_a_weight])
def test_a_guard_on_a_weight_does_not_send_from_engine_to_engine(way: Way) -> None:
    for engine in ("graph", "suspend", "auto"):
        with pytest.raises(TracingError, match=r"use pipeline=\"basic\" or other sequential targets") as told:
            trace(Model(way).eval(), batches(), TARGETS, engine=engine)  # type: ignore[arg-type]
        assert "only engine=" not in str(told.value)
        assert "use engine=" not in str(told.value)


def recorded(model: Any, x: Tensor) -> Tensor:
    with torch.profiler.record_function("layers"):
        for layer in model.layers:
            x = layer(x)
    return x


def test_a_handle_around_layers_is_no_argument_and_suspend_follows_it() -> None:
    with pytest.raises(TracingError, match=r"^ScriptObject: this value, which lives on behind a stage, .*use engine=\"suspend\""):
        check(Model(recorded).eval(), "graph")
    for engine in ("suspend", "auto"):
        check(Model(recorded).eval(), engine)  # type: ignore[arg-type]


# what code between layers draws, and the engines that follow it
DRAWS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "an attribute": (lambda model, x: torch.rand(1, generator=model.generator), "suspend auto"),
    "in place": (lambda model, x: torch.empty(1).uniform_(generator=model.generator), "suspend auto"),
    "in a list": (lambda model, x: torch.rand(1, generator=model.generators[0]), "suspend auto"),
    "of Python": (lambda model, x: model.dice.random(), "suspend"),
    "of numpy": (lambda model, x: float(model.numbers.random()), "suspend"),
    "of numpy, the older": (lambda model, x: float(model.older.rand()), "suspend"),
    "as often as rows": (lambda model, x: torch.rand(len(x), 1, 1, generator=model.generator), "suspend auto"),
    "in an object": (lambda model, x: torch.rand(1, generator=model.holder.generator), ""),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_every_sample_draws_from_the_generators_as_they_were_or_is_refused(draw: str) -> None:
    make, right = DRAWS[draw]
    for engine in ("suspend", "auto"):
        if engine in right.split():
            check(Model(around(make)).eval(), engine)  # type: ignore[arg-type]
        elif not right:
            with pytest.raises(TracingError, match="an object or a generator in it"):
                check(Model(around(make)).eval(), engine)  # type: ignore[arg-type]


def test_the_graph_engine_offers_suspend_for_a_generator() -> None:
    with pytest.raises(TracingError, match=r"draws from a random generator of its own.*engine=\"suspend\""):
        trace(Model(around(DRAWS["an attribute"][0])).eval(), batches(), TARGETS, engine="graph")


def test_layers_that_draw_from_a_generator_of_the_model_find_it_as_it_was_in_both_passes() -> None:
    def way(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            layer.more = lambda x: x + torch.rand(1, generator=model.generator)
            x = layer(x)
        return x

    seen: dict[str, list[Tensor]] = {}
    model = Model(way).eval()
    with trace(model, batches(), TARGETS, engine="suspend").run(batches()) as run:
        for stage in run:
            take = lambda module, args, output, name=stage.name: seen.setdefault(name, []).append(output.clone())  # noqa: E731
            hook = stage.module.register_forward_hook(take)
            stage.calibrate()
            stage.propagate()
            hook.remove()
    for outputs in seen.values():
        assert all(map(torch.equal, outputs[: len(batches())], outputs[len(batches()) :]))


def as_jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)


# what layers hand on, and how the next one takes it
PASSED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "jagged": (as_jagged, lambda z: z.to_padded_tensor(0.0)),
    "packed": (lambda x: pack_padded_sequence(x, [5] * len(x), batch_first=True), lambda z: pad_packed_sequence(z, batch_first=True)[0]),  # type: ignore[arg-type]
}


def handing(more: Callable[[Tensor], Any], less: Callable[[Any], Tensor]) -> nn.Module:
    def way(model: Any, x: Tensor) -> Tensor:
        passed = more(x)
        for layer in model.layers:
            passed = layer(passed)
        return less(passed)

    model = Model(way).eval()
    for layer in model.layers:
        layer.more, layer.less = more, less  # type: ignore[assignment]
    return model


def check_words(error: TracingError) -> None:
    told = str(error)
    assert 'engine="suspend"' in told
    assert told.startswith("test_engine_remedies.py:")
    assert not any(inside in told for inside in ("symbolic.py", "site-packages", "meta tensor", "list or tuple", "when traced"))


@pytest.mark.parametrize("kind", PASSED)
def test_tensors_of_other_kinds_are_refused_without_the_insides_of_torch_and_suspend_follows_them(kind: str) -> None:
    with pytest.raises(TracingError, match="recording it raised") as told:
        trace(handing(*PASSED[kind]), batches(), TARGETS, engine="graph")
    check_words(told.value)
    check(handing(*PASSED[kind]), "suspend")


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors_between_layers_are_refused_without_the_insides_of_the_recorder() -> None:
    def way(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(masked_tensor(x, x > 0).get_data())
        return x

    with pytest.raises(TracingError, match=r"recording it raised TypeError in torch.masked") as told:
        trace(Model(way).eval(), batches(), TARGETS, engine="graph")
    check_words(told.value)
    check(Model(way).eval(), "suspend")


def test_what_a_model_itself_raises_while_it_is_recorded_is_told_in_its_words() -> None:
    def way(model: Any, x: Tensor) -> Tensor:
        if type(x.shape[0]) is not int:
            raise ValueError("rows are counted by int")
        return recorded(model, x)

    with pytest.raises(
        TracingError, match=r"test_engine_remedies.py:[0-9]+: recording it raised ValueError: rows are counted by int; use engine"
    ):
        trace(Model(way).eval(), batches(), TARGETS, engine="graph")


# constants that layers give back beside tensors
CONSTANTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], str]] = {
    "a word": (lambda x: [x, None, "s"], lambda z: z[0], "'s'"),
    "deep": (lambda x: (x, (None, [x * 2, {"k": 1.5}])), lambda z: z[0] + z[1][1][0] * z[1][1][1]["k"], "the length 2"),
    "an object": (lambda x: collections.UserDict(h=x), lambda z: z["h"], "how a UserDict is built"),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_constant_beside_tensors_is_not_called_computed(kind: str) -> None:
    more, less, what = CONSTANTS[kind]
    with pytest.raises(TracingError, match=rf"Python goes by {what}, which layers.[01] gives back beside tensors") as told:
        trace(handing(more, less), batches(), TARGETS, engine="graph")
    check_words(told.value)
    check(handing(more, less), "suspend")


# what says something of a weight and makes nothing of it
MARKS: dict[str, Callable[[Tensor], object]] = {
    "requires_grad_": lambda weight: weight.requires_grad_(False),
    "requires_grad": lambda weight: setattr(weight, "requires_grad", False),
    "asked": lambda weight: weight.requires_grad,
    "is_leaf": lambda weight: weight.is_leaf,
}


@pytest.mark.parametrize("mark", MARKS)
def test_marking_a_weight_is_no_use_of_it(mark: str) -> None:
    def way(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            MARKS[mark](layer.lin.weight)
        for layer in model.layers:
            x = layer(x)
            MARKS[mark](layer.lin.weight)
        return x

    for engine in ("graph", "suspend", "auto"):
        model = Model(way).eval()
        check(model, engine)  # type: ignore[arg-type]
        assert all(layer.lin.weight.requires_grad for layer in model.layers)  # type: ignore[union-attr]
