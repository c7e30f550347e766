"""Layers as real models have them: handed nested or sparse tensors or keywords, with hooks, with computed weights, read past."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from compressor import AutoRoundModifier, ConstantPruningModifier, GPTQModifier, Modifier, SparseGPTModifier, WandaPruningModifier, oneshot
from compressor.errors import TargetError
from compressor.modifiers.schemes.input_statistics import real_tokens, token_sequences

WIDTH = 8
RUNS: tuple[dict[str, Any], ...] = ({"engine": "auto"}, {"engine": "suspend"}, {"pipeline": "basic"})


@pytest.fixture(autouse=True)
def as_torch_comes() -> Iterator[None]:
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class _Unread(torch.utils.data.DataLoader[Any]):
    """Batches that nobody may ask for."""

    def __init__(self) -> None:
        super().__init__([0], batch_size=None)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        raise AssertionError


class Model(nn.Module):
    def __init__(self, dress: Callable[[Tensor], Tensor] = lambda x: x, *, by_name: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.dress, self.by_name = dress, by_name

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dress(x)
            x = layer(input=x) if self.by_name else layer(x)
        return x


def compressed(model: nn.Module, batches: list[Any], **settings: Any) -> nn.Module:
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    recipe = GPTQModifier(targets=["Linear"], ignore=settings.pop("ignore", []), scheme="W8A8")
    oneshot(model, recipe=recipe, dataset=loader, sequential_targets=["Linear"] if "engine" in settings else None, **settings)
    return model


@pytest.mark.parametrize("shape", [(0, WIDTH), (WIDTH, 0)], ids=str)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {"scheme": "W8A8"}) for kind in (GPTQModifier, AutoRoundModifier)),
        (SparseGPTModifier, {"sparsity": 0.5}),
        (ConstantPruningModifier, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_weights_without_values_are_refused_before_any_work(
    kind: Callable[..., Modifier], settings: dict[str, Any], shape: tuple[int, int]
) -> None:
    model = Model()
    model.layers.append(nn.Linear(*shape))
    with pytest.raises(TargetError, match=r"layers.2.*(holds no|with) values.* to ignore$"):
        oneshot(model, recipe=[kind(targets=["Linear"], **settings), WandaPruningModifier(sparsity=0.5)], dataset=_Unread())


def nested(x: Tensor) -> Tensor:
    return x if x.is_nested else torch.nested.nested_tensor([row[: len(row) - place] for place, row in enumerate(x)])


def batches() -> list[tuple[Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(2, length, WIDTH),) for length in (6, 9)]


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*:UserWarning")
def test_nested_inputs_are_counted_row_by_row(run: dict[str, Any]) -> None:
    rows = [(torch.cat([row[: len(row) - place] for place, row in enumerate(x)])[None],) for (x,) in batches()]
    wanted, got = compressed(Model(), rows, **run), compressed(Model(nested), batches(), **run)
    assert all(torch.equal(tensor, got.state_dict()[name]) for name, tensor in wanted.state_dict().items())
    with torch.no_grad():
        assert [tuple(row.shape) for row in got(batches()[0][0]).unbind()] == [(6, WIDTH), (5, WIDTH)]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*:UserWarning")
def test_nested_inputs_must_be_as_long_as_the_mask_says() -> None:
    x, mask = nested(batches()[0][0]), torch.tensor([[True] * 6, [True] * 5 + [False]])
    assert [len(row) for row in token_sequences(x, mask, "lin")] == [6, 5]
    assert real_tokens(x, mask, "lin").shape == (11, WIDTH)
    with pytest.raises(Exception, match=r"a nested input of \[6, 5\] tokens does not line up .* \[6, 4\]"):
        real_tokens(x, mask & (torch.arange(6) != torch.tensor([[9], [0]])), "lin")


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_inputs_by_name_count_as_plain_ones(run: dict[str, Any]) -> None:
    wanted, got = compressed(Model(), batches(), **run), compressed(Model(by_name=True), batches(), **run)
    assert all(torch.equal(tensor, got.state_dict()[name]) for name, tensor in wanted.state_dict().items())


def test_sparse_inputs_are_filled_up() -> None:
    made: list[dict[str, Tensor]] = []
    for dress in (lambda x: x.relu(), lambda x: x.relu().to_sparse()):
        model = Model(dress)
        model.layers = model.layers[:1]
        made.append(compressed(model, [(x.flatten(0, 1),) for (x,) in batches()], pipeline="basic").state_dict())
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_hooks_of_the_models_author_go_to_the_quantized_layer(run: dict[str, Any]) -> None:
    plain, model = Model(), Model()
    for one in (plain, model):
        handle = one.layers[0].register_forward_hook(lambda module, args, output: output * 5)
        one.layers[1].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] - 1,), kwargs), with_kwargs=True)
    compressed(model, batches(), **run)
    with torch.no_grad():
        expected, got = plain(batches()[0][0]), model(batches()[0][0])
        assert (expected - got).norm() < 0.05 * expected.norm()
        handle.remove()  # the handle knows the new layer
        assert not model.layers[0]._forward_hooks


def _fold(module: nn.Module) -> nn.Module:
    return torch.nn.utils.parametrize.remove_parametrizations(module, "weight")


COMPUTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "weight_norm": (torch.nn.utils.parametrizations.weight_norm, _fold),
    "orthogonal": (torch.nn.utils.parametrizations.orthogonal, _fold),
    "spectral_norm by hook": (torch.nn.utils.spectral_norm, torch.nn.utils.remove_spectral_norm),
}


def _as_buffer(module: nn.Module) -> None:
    weight = module.get_parameter("weight").detach()
    del module.weight
    module.register_buffer("weight", weight)


def _as_tensor(module: nn.Module) -> None:
    weight = module.get_parameter("weight").detach()
    del module.weight
    module.weight = weight


NO_PARAMETER: dict[str, Callable[[Any], Any]] = {
    **{name: compute for name, (compute, _) in COMPUTED.items()},
    "weight_norm by hook": torch.nn.utils.weight_norm,
    "a mask": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "a buffer": _as_buffer,
    "a tensor": _as_tensor,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("recipe", [GPTQModifier(scheme="W8A8"), SparseGPTModifier(sparsity=0.5)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("spoil", NO_PARAMETER.values(), ids=NO_PARAMETER)
def test_what_makes_a_weight_a_parameter_is_said_and_works(spoil: Callable[[Any], Any], recipe: Modifier) -> None:
    model = Model()
    spoil(model.layers[0])
    with pytest.raises(TargetError, match=r"layers\.0: its weight is ") as refused:
        oneshot(model, recipe=recipe.model_copy(deep=True), dataset=_Unread())
    remedy = re.search(r"bake it in with (.*), or add|make it one \((.*)\), or add", str(refused.value))
    assert remedy is not None
    exec(remedy[1] or remedy[2], {"torch": torch, "module": model.layers[0]})
    loader: Any = torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    assert oneshot(model, recipe=recipe.model_copy(deep=True), dataset=loader).report.modules.keys() == {"layers.0", "layers.1"}


@pytest.mark.parametrize(("compute", "fold"), COMPUTED.values(), ids=COMPUTED)
def test_computed_weights_are_refused_and_may_stay(compute: Callable[[Any], Any], fold: Callable[[Any], Any]) -> None:
    model, other = Model(), Model()
    compute(model.layers[0])
    compute(other.layers[0])
    with pytest.raises(TargetError, match=r"layers.0: its weight is computed "):
        compressed(model, batches())
    compressed(model, batches(), ignore=["layers.0"])
    fold(other.layers[0])
    compressed(other, batches())


def test_a_fast_path_past_the_layers_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    ignore = ["re:.*self_attn.*"]  # torch calls no module for its projections
    with pytest.raises(TargetError, match=r"layers.0.linear1, .*past them .*set_fastpath_enabled\(False\)"):
        compressed(model, batches(), ignore=ignore, pipeline="basic")
    torch.backends.mha.set_fastpath_enabled(False)
    compressed(model, batches(), ignore=ignore, pipeline="basic")
    with torch.no_grad():
        assert model(batches()[0][0]).isfinite().all()
