"""What a layer makes of its weights or inputs once and keeps: of its own forward, or refused before the first stage."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.tracing import Engine, trace
from compressor.tracing.graph.nodes import Unrepeatable

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.memo: dict[str, Tensor] = {}
        self.given = torch.zeros(())

    def scale(self) -> Tensor:
        return self.lin.weight.detach().abs().mean()

    def of(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        return torch.tanh(self.lin(x)) / self.of()


class InAttribute(Layer):
    def of(self) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = self.scale()
        return self.kept


class InProperty(Layer):
    @functools.cached_property
    def kept(self) -> Tensor:
        return self.scale()

    def of(self) -> Tensor:
        return self.kept


class OfItsInput(Layer):
    @functools.cached_property
    def kept(self) -> Tensor:
        return self.given.std()

    def of(self) -> Tensor:
        return self.kept


class InDict(Layer):
    def of(self) -> Tensor:
        if "scale" not in self.memo:
            self.memo["scale"] = self.scale()
        return self.memo["scale"]


class PastSetattr(Layer):
    def of(self) -> Tensor:
        if "kept" not in vars(self):
            vars(self)["kept"] = self.scale()
        return self.get_kept()

    def get_kept(self) -> Tensor:
        kept: Tensor = vars(self)["kept"]
        return kept


class InLruCache(Layer):
    @functools.lru_cache  # noqa: B019 - that is the point
    def cached(self) -> Tensor:
        return self.scale()

    def of(self) -> Tensor:
        return self.cached()


def build(kind: type[Layer]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3))).eval()


def given() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, WIDTH, generator=generator),) for rows in (2, 3, 2)]


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("kind", [InAttribute, InProperty, OfItsInput])
def test_what_is_kept_on_a_module_is_of_one_forward_and_of_the_weights_of_then(kind: type[Layer], engine: Engine) -> None:
    model, batches, seen = build(kind), given(), []
    hook = model[2].lin.register_forward_pre_hook(lambda module, args: seen.append(args[0]))  # type: ignore[union-attr]
    plan = trace(model, batches, [kind.__name__], engine=engine)
    with plan.run(batches, watched=lambda: dict.fromkeys(("0.lin", "1.lin", "2.lin"), False)) as run:
        for stage in run:
            seen.clear()
            stage.calibrate()
            got = list(seen)
            if stage.index < 2:
                with torch.no_grad():
                    model.get_parameter(f"{stage.index}.lin.weight").mul_(3)
            stage.propagate()
    hook.remove()
    for batch, value in zip(batches, got, strict=True):
        plain = build(kind)
        with torch.no_grad():
            for index in range(2):
                plain.get_parameter(f"{index}.lin.weight").mul_(3)
            assert torch.equal(value, plain[1](plain[0](*batch)))
    assert not any("kept" in vars(layer) for layer in model)


@pytest.mark.parametrize("engine", ["auto", "graph", "suspend"])
@pytest.mark.parametrize("kind", [InDict, PastSetattr, InLruCache])
def test_what_is_kept_elsewhere_is_refused_before_the_first_stage(kind: type[Layer], engine: Engine) -> None:
    with pytest.raises(Unrepeatable, match=r"^0\.lin\.weight: forward makes something of it once and keeps it"):
        trace(build(kind), given(), [kind.__name__], engine=engine)


class Switches(nn.Module):
    """As BigBird does for short sequences: another module takes its weights over, for good."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.shape[0] < 3:
                layer[1] = nn.Sigmoid()
            x = layer(x)
        return x


def test_batches_that_put_other_modules_into_the_model_are_refused_and_like_ones_run() -> None:
    batches: list[Batch] = [(torch.randn(rows, WIDTH),) for rows in (4, 5, 2)]
    with pytest.raises(TracingError, match=r"layers\.0\.1: batch 2 puts another module in its place and batch 0 does not"):
        trace(Switches().eval(), batches, ["Sequential"], engine="suspend")
    model = Switches().eval()
    with trace(model, batches[2:], ["Sequential"], engine="suspend").run(batches[2:], keep_outputs=True) as run:
        for stage in run:
            stage.propagate()
    assert isinstance(model.layers[0][1], nn.Tanh)
    with torch.no_grad():
        assert torch.equal(run.outputs[0], call_model(model, batches[2]))


class Lends(Switches):
    """Another layer stands in for one while the forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        own, self.layers[1][0] = self.layers[1][0], self.other
        try:
            return super().forward(x)
        finally:
            self.layers[1][0] = own


def test_a_module_that_is_exchanged_while_a_forward_runs_is_not_called_written_to() -> None:
    batches: list[Batch] = [(torch.randn(rows, WIDTH),) for rows in (4, 5)]
    with pytest.raises(TracingError, match=r"^layers\.1\.0\.weight: forward puts another module or parameter in its place"):
        trace(Lends().eval(), batches, ["Sequential"], engine="suspend")
