"""Error propagation: off, every layer learns from the uncompressed flow; on, from the flow through all compressed layers before it.

Both are held against plain forwards of plain models, with either engine; each reference is also held against the other setting, which it
must not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compressor import oneshot
from compressor.algorithms.hessian import Hessian
from compressor.data import CalibrationData, load_dataset_source
from compressor.errors import TracingError
from compressor.lifecycle import Session, State
from compressor.modifiers.gptq import GPTQModifier, Solved
from compressor.pipelines import SequentialSettings, run_pipeline
from compressor.progress import SilentProgress
from compressor.tracing import Engine
from tests import tiny

WEIGHTS = {"num_bits": 2, "type": "int", "strategy": "channel", "symmetric": True}
BOUND, APART = 1e-6, 1e-3


class Noting(GPTQModifier):
    """Remembers every Hessian that it solves with."""

    def _solve_stack(self, state: State, names: list[str], hessian_CC: Tensor, seen: Hessian, shift_CC: Tensor | None) -> list[Solved]:
        found: dict[str, Tensor] = self.__dict__.setdefault("found", {})
        found.update(dict.fromkeys(names, hessian_CC.double().clone()))
        return super()._solve_stack(state, names, hessian_CC, seen, shift_CC)


def llama() -> Any:
    return tiny.llama(num_attention_heads=2, num_hidden_layers=3, intermediate_size=32, num_key_value_heads=1).double().eval()


def tokens() -> CalibrationData:
    generator = torch.Generator().manual_seed(0)
    return load_dataset_source([torch.randint(1, 64, (length,), generator=generator) for length in (9, 12, 12, 5)], batch_size=2)


def run(model: Any, engine: Engine, propagate_error: bool) -> dict[str, Tensor]:
    groups: Any = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}
    modifier = Noting(config_groups=groups, ignore=["lm_head"])
    with Session(State(model), [modifier]) as session:
        session.initialize()
        settings = SequentialSettings(propagate_error=propagate_error, engine=engine, passes="two")
        run_pipeline("sequential", session, tokens(), progress=SilentProgress(), settings=settings)
        session.finalize()
    return dict(modifier.__dict__["found"])


@torch.no_grad()
def plain_hessians(model: nn.Module, layer: int) -> dict[str, Tensor]:
    """Sums over plain forwards of whole batches, without padding."""
    sums: dict[str, Tensor] = {}
    data = tokens()
    masks: list[Tensor | None] = []  # that of the running batch comes last
    with ExitStack() as hooks:
        for name, module in model.get_submodule(f"model.layers.{layer}").named_modules():
            if isinstance(module, nn.Linear):

                def add(_: nn.Module, args: tuple[Tensor], name: str = f"model.layers.{layer}.{name}") -> None:
                    x = args[0] if masks[-1] is None else args[0][masks[-1]]
                    x = x.reshape(-1, x.shape[-1])
                    sums[name] = sums.get(name, torch.tensor(0.0)) + 2 * x.t() @ x / data.num_tokens

                hooks.callback(module.register_forward_pre_hook(add).remove)
        for batch, mask in zip(data.batches, data.token_masks, strict=True):
            assert isinstance(batch, dict)
            masks.append(mask)
            model(**batch, use_cache=False)
    return sums


def references(compressed: Any) -> dict[bool, dict[str, Tensor]]:
    """By setting: what each layer must have learned from."""
    floating, mixed = llama(), llama()
    off, on = {}, {}
    for layer in range(3):
        off |= plain_hessians(floating, layer)
        on |= plain_hessians(mixed, layer)
        mixed.model.layers[layer] = copy.deepcopy(compressed.model.layers[layer])
    return {False: off, True: on}


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys() and len(found) == 21
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("propagate_error", [False, True])
def test_statistics_come_from_the_flow_that_was_asked_for(engine: Engine, propagate_error: bool) -> None:
    model = llama()
    found = run(model, engine, propagate_error)
    expected = references(model)
    assert max(distances(found, expected[propagate_error]).values()) <= BOUND
    other = distances(found, expected[not propagate_error])
    assert all(distance <= BOUND for name, distance in other.items() if "layers.0." in name)
    assert all(distance > APART for name, distance in other.items() if "layers.0." not in name)


@pytest.mark.parametrize("propagate_error", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_layer_before_the_targets_that_is_compressed_last_is_named(named: bool, propagate_error: bool) -> None:
    class Stemmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.stem, self.head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            hidden: Tensor = self.stem(self.embed(input_ids))
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(hidden)  # type: ignore[no-any-return]

    groups: Any = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}
    with Session(State(Stemmed()), [GPTQModifier(config_groups=groups)]) as session:
        session.initialize()
        targets = ["stem", "re:layers\\.[0-9]+$"] if named else ["re:layers\\.[0-9]+$"]
        settings = SequentialSettings(targets=targets, propagate_error=propagate_error, passes="two")
        run_pipeline("sequential", session, tokens(), progress=SilentProgress(), settings=settings)
        session.finalize()
        late = [note for note in session.state.report.notes if "compressed last" in note]
    assert [note.split(" lie ")[0] for note in late] == (["stem"] if propagate_error and not named else [])


class _Ordered(nn.Module):
    """Calls its layers in an order of one's own."""

    def __init__(self, order: tuple[int, ...], has_head: bool = False, reads: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.reads = order, reads
        self.head = nn.Linear(16, 16) if has_head else nn.Identity()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.embed(input_ids)
        for index in self.order:
            hidden = hidden + self.layers[index](hidden)
        if self.reads is not None:
            hidden = nn.functional.linear(hidden, self.layers[self.reads][0].weight)
        return self.head(hidden)


def _hessians(
    order: tuple[int, ...], pipeline: str, has_head: bool = False, reads: int | None = None, engine: Engine = "graph"
) -> dict[str, Tensor]:
    groups: Any = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}
    modifier = Noting(config_groups=groups)
    with Session(State(_Ordered(order, has_head, reads)), [modifier]) as session:
        session.initialize()
        settings = SequentialSettings(propagate_error=False, engine=engine) if pipeline == "sequential" else None
        run_pipeline(pipeline, session, tokens(), progress=SilentProgress(), settings=settings)
        session.finalize()
    return dict(modifier.__dict__["found"])


