"""What Python decides becomes a guard with file and line; what cannot be followed is refused with a remedy, never frozen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compressor
from compressor.errors import TracingError
from compressor.tracing import Plan, trace
from tests.compressor.tracing.graph.conftest import Batch, Stacked, build, equal, toy_batches

Glue = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Glued(Stacked):
    """The toy with a piece of Python before, between or behind its layers."""

    glue: Any = None
    late = False

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = self.embed(ids)
        if not self.late:
            hidden = type(self).glue(self, ids, hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(type(self).glue(self, ids, hidden) if self.late else hidden)


def glued(glue: Glue, late: bool = False) -> Any:
    return build(type("Glued", (Glued,), {"glue": staticmethod(glue), "late": late}))


def run(plan: Plan, batches: list[Batch]) -> list[Any]:
    with plan.run(batches, keep_outputs=True) as running:
        for stage in running:
            stage.propagate()
    return running.outputs


def value_guards(plan: Plan) -> list[Any]:
    return [guard for guard in plan.guards if guard.is_value]


def check(model: nn.Module, plan: Plan, batches: list[Batch]) -> None:
    with torch.no_grad():
        assert equal(run(plan, batches), [model(**batch) for batch in batches])


FOLLOWED: dict[str, Glue] = {
    "branch on a size": lambda self, ids, x: x * 2 if ids.shape[1] > 4 else x,
    "range over a size": lambda self, ids, x: sum((x * i for i in range(ids.shape[0])), x),
    "list by size": lambda self, ids, x: x * [1.0, 2.0, 3.0][ids.shape[1] % 3],
    "dict by size": lambda self, ids, x: x * {4: 2.0, 5: 3.0, 7: 4.0}[ids.shape[1]],
    "text of a size": lambda self, ids, x: x * len(f"{ids.shape[1]:>04d}" + str(ids.shape[0]) * ids.shape[0]),
    "number of a tensor": lambda self, ids, x: x * ids.sum().item() / 7,
    "truth of a tensor": lambda self, ids, x: x + 1 if (ids > 20).any() else x,
    "iterating a tensor": lambda self, ids, x: torch.stack([row * (1 + i) for i, row in enumerate(x)]),
    "list of a tensor": lambda self, ids, x: x * sum(ids[0].tolist()),
    "divided sizes": lambda self, ids, x: (
        x[:, : -(-ids.shape[1] // 2)].repeat_interleave(2, 1)[:, : ids.shape[1]] * divmod(ids.shape[1], 3)[1]
    ),
    "strides": lambda self, ids, x: x.contiguous().as_strided(x.shape, x.stride()),
    "number of dimensions": lambda self, ids, x: x * (2 if x[0].squeeze().dim() > 1 else 3),
    "selection by mask": lambda self, ids, x: x + x[ids > 10].sum() * x[ids > 10].shape[0],
    "minimum of sizes": lambda self, ids, x: x * min(ids.shape[1], 5) + max(3, *ids.shape),
    "square root of a size": lambda self, ids, x: x / ids.shape[1] ** 0.5,
    "in-place on a view": lambda self, ids, x: x.clone().index_fill_(1, torch.tensor([0]), 1.0).mul_(2),
    "closure": lambda self, ids, x: torch.func.vmap(lambda row: row * x.mean())(x),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", FOLLOWED)
def test_python_between_the_layers_is_followed_for_every_shape(name: str, late: bool) -> None:
    model, batches = glued(FOLLOWED[name], late), toy_batches()
    plan = trace(model, batches[:1], engine="auto", verify="off")
    assert late or plan.engine == "graph", plan.why
    check(model, plan, batches)


def _square(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() ** 2)


REFUSED: dict[str, tuple[Glue, str]] = {
    "numpy": (lambda self, ids, x: _square(x), r"test_graph_guards.py:\d+: Tensor.numpy takes values out of torch.*leaf\(fn\)"),
    "unseen tensor": (lambda self, ids, x: x + torch.Tensor([1.0]), r"tensor \(1,\) float32 was not made by a recorded call"),
    "own generator": (lambda self, ids, x: x + torch.rand(1, generator=torch.Generator()), "draws from a random generator of its own"),
    "python random": (lambda self, ids, x: x + random.random(), "draws from the random generators of Python or numpy"),
    "seeding": (lambda self, ids, x: (torch.manual_seed(ids.shape[1] + 99), x)[1], "seeds torch's random generator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_and_auto_takes_the_other_engine(name: str) -> None:
    glue, message = REFUSED[name]
    model, batches = glued(glue), toy_batches()
    # A named function would be made a leaf; a lambda cannot.
    if name != "numpy":
        with pytest.raises(TracingError, match=message):
            trace(model, batches, engine="graph")
        plan = trace(model, batches)
        assert plan.engine == "suspend" and "the graph engine refused" in plan.report()
    else:
        plan = trace(model, batches, engine="graph")
        assert [leaf.name for leaf in plan.leaves] == ["_square"] and "takes values out of torch" in plan.leaves[0].reason
    if name not in ("python random", "own generator", "seeding"):
        check(model, plan, batches)


def test_a_value_that_a_target_computes_cannot_decide() -> None:
    model, batches = glued(lambda self, ids, x: x if x.mean() > 0 else -x, late=True), toy_batches()
    with pytest.raises(TracingError, match=r"test_graph_guards.py:\d+: Python decides by a value that a sequential target computes"):
        trace(model, batches, engine="graph")
    plan = trace(model, batches)
    assert plan.engine == "suspend"
    check(model, plan, batches)


def test_guards_name_file_line_function_and_value() -> None:
    plan = trace(glued(FOLLOWED["branch on a size"]), toy_batches((2, 5)), engine="graph")
    (guard,) = plan.guards
    assert guard.value == "ids.shape[1] > 4" and guard.expected is True and guard.stage == -1 and guard.variant == 0
    assert guard.file == __file__ and "lambda" in guard.function and f"test_graph_guards.py:{guard.line}: ids.shape[1] > 4" == str(guard)


def test_variants_are_limited() -> None:
    model = glued(lambda self, ids, x: x * [ids.shape[1]][-1] if range(ids.shape[1]) else x)
    batches = toy_batches((1, 2), (1, 3), (1, 4))
    assert len(trace(model, batches, engine="graph").variants) == 3
    with pytest.raises(TracingError, match=r"guard traced with \d, this batch gives 4; 2 recorded graphs do not cover.*raise max_variants"):
        trace(model, batches, engine="graph", max_variants=2)
    plan = trace(model, batches, max_variants=2)
    assert plan.engine == "suspend" and "raise max_variants" in plan.why
    check(model, plan, batches)


def length_factor(x: Tensor) -> Tensor:
    """Decides by the length; as a leaf its guards lie inside it."""
    return x * [1.0, 2.0, 3.0, 4.0][x.shape[1] % 4]


@compressor.leaf
def wrapped_factor(x: Tensor) -> Tensor:
    return length_factor(x)


def test_a_failing_guard_makes_the_function_around_it_a_leaf() -> None:
    model, batches = glued(lambda self, ids, x: length_factor(x)), toy_batches((1, 2), (1, 3), (2, 4))
    plan = trace(model, batches, engine="graph")
    (leaf,) = plan.leaves
    assert leaf.name == "length_factor" and "guard traced with 2, this batch gives 3" in leaf.reason and len(plan.variants) == 1
    check(model, plan, batches)


@pytest.mark.parametrize("given", [length_factor, f"{__name__}:length_factor"])
def test_the_user_may_name_leaves(given: Any) -> None:
    model, batches = glued(lambda self, ids, x: length_factor(x)), toy_batches((1, 2), (1, 3))
    plan = trace(model, batches, engine="graph", leaves=[given])
    assert plan.leaves[0].reason == "given by the user" and value_guards(plan) == [] and "leaf length_factor" in plan.report()
    check(model, plan, batches)
    assert globals()["length_factor"] is length_factor, "the function is as it was"


def test_a_function_may_be_wrapped_where_it_is_written() -> None:
    model, batches = glued(lambda self, ids, x: wrapped_factor(x)), toy_batches((1, 2), (1, 3))
    plan = trace(model, batches, engine="graph")
    assert value_guards(plan) == [] and len(plan.variants) == 1 and torch.equal(wrapped_factor(torch.ones(1, 3)), torch.full((1, 3), 4.0))
    check(model, plan, batches)


def test_wrong_leaves_are_refused() -> None:
    model, batches = build(), toy_batches()
    with pytest.raises(TracingError, match="leaves: 'torch:no_such' names no function"):
        trace(model, batches, leaves=["torch:no_such"], engine="graph")
    with pytest.raises(TracingError, match="leaves: 'torch:add' is a builtin"):
        trace(model, batches, leaves=["torch:add"], engine="graph")
    with pytest.raises(TracingError, match=r"layers.0 is a sequential target and is called inside leaf Stacked.forward"):
        trace(model, batches, leaves=[Stacked.forward], engine="graph")


class Twice(Stacked):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = self.embed(ids)
        first, second, third = self.layers
        return self.head(third(first(second(first(hidden)))))


def test_a_target_that_is_called_again_later_keeps_one_stage() -> None:
    model, batches = build(Twice), toy_batches()
    plan = trace(model, batches, engine="graph")
    assert [stage.target_names for stage in plan.stages] == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert plan.stages[0].num_calls == 2 and plan.variants[0].program.spans == [0, 2, 2, 3]
    check(model, plan, batches)


class Noisy(Stacked):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(nn.functional.dropout(hidden, 0.3, training=True))
        return self.head(hidden + torch.rand(1))


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_every_sample_draws_as_if_it_ran_alone(engine: Any) -> None:
    model, batches = build(Noisy), toy_batches()
    plan = trace(model, batches, engine=engine)
    expected = []
    for batch in batches:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(3)
            expected.append(model(**batch))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        with plan.run(batches, keep_outputs=True, watched=lambda: {"layers.0.up": False}) as running:
            for stage in running:
                stage.calibrate()
                stage.propagate()
    assert equal(running.outputs, expected)


def _written(self: Any, ids: Tensor, x: Tensor) -> Tensor:
    table = torch.zeros(ids.shape)
    table[torch.arange(ids.shape[0]), ids.sum(1) % 2] = 1.0
    return x * 2 if table[:, 1].all() else x


def test_a_guard_on_what_was_written_in_place_is_checked_for_each_batch() -> None:
    model = glued(_written)
    batches = [{"ids": torch.tensor([[1, 2]])}, {"ids": torch.tensor([[2, 2]])}]
    plan = trace(model, batches, engine="graph", leaves=[])
    assert not plan.variants[0].guards.by_shape
    check(model, plan, batches)
