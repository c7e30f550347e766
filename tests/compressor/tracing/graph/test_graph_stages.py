"""A plan of the graph engine is made of real torch.fx graphs, runs every batch as the plain model does, and leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from compressor.errors import CalibrationError, TracingError
from compressor.tracing import MemoryStore, Plan, trace
from tests.compressor.tracing.graph.conftest import Batch, Stacked, build, equal, toy_batches


@torch.no_grad()
def plain(model: nn.Module, batch: Batch) -> Any:
    return model(**batch)


def outputs(plan: Plan, batches: list[Batch], **settings: Any) -> list[Any]:
    with plan.run(batches, keep_outputs=True, **settings) as run:
        for stage in run:
            stage.propagate()
    return run.outputs


def test_every_stage_is_a_real_graph_that_prints_and_runs() -> None:
    model, batches = build(), toy_batches()
    plan = trace(model, batches, engine="graph")
    segments = plan.variants[0].program.segments
    assert len(segments) == 4 and [segment.targets for segment in segments] == [(), ("layers.0",), ("layers.1",), ("layers.2",)]
    values: dict[str, Any] = dict(batches[1])
    for segment in segments:
        assert isinstance(segment.graph, fx.Graph)
        segment.graph.lint()
        module = segment.graph_module(model)
        module.graph.lint()
        assert "def forward" in module.print_readable(print_output=False)
        with torch.no_grad():
            made = module(*(values[str(node.target)] for node in segment.graph.nodes if node.op == "placeholder"))
        values = made if segment.is_last else {**values, **made}
    assert equal(values, plain(model, batches[1]))
    assert {node.op for segment in segments for node in segment.graph.nodes} == {
        *("placeholder", "call_module", "call_function", "call_method", "output")
    }
    assert "conftest.py" in segments[0].graph_module(model).print_readable(print_output=False), "nodes know their source lines"


def test_stages_say_what_crosses_them() -> None:
    plan = trace(build(), toy_batches(), engine="graph")
    first, second, third = plan.stages
    assert first.target_names == ("layers.0",) and first.modules == ("layers.0", "layers.0.up", "layers.0.down")
    assert len(first.live_in) == 3 and first.live_out == second.live_in, "hidden states, mask and scale"
    assert third.graph is plan.variants[0].segments[3].graph and "layers.2" in {node.target for node in third.graph.nodes}
    assert third.live_out == () and first.mutates == () and first.num_calls == 1
    assert first.live_bytes == 2 * 5 * 8 * 4 + 2 * 5 * 4 + 5 * 4
    assert plan.report().splitlines()[0] == "engine: graph (asked for)" and "traced into 4 subgraphs" in plan.report()


def test_all_shapes_take_one_graph_and_one_forward() -> None:
    model, batches = build(), toy_batches((2, 5), (1, 7), (3, 4), (1, 1))
    calls: list[int] = []
    handle = model.head.register_forward_hook(lambda *args: calls.append(1))
    plan = trace(model, batches, engine="graph", verify="off")
    assert len(calls) == 1 and len(plan.variants) == 1 and plan.guards == ()
    handle.remove()
    assert equal(outputs(plan, batches), [plain(model, batch) for batch in batches])


def test_batches_that_were_not_traced_are_planned_before_the_first_stage() -> None:
    model, batches = build(), toy_batches()
    plan = trace(model, batches[:1], engine="graph")
    bare = {"ids": batches[1]["ids"]}
    assert equal(outputs(plan, [*batches, bare]), [plain(model, batch) for batch in [*batches, bare]])
    assert len(plan.variants) == 2, "without a mask the forward takes another way"


def test_a_run_may_use_any_store_and_ends_what_it_leaves() -> None:
    model, batches, store = build(), toy_batches(), MemoryStore()
    plan = trace(model, batches, engine="graph")
    with plan.run(batches, store) as run:
        stage = next(iter(run))
        assert store.get(0).keys() == set(plan.stages[0].live_in)
        stage.calibrate()
    for sample in range(len(batches)):
        with pytest.raises(KeyError):
            store.get(sample)
    with pytest.raises(TracingError, match="left without propagate"), plan.run(batches) as run:
        list(run)


class Halved(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / 2


def compress(model: nn.Module, target: str) -> None:
    for child in ("up", "down"):
        layer = model.get_submodule(target)
        setattr(layer, child, Halved(getattr(layer, child)))


def keep(seen: dict[str, list[Any]], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.setdefault(name, []).append(args[0].clone())

    return hook


def two_passes(model: nn.Module, batches: list[Batch], engine: Any, **settings: Any) -> tuple[Any, Any]:
    seen: dict[str, list[Any]] = {}
    plan = trace(model, batches, engine=engine, **settings)
    watched: dict[str, bool] = {}
    with plan.run(batches, keep_outputs=True, watched=lambda: watched) as run:
        for stage in run:
            names = [name for name in stage.module_names if name.endswith(("up", "down"))]
            watched = dict.fromkeys(names, False)
            hooks = [model.get_submodule(name).register_forward_pre_hook(keep(seen, name)) for name in names]
            stage.calibrate()
            for hook in hooks:
                hook.remove()
            watched = {}
            for name in stage.module_names:
                if name.count(".") == 1:
                    compress(model, name)
            stage.propagate()
    return seen, run.outputs


def test_two_passes_equal_a_naive_reference_and_the_other_engine() -> None:
    batches = toy_batches()
    expected: dict[str, list[Any]] = {}
    model = build()
    for number in range(3):
        for child in ("up", "down"):
            name = f"layers.{number}.{child}"
            with torch.no_grad():
                hook = model.get_submodule(name).register_forward_pre_hook(keep(expected, name))
                for batch in batches:
                    model(**batch)
                hook.remove()
        compress(model, f"layers.{number}")
    results = [plain(model, batch) for batch in batches]
    graph, suspend = two_passes(build(), batches, "graph"), two_passes(build(), batches, "suspend")
    assert equal(graph[0], expected) and equal(graph[1], results)
    assert equal(suspend[0], expected) and equal(suspend[1], results)
    grouped = trace(build(), batches, engine="graph", targets_per_stage=2)
    assert [stage.target_names for stage in grouped.stages] == [("layers.0", "layers.1"), ("layers.2",)]
    with pytest.raises(TracingError, match=r"targets_per_stage .*: 2 is not possible with engine='suspend'"):
        trace(build(), batches, engine="suspend", targets_per_stage=2)


def test_only_the_first_sample_may_run_on() -> None:
    model, batches = build(), toy_batches()
    heads: list[int] = []
    with trace(model, batches, engine="graph").run(batches, keep_outputs=True) as run:
        model.head.register_forward_hook(lambda *args: heads.append(1))
        for stage in run:
            stage.calibrate()
            stage.propagate(only_first=stage.index == 2)
    assert len(heads) == 1 and equal(run.outputs[0], plain(model, batches[0])) and run.outputs[1:] == [None, None]


class Counting(Stacked):
    """Layers whose linears a later layer calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up = self.layers[0].up