@pytest.mark.parametrize(("order", "has_head"), [((0, 0, 1, 1, 2, 2), True), ((0, 1, 2, 0), False)], ids=str)
def test_a_layer_that_is_called_again_is_what_it_was(order: tuple[int, ...], has_head: bool) -> None:
    """Without propagation all statistics are those of the uncompressed model, which the basic pipeline has."""
    found, wanted = _hessians(order, "sequential", has_head), _hessians(order, "basic", has_head)
    assert found.keys() == wanted.keys() and len(found) == 3 + has_head
    assert all(torch.allclose(found[name], value, rtol=1e-4, atol=1e-6) for name, value in wanted.items())


@pytest.mark.parametrize(("order", "has_head"), [((0, 1, 0, 2, 1), False), ((0, 1, 2, 0, 1), False), ((0, 1, 2, 0), True)], ids=str)
def test_a_layer_that_others_would_learn_from_when_it_is_compressed_is_refused(order: tuple[int, ...], has_head: bool) -> None:
    """Before the first stage; a head is no target, and learns behind the last one."""
    with pytest.raises(TracingError, match=r"layers\.0: the forward uses it again after later layers"):
        _hessians(order, "sequential", has_head)


@pytest.mark.parametrize("order", [(0, 0, 1, 2), (0, 1, 2, 2), (1, 0, 1, 2), (0, 0, 1, 1, 2, 2), (0, 1, 2, 0)], ids=str)
def test_paused_forwards_that_would_run_a_compressed_layer_again_are_refused_before_the_first_stage(order: tuple[int, ...]) -> None:
    """Or they meet it as it was: in the first stage nothing is compressed yet."""
    wanted = _hessians(order, "basic")
    if order == (0, 0, 1, 2):
        found = _hessians(order, "sequential", engine="suspend")
        assert all(torch.allclose(found[name], value, rtol=1e-4, atol=1e-6) for name, value in wanted.items())
        return
    with pytest.raises(TracingError, match=r"layers\.\d.*: paused forwards run it, or use its weight, again after its stage"):
        _hessians(order, "sequential", engine="suspend")


