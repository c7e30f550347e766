"""Nested and sparse tensors between stages, and in batches: they run, with the bits of plain forwards, and the proof sees their values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compressor.data.collate import Batch, call_model
from compressor.data.layouts import digest, kind_of, num_bytes
from compressor.errors import TracingError
from compressor.pipelines.offload.activation_store import ActivationStore
from compressor.tracing import Engine, trace
from compressor.tracing.flow import measure_flow
from compressor.tracing.reads import LeftMemory

WIDTH = 8


@pytest.fixture(autouse=True)
def nested_is_a_prototype() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*(prototype|beta|mkldnn|quantized).*")
        yield


class Layer(nn.Module):
    """Hands on its hidden state in some layout, and what else it is given."""

    def __init__(self, dress: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.dress = dress

    def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
        x = self.lin(x.dequantize() if x.is_quantized else x if x.layout in (torch.strided, torch.jagged) else x.to_dense())
        return self.dress(torch.relu(x if adjacency is None else torch.sparse.mm(adjacency, x)))


class Model(nn.Module):
    def __init__(
        self,
        dress: Callable[[Tensor], Tensor] = lambda x: x,
        first: Callable[[Tensor, Tensor], Tensor] = lambda x, mask: x.flatten(0, 1),
        adjacency: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(Layer(dress) for _ in range(3))
        self.first, self.adjacency = first, adjacency

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.first(self.embed(ids), mask)
        near = () if self.adjacency is None else (self.adjacency(band(ids.numel())),)
        for layer in self.layers:
            x = layer(x, *near)
        return x.to_padded_tensor(0.0) if x.is_nested else x.dequantize() if x.is_quantized else x.to_dense()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.encoder(self.embed(ids), src_key_padding_mask=mask == 0)


def band(size: int) -> Tensor:
    places = torch.arange(size)
    return ((places[:, None] - places[None]).abs() <= 1).float()


def nested(layout: torch.layout) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, mask: torch.nested.nested_tensor([row[: int(own.sum())] for row, own in zip(x, mask, strict=True)], layout=layout)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nn.TransformerEncoder": Encoder,
    "nested": lambda: Model(first=nested(torch.strided)),
    "jagged": lambda: Model(first=nested(torch.jagged)),
    "sparse hidden states": lambda: Model(lambda x: x.to_sparse()),
    "csr": lambda: Model(adjacency=lambda near: near.to_sparse_csr()),
    "csc": lambda: Model(adjacency=lambda near: near.to_sparse_csc()),
    "coo": lambda: Model(adjacency=lambda near: near.to_sparse()),
    "coo, not coalesced": lambda: Model(adjacency=lambda near: near.to_sparse() + near.to_sparse()),
    "bsr": lambda: Model(lambda x: x.to_sparse_bsr((2, 2))),
    "negated": lambda: Model(lambda x: torch.complex(x, x).conj().imag),
    "mkldnn": lambda: Model(lambda x: x.to_mkldnn()),
    "quantized": lambda: Model(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)),
}


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    made: list[Batch] = []
    for rows, length in ((2, 6), (2, 6), (1, 4), (3, 6)):
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, length // 2 :] = 0 if rows > 1 else 1
        made.append({"ids": torch.randint(0, 20, (rows, length), generator=generator), "mask": mask})
    return made


@pytest.mark.parametrize("engine", ["suspend", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_unusual_tensors_between_stages_are_those_of_plain_forwards(name: str, engine: Engine, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given = MODELS[name]().eval(), batches()
    with torch.no_grad():
        expected = [call_model(model, batch) for batch in given]
    plan = trace(model, given, engine=engine)
    assert len(plan.stages) == 3
    with (
        ActivationStore(torch.device("cpu"), 0, 0, tmp_path) as store,
        plan.run(given, store if plan.engine == "graph" else None, keep_outputs=True) as run,
    ):
        for stage in run:
            stage.rehearse()
            stage.propagate()
    assert all(map(torch.equal, run.outputs, expected))
    stops, _ = measure_flow(model, plan.stages, given[0])
    assert all(stop.live_bytes > 0 and str(stop.inputs[0]) for stop in stops)


def test_a_digest_is_that_of_the_values_and_not_of_marks_on_them() -> None:
    x = torch.complex(torch.ones(3), torch.ones(3))
    assert digest(x.conj()) == digest(x.conj().resolve_conj()) != digest(x)
    assert digest(x.conj().imag) == digest(-torch.ones(3))


def test_a_batch_may_hold_sparse_tensors() -> None:
    class Graph(Model):
        def forward(self, ids: Tensor, near: Tensor) -> Tensor:  # type: ignore[override]
            x = self.embed(ids).flatten(0, 1)
            for layer in self.layers:
                x = layer(x, near)
            return x

    model = Graph().eval()
    given: list[Batch] = [{"ids": torch.zeros(1, size, dtype=torch.int64), "near": band(size).to_sparse()} for size in (3, 5, 4)]
    with torch.no_grad():
        expected = [call_model(model, batch) for batch in given]
    for engine in ("graph", "suspend"):
        with trace(model, given, engine=engine).run(given, keep_outputs=True) as run:  # type: ignore[arg-type]
            for stage in run:
                stage.propagate()
        assert all(map(torch.equal, run.outputs, expected))


KEPT: list[Any] = []


def test_the_proof_sees_the_values_of_sparse_tensors() -> None:
    def first_kept(near: Tensor) -> Tensor:
        KEPT.append(near.to_sparse() * len(KEPT))
        return KEPT[-1]

    KEPT.clear()
    with pytest.raises(TracingError, match=r"float32 sparse_coo \(12, 12\)|output of layers"):
        trace(Model(adjacency=first_kept).eval(), batches(), engine="suspend")


@pytest.mark.parametrize("copies", [1, 16], ids=["hashed", "summed"])
def test_digests_depend_on_values_and_indices(copies: int) -> None:
    near = torch.block_diag(*[band(4)] * copies)
    other = near.clone()
    other[0, 0] = 2
    for dress in (lambda x: x, lambda x: x.to_sparse(), lambda x: x.to_sparse_csr(), lambda x: x.to_sparse_csc(), lambda x: x.to_mkldnn()):
        one, two, same = dress(near), dress(other), dress(near.clone())  # type: ignore[no-untyped-call]
        assert digest(one) == digest(same) != digest(two) and kind_of(one) == kind_of(two) and num_bytes(one) > 0
    rows = [torch.ones(2, 3), torch.ones(1, 3)]
    for layout in (torch.strided, torch.jagged):
        made = torch.nested.nested_tensor(rows, layout=layout)
        assert kind_of(made) == "float32 nested ((2, 3), (1, 3))" and num_bytes(made) == 36
        assert digest(made) != digest(torch.nested.nested_tensor([rows[0] * 2, rows[1]], layout=layout))


class Asks(nn.Module):
    """Takes another way where torch says that somebody overrides its functions, as nn.TransformerEncoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x + 1 if torch.overrides.has_torch_function((x, mask)) else x)
        return x