def test_a_watched_module_that_is_called_in_two_stages_is_an_error_before_the_first() -> None:
    model, batches = build(Counting), toy_batches()
    run = trace(model, batches, engine="graph").run(batches, watched=lambda: {"layers.0.up": False})
    with run, pytest.raises(CalibrationError, match=r"layers.0.up: batch 0 calls it outside layers.0"):
        next(iter(run))


def test_a_failed_recording_leaves_nothing_on_the_model() -> None:
    class Failing(Stacked):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            self.note = ids.float()
            torch.rand(3)
            super().forward(ids, mask)
            return {"bad": ids.numpy()}  # type: ignore[dict-item]

    model, batches = build(Failing), toy_batches()
    before = copy.copy(vars(model))
    with pytest.raises(TracingError, match=r"test_graph_stages.py:\d+: Tensor.numpy takes values out of torch"):
        trace(model, batches, engine="graph")
    assert vars(model).keys() == before.keys() and not model._forward_hooks
    assert trace(model, batches).engine == "suspend"


class Tallying(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tally", torch.zeros(()))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.tally.add_(1)
        return super().forward(ids, mask)


def test_state_that_all_samples_write_to_is_no_graph_and_runs_where_paused_forwards_do_not_see_it() -> None:
    with pytest.raises(TracingError, match=r'tally: every forward writes to it, and all samples share it.*pipeline="basic"'):
        trace(build(Tallying), toy_batches(), engine="graph")
    plan = trace(build(Tallying), toy_batches())
    assert plan.engine == "suspend" and plan.model.get_buffer("tally") == 0


class Telling(Tallying):
    """What a forward has written decides what the next layers of another one compute."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hook = self.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * self.tally, *args[1:]))
        try:
            self.tally.fill_(ids.shape[1])
            return Stacked.forward(self, ids, mask)
        finally:
            hook.remove()


def test_state_that_paused_forwards_see_of_each_other_is_refused() -> None:
    with pytest.raises(TracingError, match="tally"):
        trace(build(Telling), toy_batches())
