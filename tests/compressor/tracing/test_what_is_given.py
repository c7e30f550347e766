"""What people hand to `trace`: every form of a batch, and models and batches that cannot run, told in our words."""

from __future__ import annotations

import collections
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.tracing import Engine, Plan, trace

ENGINES: tuple[Engine, ...] = ("graph", "suspend", "auto")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + x


class Model(nn.Module):
    """Reads token ids."""

    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, input_ids: Tensor, scale: Any = None) -> Tensor:
        x = self.embed(input_ids) * (1 if scale is None else scale)
        for layer in self.layers:
            x = layer(x)
        return x


def made(layer: type[nn.Module] = Layer) -> Model:
    torch.manual_seed(0)
    return Model(layer).eval()


def ids(*values: int) -> Tensor:
    return torch.tensor([values])


def outputs(plan: Plan, batches: Any) -> list[Tensor]:
    with plan.run(batches, keep_outputs=True) as run:
        for stage in run:
            stage.rehearse()
            stage.propagate()
    return run.outputs


class Encoding(collections.UserDict[str, Any]):
    """As tokenizers give it: a mapping, and no dict."""


FORMS: dict[str, Any] = {
    "a dict": lambda batch: {"input_ids": batch},
    "a mapping": lambda batch: Encoding(input_ids=batch),
    "a proxy": lambda batch: MappingProxyType({"input_ids": batch}),
    "an ordered dict": lambda batch: collections.OrderedDict(input_ids=batch),
    "a dict with other values": lambda batch: {"input_ids": batch, "scale": 2.0},
    "a tuple": lambda batch: (batch,),
    "a list": lambda batch: [batch],
    "a tensor": lambda batch: batch,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_may_have_any_form(form: str, engine: Engine) -> None:
    model, given = made(), [FORMS[form](ids(1, 2, 3)), FORMS[form](ids(4, 5))]
    with torch.no_grad():
        expected = [model(one, 2.0 if "other" in form else None) for one in (ids(1, 2, 3), ids(4, 5))]
    plan = trace(model, given, engine=engine)
    assert all(map(torch.equal, outputs(plan, given), expected))
    assert plan.verify(given) == (0 if plan.engine == "suspend" else 2)


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        (ids(1, 2), r"^batches: a Tensor was given, where several batches are expected.*give \[batch\]"),
        ({"input_ids": ids(1)}, r"^batches: a dict was given, where several batches are expected"),
        (Encoding(input_ids=ids(1)), r"^batches: a Encoding was given"),
        ("some text", r"^batches: a str was given"),
        (None, r"^batches: a NoneType was given"),
        ([], r"^trace: no batch was given"),
        (["some text"], r"^batches: batch 0 is a str; give a mapping, a tuple or a tensor"),
        ([{}], r"^batches: batch 0 holds no tensor"),
        ([(ids(1),), {"input_ids": [[1, 2]]}], r"^batches: batch 1 holds no tensor.*return_tensors='pt'"),
        ([ids(1).to("meta")], r"^batches: batch 0 holds a tensor on the meta device"),
        ([{"input_ids": ids(1, 2).to_sparse()}], r"^batches: batch 0: input_ids are sparse_coo; give rows of whole numbers"),
        ([{"input_ids": ids(1, 2).to(torch.cfloat)}], r"^batches: batch 0: input_ids are complex; give rows of whole numbers"),
        ([ids(1, 16)], r"^forward: the model itself raises IndexError.*token id 16 is given, and the model has 16 tokens"),
        ([ids(1, -1)], r"token id -1 is given, and the model has 16 tokens\); give batches that it can run \(argument 0 int64 \(1, 2\)\)"),
        ([{"ids": ids(1)}], r"^forward: the model itself raises TypeError: .*unexpected keyword argument 'ids'"),
    ],
)
def test_what_is_no_batch_is_told_in_our_words(batches: Any, told: str) -> None:
    for engine in ENGINES:
        with pytest.raises(TracingError, match=told):
            trace(made(), batches, engine=engine)


def test_a_model_without_weights_is_told_in_our_words() -> None:
    with pytest.raises(TracingError, match=r"^embed.weight: is on the meta device, without values, and 4 more are"):
        trace(made().to("meta"), [ids(1)])


class Averaging(Layer):
    """Keeps a mean from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.mean()
        return super().forward(x) + self.mean


class Noting(Layer):
    """Keeps something that no forward reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm = x.norm()
        return super().forward(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_state_that_would_pass_from_batch_to_batch_is_reported_and_every_batch_starts_anew(engine: Engine) -> None:
    given: list[Batch] = [(ids(1, 2, 3),), (ids(4, 5),), (ids(6),)]
    expected = []
    for batch in given:
        with torch.no_grad():
            expected.append(call_model(made(Averaging), batch))
    plan = trace(made(Averaging), given, engine=engine)
    assert all(map(torch.equal, outputs(plan, given), expected))
    assert plan.kept == ("layers.0.mean", "layers.1.mean")
    assert "state: layers.0.mean, layers.1.mean would pass from batch to batch" in plan.report()
    assert trace(made(Noting), given, engine=engine).kept == ()


def looked_at(plan: Plan, batches: list[Batch], **more: Any) -> int:
    seen: list[Tensor] = []
    handle = plan.model.get_submodule("layers.1.lin").register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with plan.run(batches, **more) as run:
        for stage in run:
            if stage.name == "layers.1":
                stage.calibrate()
                handle.remove()
            stage.propagate()
    return len(seen)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_word_about_it_whoever_carries_hooks_is_calibrated(engine: Engine) -> None:
    given: list[Batch] = [(ids(1, 2, 3),), (ids(4, 5),)]
    assert looked_at(trace(made(), given, engine=engine), given) == 2
    assert looked_at(trace(made(), given, engine=engine), given, watched=tuple) == 0