def test_a_weight_that_is_read_again_is_what_it_was_or_refused() -> None:
    """That of the last layer is still what it was when the head learns."""
    found, wanted = (_hessians((0, 1, 2), pipeline, True, 2) for pipeline in ("sequential", "basic"))
    assert all(torch.allclose(found[name], value, rtol=1e-4, atol=1e-6) for name, value in wanted.items())
    with pytest.raises(TracingError, match=r"layers\.1: the forward uses it again after later layers"):
        _hessians((0, 1, 2), "sequential", True, 1)


class _Lending(nn.Module):
    """One layer uses the weight of another in its own forward, for all batches or for some."""

    def __init__(self, lender: int, when: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.head = nn.Linear(16, 16)
        self.layers[1].lender = (self.layers[lender],)  # type: ignore[assignment]
        self.layers[1].when = when  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class _Layer(nn.Module):
    lender: tuple[nn.Module, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.relu(self.up(x))
        if self.lender and self.when(x):  # type: ignore[operator]
            y = y + x @ self.lender[0].up.weight  # type: ignore[operator]
        return y


def _lent(lender: int, when: Callable[[Tensor], bool], **asked: Any) -> Any:
    torch.manual_seed(0)
    batches = DataLoader([{"x": torch.randn(2, length, 16) * (1 + (length == 5))} for length in (9, 12, 9, 7, 5)], batch_size=None)  # type: ignore[arg-type]
    groups: Any = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}
    return oneshot(
        _Lending(lender, when).eval(), recipe=GPTQModifier(config_groups=groups, **asked.pop("of", {})), dataset=batches, **asked
    )


@pytest.mark.parametrize("engine", ["auto", "graph", "suspend"])
def test_a_layer_that_uses_the_weight_of_an_earlier_one_needs_propagation(engine: Any) -> None:
    assert _lent(0, lambda x: True, engine=engine).report is not None
    with pytest.raises(TracingError, match=r"layers\.0.*, and what learns behind that would learn from it compressed"):
        _lent(0, lambda x: True, engine=engine, propagate_error=False)
    with pytest.raises(TracingError, match="target 'base'"):
        _lent(0, lambda x: True, engine=engine, of={"target": "base"})


@pytest.mark.parametrize("when", [lambda x: x.shape[1] == 7, lambda x: bool(x.abs().max() > 6)], ids=["by length", "by values"])
@pytest.mark.parametrize("asked", [{}, {"passes": "two", "verify": "all"}, {"engine": "suspend"}], ids=str)
def test_a_layer_that_uses_the_weight_of_a_later_one_for_some_batches_is_refused(when: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(TracingError, match=r"layers\.2\.up\.weight is used outside of layers\.2, the sequential target that it belongs to"):
        _lent(2, when, **asked)


@pytest.mark.parametrize("when", [lambda x: bool(x.abs().max() > 6), lambda x: x.shape[1] == 7], ids=["by values", "by length"])
def test_a_weight_of_an_earlier_layer_that_some_batches_use_needs_propagation_too(when: Any) -> None:
    with pytest.raises(TracingError, match=r"layers\.0.*, and what learns behind that would learn from it compressed"):
        _lent(0, when, propagate_error=False, verify="all")
