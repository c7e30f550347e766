"""Verification finds every error that is planted into a recorded graph, and names module, node and line."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

from compressor.errors import TracingError
from compressor.tracing import Plan, trace
from tests.compressor.tracing.graph.conftest import Stacked, build, toy_batches


def node_of(plan: Plan, segment: int, target: Any) -> fx.Node:
    return next(node for node in plan.variants[0].segments[segment].graph.nodes if node.target == target)


def planned(kind: type[nn.Module] = Stacked) -> Plan:
    return trace(build(kind), toy_batches(), engine="graph")


def drop_mask(plan: Plan) -> None:
    node = node_of(plan, 2, "layers.1")
    node.kwargs = {**node.kwargs, "mask": None}


def swap_arguments(plan: Plan) -> None:
    node = node_of(plan, 2, "layers.1")
    node.kwargs = {"mask": node.kwargs["scale"], "scale": node.kwargs["mask"]}


def freeze_size(plan: Plan) -> None:
    node = node_of(plan, 0, torch.arange)
    node.args = (5,)


def skip_layer(plan: Plan) -> None:
    graph = plan.variants[0].segments[2].graph
    node = node_of(plan, 2, "layers.1")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)


def change_constant(plan: Plan) -> None:
    node = node_of(plan, 3, "mean")
    node.args = (node.args[0], 0)


def take_another_input(plan: Plan) -> None:
    node = node_of(plan, 1, "layers.0")
    node.args = (node.kwargs["scale"],)


def drop_cast(plan: Plan) -> None:
    node = node_of(plan, 0, "to")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (drop_mask, r"input of layers.1\[1\]\[mask\] is None, in the plain model float32 \(2, 5, 1\)"),
        (swap_arguments, r"input of layers.1"),
        (freeze_size, r"batch 1: .*"),
        (skip_layer, r"input of layers.2\[0\]\[0\] differs from the plain model's"),
        (change_constant, r"the result of the forward\[mean\] is float32 \(5, 8\), in the plain model float32 \(2, 8\)"),
        (take_another_input, r"input of layers.0\[0\]\[0\] is float32 \(1, 5, 1\), in the plain model float32 \(2, 5, 8\)"),
        (drop_cast, r"input of layers.0\[1\]\[mask\] is int64"),
    ],
)
def test_a_planted_error_is_found_and_located(plant: Callable[[Plan], None], told: str) -> None:
    plan = planned()
    assert plan.verify(toy_batches()) == 3
    plant(plan)
    with pytest.raises(TracingError, match=told) as caught:
        plan.verify(toy_batches())
    assert "conftest.py:" in str(caught.value) and "(node " in str(caught.value)


class InPlace(Stacked):
    """Glue that writes to what the layers share."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        scale = torch.ones(1, ids.shape[1], 1)
        for layer in self.layers:
            scale.mul_(0.5)
            hidden = layer(hidden, scale=scale)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return {"logits": self.head(hidden) @ self.head.weight, "pooled": hidden[:, -1]}


def test_a_lost_write_and_a_lost_mode_are_found() -> None:
    batches = toy_batches()
    plan = trace(build(InPlace), batches, engine="graph")
    assert [len(stage.mutates) for stage in plan.stages] == [1, 1, 0], "the glue behind a layer belongs to its stage"
    graph = plan.variants[0].segments[2].graph
    write = next(node for node in graph.nodes if node.target == "mul_")
    write.replace_all_uses_with(write.args[0])  # type: ignore[arg-type]
    graph.erase_node(write)
    with pytest.raises(TracingError, match=r"input of layers.2\[1\]\[scale\]"):
        plan.verify(batches)
    plan = trace(build(InPlace), batches, engine="graph")
    head = next(node for node in plan.variants[0].segments[3].graph.nodes if node.target == "head")
    head.meta["state"] = None
    with pytest.raises(TracingError, match=r"output of head is float32"):
        plan.verify(batches)


def test_verification_chooses_another_shape_and_padding() -> None:
    batches = toy_batches((2, 5), (2, 5), (1, 7), (2, 5))
    assert "3 batches verified" in trace(build(), batches, engine="graph", verify="first").report(), "one of another shape, one padded"
    assert "4 batches verified" in trace(build(), batches, engine="graph", verify="all").report()
    assert "0 batches verified" in trace(build(), batches, engine="graph", verify="off").report()


class Hidden(Stacked):
    """Glue that hands a tensor to the layers behind the recorder's back."""

    box: Any = None

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        Box.value = self.embed(ids).mean()
        return super().forward(ids, mask)


class Box:
    value: Any = 1.0


class Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Box.value


class Sneaky(Hidden):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].up = Reading(8, 16)


def test_what_the_recorder_cannot_see_is_found_by_verification() -> None:
    batches = toy_batches()
    with pytest.raises(TracingError, match=r"output of layers.1 differs from the plain model's float32"):
        trace(build(Sneaky), batches, engine="graph")
    with pytest.raises(TracingError, match=r"suspend: forwards that take turns.*the graph engine refused: .*output of layers.1 differs"):
        trace(build(Sneaky), batches)
    Box.value = 1.0


def test_a_node_that_fails_is_an_error_of_the_graph() -> None:
    plan = planned()
    node = next(node for node in plan.variants[0].segments[0].graph.nodes if node.target is operator.getitem and node.args[1] == 1)
    node.args = (node.args[0], 9)
    with pytest.raises(TracingError, match=r"IndexError.*\(node getitem.*\), which the plain model does not raise"):
        plan.verify(toy_batches())


class Meter(nn.Embedding):
    """Tells the glue a size past the recorder, in a way that no graph knows."""

    seen: ClassVar[dict[str, int]] = {}

    def __init__(self, dimension: int) -> None:
        super().__init__(32, 8)
        self.dimension = dimension

    def forward(self, ids: Tensor) -> Tensor:
        self.seen["size"] = ids.shape[self.dimension]
        return super().forward(ids)


class Measured(Stacked):
    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.embed = Meter(dimension)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = self.embed(ids) / Meter.seen["size"]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("shapes", [[(2, 5), (2, 5), (2, 7), (3, 5)], [(2, 5), (3, 5), (3, 5), (2, 4)], [(2, 5), (2, 5), (2, 5), (3, 7)]])
def test_every_size_is_proved_with_two_values_where_the_batches_have_them(shapes: list[tuple[int, int]], dimension: int) -> None:
    batches = toy_batches(*shapes)
    batches[1]["mask"][0, 2:] = 0  # padding of the same shape as the first batch must not be taken for another shape
    with pytest.raises(TracingError, match="differs from the plain model"):
        trace(build(lambda: Measured(dimension)), batches, engine="graph")  # type: ignore[arg-type]


def test_one_size_only_is_proved_with_other_content() -> None:
    batches = toy_batches((2, 5), (2, 5), (2, 5), padded=False)
    assert "2 batches verified" in trace(build(), batches, engine="graph").report()
    same = [copy.deepcopy(batches[0]) for _ in range(3)]
    assert "2 batches verified" in trace(build(), [*same, batches[1]], engine="graph").report()
    plan = trace(build(), batches[:1], engine="graph")
    assert "1 batches verified" in plan.report()
    with plan.run(batches):
        assert "3 batches verified" in plan.report(), "one of other content, and one beside it"