@pytest.mark.parametrize("engine", ["suspend", "auto"])
def test_code_that_asks_for_overrides_goes_the_way_of_plain_forwards(engine: Engine, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given, asked = Asks().eval(), batches(), torch.overrides.has_torch_function
    plan = trace(model, given, ["layers.0", "layers.1", "layers.2"], engine=engine)
    with ActivationStore(torch.device("cpu"), 0, 0, tmp_path) as store, torch.no_grad():
        run = plan.run(given, store if plan.engine == "graph" else None, keep_outputs=True)
        with run:
            for stage in run:
                stage.rehearse()
                stage.propagate()
    assert plan.engine == ("graph" if engine == "auto" else engine)
    assert all(map(torch.equal, run.outputs, [call_model(model, batch) for batch in given]))
    assert torch.overrides.has_torch_function is asked


class Labelled(Tensor):
    pass


def test_only_modes_that_look_on_are_unnoticed() -> None:
    plain, labelled, named = torch.ones(2), torch.ones(2).as_subclass(Labelled), nn.Parameter(torch.ones(2))
    with LeftMemory([]):
        assert not torch.overrides.has_torch_function((plain, named, None))
        assert torch.overrides.has_torch_function((plain, labelled))
        with torch._C.DisableTorchFunctionSubclass(), torch._C.DisableTorchFunction():
            assert not torch.overrides.has_torch_function((labelled,))
        with TorchFunctionMode(), LeftMemory([]):
            assert torch.overrides.has_torch_function((plain,))  # a mode of the model's own code
