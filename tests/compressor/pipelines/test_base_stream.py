"""The uncompressed model beside the compressed one: what is compared with what, who sees it, and where it cannot be had."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

import compressor.modifiers.gptq
from compressor import GPTQModifier, QuantizationModifier, QuIPModifier, oneshot
from compressor.errors import CompressorError, TracingError
from compressor.lifecycle import Event, Modifier, State
from compressor.modifiers.schemes.hessians import BaseInputs
from tests import tiny

INT4 = {"num_bits": 4, "group_size": 16, "strategy": "group"}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": INT4}}
IDS = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(0))


def llama() -> LlamaForCausalLM:
    return tiny.llama(intermediate_size=48)


def moe() -> Qwen3MoeForCausalLM:
    return tiny.qwen3_moe(intermediate_size=48)


def gptq(ignore: Sequence[str] = ("lm_head",), **settings: Any) -> GPTQModifier:
    return GPTQModifier(config_groups=GROUPS, ignore=list(ignore), **settings)


def test_keys_and_values_may_be_watched_to_the_end() -> None:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    model = tiny.llama(intermediate_size=32)  # no wider inside: nothing waits for the last stage
    result = oneshot(model, recipe=gptq(kv_cache_scheme=scheme), dataset=IDS)
    assert any("keys and values of 2 attention modules" in note for note in result.report.notes)


Shifts = dict[str, tuple[Tensor, Tensor | None]]


@pytest.fixture
def shifts(monkeypatch: pytest.MonkeyPatch) -> Shifts:
    """H and D of every solve, by the first name."""
    found: Shifts = {}
    solve = compressor.modifiers.gptq.quantize_gptq

    def noting(weights: Any, hessian: Tensor, args: Any, *, shift_CC: Tensor | None, names: Sequence[str], **settings: Any) -> Any:
        found[names[0]] = hessian.clone(), None if shift_CC is None else shift_CC.clone()
        return solve(weights, hessian, args, shift_CC=shift_CC, names=names, **settings)

    monkeypatch.setattr(compressor.modifiers.gptq, "quantize_gptq", noting)
    return found


def inputs_of(model: nn.Module, names: Sequence[str], batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the named modules are handed for all real tokens, [N, C]."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: seen[name].append(args[0])) for name in names
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool() for batch in batches]
    return {name: torch.cat([x[mask] for x, mask in zip(inputs, masks, strict=True)]) for name, inputs in seen.items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_shift_is_what_the_inputs_in_the_uncompressed_model_say(alpha: float, padded: bool, shifts: Shifts) -> None:
    """Measured again afterwards: every module was compressed on the inputs that the finished model gives it."""
    dataset: Any = [{"input_ids": row[: 8 + 2 * (place % 5)].tolist()} for place, row in enumerate(IDS)] if padded else IDS
    rows = [torch.tensor(row["input_ids"])[None] for row in dataset] if padded else IDS.split(1)
    hold_shifts(llama(), alpha, dataset, [{"input_ids": row} for row in rows], shifts)


def hold_shifts(base: nn.Module, alpha: float, dataset: Any, batches: Sequence[dict[str, Tensor]], shifts: Shifts) -> None:
    model = oneshot(copy.deepcopy(base), recipe=gptq(alpha=alpha), dataset=dataset, batch_size=4).model
    before, after = inputs_of(base, [*shifts], batches), inputs_of(model, [*shifts], batches)
    assert len(shifts) >= 8
    for name, (hessian, shift) in shifts.items():
        x, x_base = after[name], before[name]
        torch.testing.assert_close(hessian, 2 * x.t() @ x / len(x), rtol=1e-3, atol=1e-4)
        assert shift is not None
        is_first = re.fullmatch(r"model.layers.0.self_attn.[qkv]_proj", name) is not None  # nothing is compressed before that
        assert bool(shift.any()) is not is_first
        expected = alpha * 2 * (x_base - x).t() @ x / len(x)
        torch.testing.assert_close(shift, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


def scaled(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | None = None) -> Any:
    x = args[0] if output is None else output
    factors = torch.linspace(0.1, 4, x.shape[-1])
    return (x * factors,) if output is None else x * factors


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
@pytest.mark.parametrize("place", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm", "mlp"])
def test_hooks_of_the_models_author_run_in_the_uncompressed_model_too(place: str, kind: str, shifts: Shifts) -> None:
    base = llama()
    getattr(base.get_submodule(f"model.layers.0.{place}"), f"register_{kind}_hook")(scaled)
    hold_shifts(base, 1.0, IDS, [{"input_ids": row} for row in IDS.split(1)], shifts)


def test_inputs_that_are_turned_in_every_forward_are_turned_in_the_uncompressed_model_too() -> None:
    errors = {}
    for target in ("propagated", "base"):
        base = llama()
        model = oneshot(copy.deepcopy(base), recipe=[QuIPModifier(), gptq(target=target, alpha=1.0)], dataset=IDS, batch_size=4).model
        with torch.no_grad():
            errors[target] = float((model(IDS).logits - base(IDS).logits).square().mean())
    assert errors["base"] < errors["propagated"]


def test_outputs_come_closer_to_those_of_the_uncompressed_model() -> None:
    errors = {}
    for target in ("propagated", "base"):
        base = llama()
        model = oneshot(copy.deepcopy(base), recipe=gptq(target=target, alpha=1.0), dataset=IDS, batch_size=4).model
        with torch.no_grad():
            errors[target] = float((model(IDS).logits - base(IDS).logits).square().mean())
    assert errors["base"] < 0.9 * errors["propagated"]


class Counting(Modifier):
    """Looks at the inputs of one module."""

    name: str
    wants: str = "unused"
    _seen: list[bool] = PrivateAttr(default_factory=list)

    @property
    def base_stream(self) -> Any:
        return self.wants

    def on_initialize(self, state: State) -> bool:
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule(self.name), lambda module, args: self._seen.append(state.base_stream), "forward_pre")

    @property
    def calibration_need(self) -> Any:
        return "sequential"


@pytest.mark.parametrize("passes", ["one", "two"])
def test_only_those_who_ask_see_the_uncompressed_model(passes: str) -> None:
    plain, asking = Counting(name="model.layers.1.mlp.up_proj"), Counting(name="model.layers.1.mlp.up_proj", wants="wanted")
    oneshot(llama(), recipe=[gptq(target="base"), plain, asking], dataset=IDS, batch_size=4, passes=passes)
    assert plain._seen == [False] * 6
    assert sorted(asking._seen) == [False] * 6 + [True] * 6


def test_ranges_of_inputs_are_those_of_the_compressed_model() -> None:
    """Static ranges beside the target `base`: as in a run without it, for the first module, which sees the same in both."""
    static = {"group_0": {"targets": ["Linear"], "weights": INT4, "input_activations": {"num_bits": 8, "strategy": "tensor"}}}
    scales = {}
    for target in ("propagated", "base"):
        recipe = GPTQModifier(config_groups=static, ignore=["lm_head"], target=target)
        model = oneshot(llama(), recipe=recipe, dataset=IDS, batch_size=4).model
        x = inputs_of(model, ["model.layers.1.mlp.down_proj"], [{"input_ids": row} for row in IDS.split(4)])
        layer = model.get_submodule("model.layers.1.mlp.down_proj")
        scales[target] = float(layer.input_scale), float(x["model.layers.1.mlp.down_proj"].abs().max()) / 127.5
    for own, expected in scales.values():
        assert own == pytest.approx(expected, rel=0.02)


@pytest.mark.nightly
def test_by_default_few_bits_take_it_where_layers_run_once(shifts: Shifts) -> None:
    for options, expected in (
        ({}, True),
        ({"passes": "two"}, False),
        ({"engine": "suspend"}, False),
        ({"propagate_error": False}, False),
        ({"sequential_targets": ["LlamaDecoderLayer"]}, False),
        ({"pipeline": "basic"}, False),
    ):
        shifts.clear()
        oneshot(llama(), recipe=gptq(), dataset=IDS, batch_size=4, **options)
        assert any(shift is not None for _, shift in shifts.values()) is expected, options
    shifts.clear()
    eight = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}
    oneshot(llama(), recipe=GPTQModifier(config_groups=eight, ignore=["lm_head"]), dataset=IDS, batch_size=4)
    assert shifts and all(shift is None for _, shift in shifts.values())


class _Again(nn.Module):
    """A stack whose layers run twice, one way or the other."""

    def __init__(self, twice: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 if self.twice == "stack" else 1):
            for layer in self.layers:
                x = x + layer(x)
                x = x + layer(x / 2) if self.twice == "layer" else x
        return x


@pytest.mark.parametrize(
    ("twice", "passes", "runs"), [("layer", "one", False), ("layer", "two", True), ("stack", "two", False), ("", "one", True)]
)
def test_where_a_layer_is_used_again_when_it_is_compressed_there_is_no_uncompressed_model(
    twice: str, passes: Any, runs: bool, shifts: Shifts
) -> None:
    """Its second call would run with the compressed one."""
    torch.manual_seed(0)
    batches = DataLoader([{"x": torch.randn(2, 9, 16)} for _ in range(3)], batch_size=None)  # type: ignore[arg-type]
    asked: Any = {"dataset": batches, "passes": passes}
    if not runs:
        with pytest.raises(
            TracingError, match=r"target 'base' .* cannot be had here \(layers.0.*the forward uses it again after later layers"
        ):
            oneshot(_Again(twice).eval(), recipe=gptq((), target="base"), **asked)
        if passes == "one":
            result = oneshot(_Again(twice).eval(), recipe=gptq(()), **asked)
            assert any("the uncompressed model did not run beside the other (layers.0" in note for note in result.report.notes)
            assert all(shift is None for _, shift in shifts.values())
        return
    oneshot(_Again(twice).eval(), recipe=gptq((), target="base"), **asked)
    assert any(shift is not None for _, shift in shifts.values())


def test_asked_for_it_is_an_error_where_it_cannot_be_had() -> None:
    with pytest.raises(TracingError, match="target 'base' runs the uncompressed model beside the other, which the suspend engine cannot"):
        oneshot(llama(), recipe=gptq(target="base"), dataset=IDS, batch_size=4, engine="suspend")


def test_experts_compare_tokens_that_both_models_send_them(shifts: Shifts) -> None:
    """D of an expert's input by hand: tokens that the uncompressed model sends elsewhere count as unchanged."""
    base = moe()
    result = oneshot(copy.deepcopy(base), recipe=gptq(["lm_head", "re:.*mlp.gate$"]), dataset=IDS, batch_size=4)
    assert not any("not known" in note for note in result.report.notes)
    experts = [name for name in shifts if "experts" in name and name.startswith("model.layers.1")]
    assert len(experts) >= 4
    given = {}
    for key, model in (("base", base), ("compressed", result.model)):
        layer = "model.layers.1.mlp"
        seen: list[Tensor] = []
        handle = model.get_submodule(layer).register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        routed: list[Tensor] = []
        gate = model.get_submodule(f"{layer}.gate").register_forward_hook(lambda module, args, out, routed=routed: routed.append(out[-1]))
        with torch.no_grad():
            for row in IDS.split(4):
                model(row, use_cache=False)
        handle.remove()
        gate.remove()
        given[key] = torch.cat([x.flatten(0, 1) for x in seen]), torch.cat([chosen.flatten(0, -2) for chosen in routed])
    (x_base, chosen_base), (x, chosen) = given["base"], given["compressed"]
    for name in experts:
        if "gate_proj" not in name:
            continue
        expert = int(name.split("experts.")[1].split(".")[0])
        here, also = (chosen == expert).any(-1), (chosen_base == expert).any(-1)
        difference = torch.where(also[:, None], x_base - x, torch.zeros_like(x))[here]
        expected = 2 * difference.t() @ x[here] / int(here.sum())
        _, shift = shifts[name]
        assert shift is not None
        torch.testing.assert_close(shift, expected, rtol=1e-2, atol=2e-2 * float(expected.abs().max()))


class _Rows(nn.Module):
    """Hidden states of two dimensions: what it is handed has no tokens, or they are summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x.sum(1) if x.dim() > 2 else x))


@pytest.mark.parametrize("shape", [(6, 32), (6, 3, 32)], ids=["rows", "pooled"])
def test_hidden_states_of_two_dimensions_have_a_place_for_each_sample(shifts: Shifts, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batches = DataLoader([{"x": torch.randn(shape)} for _ in range(2)], batch_size=None)
    result = oneshot(_Rows(), recipe=gptq([], target="base"), dataset=batches)
    assert not any("not known" in note for note in result.report.notes)
    _, shift = shifts["layers.1.0"]
    assert shift is not None and bool(shift.any())


def test_inputs_that_cannot_be_lined_up_are_noted() -> None:
    kept = BaseInputs()
    kept.keep("m", torch.ones(5, 8), None)
    assert kept.take("m", torch.ones(4, 8), None, (2, 3)) is None
    assert list(kept.unmatched) == ["m"]
    kept = BaseInputs()
    base, x = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    kept.keep("m", base, None)
    base.zero_()  # the module goes on with what it was handed
    found = kept.take("m", x, None, (2, 3))
    assert found is not None and bool(found.any()) and not kept.unmatched
    assert kept.take("m", x, None, (2, 3)) is None  # called more often than there
    assert list(kept.unmatched) == ["m"]


class _Routed(nn.Module):
    """Blocks that get the tokens which a router picks, and put them back where they were."""

    def __init__(self, pick: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.routers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(32, 64)
        self.pick = pick

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for router, layer in zip(self.routers, self.layers, strict=True):
            x = getattr(self, f"_by_{self.pick}")(x, router(x).sum(-1), layer)
        return self.out(x)

    def _by_top(self, x: Tensor, scores: Tensor, layer: nn.Module) -> Tensor:
        index = scores.topk(4, dim=1).indices[..., None].expand(-1, -1, 32)
        return x.scatter(1, index, layer(x.gather(1, index)))

    def _by_mask(self, x: Tensor, scores: Tensor, layer: nn.Module) -> Tensor:
        x = x.clone()
        x[scores > 0] = layer(x[scores > 0])
        return x

    def _by_order(self, x: Tensor, scores: Tensor, layer: nn.Module) -> Tensor:
        order = scores.flatten().argsort()
        return layer(x.flatten(0, 1)[order])[order.argsort()].view_as(x)

    def _by_slot(self, x: Tensor, scores: Tensor, layer: nn.Module) -> Tensor:
        slots = scores.flatten().argsort().argsort()
        return layer(torch.zeros_like(x).flatten(0, 1).index_add_(0, slots, x.flatten(0, 1)))[slots].view_as(x)

    def _by_table(self, x: Tensor, scores: Tensor, layer: nn.Module) -> Tensor:
        picked = scores.unsqueeze(-1).gather(-1, scores.long().unsqueeze(-1) * 0)  # within a row
        return layer(x + self.embed.weight[scores.abs().long() % 64] + picked)


@pytest.mark.parametrize(("pick", "is_told"), [("top", True), ("mask", True), ("order", True), ("slot", True), ("table", False)])
def test_rows_of_other_tokens_are_not_compared(pick: str, is_told: bool) -> None:
    """Whatever the shapes: with a router that is compressed, too, the uncompressed model picks others. What is put back is compared."""
    torch.manual_seed(0)
    model = _Routed(pick).eval()
    result = oneshot(model, recipe=gptq([], target="base"), dataset=IDS, batch_size=4)
    notes = [note for note in result.report.notes if "not known" in note]
    assert [note.partition(" the inputs")[0] for note in notes] == (["GPTQModifier[0]: of layers.0.0 and 1 more"] if is_told else [])


def test_of_a_router_that_stays_the_choice_is_the_same() -> None:
    torch.manual_seed(0)
    model = _Routed("top").eval()
    result = oneshot(model, recipe=gptq(["re:routers.*", "re:layers.0.*"], target="base"), dataset=IDS, batch_size=4)
    assert not any("not known" in note for note in result.report.notes)


@pytest.mark.parametrize("inference", [False, True])
def test_what_was_written_where_no_version_counts_it_is_kept_as_well(inference: bool) -> None:
    kept = BaseInputs()
    for _ in range(2):  # batches
        with torch.inference_mode(inference):
            x = torch.randn(2, 3, 8)
            inputs = {"q": x.clone()}
            kept.keep("q", x, None)
            x.data.mul_(2.0)
            for name in ("k", "v"):
                inputs[name] = x.clone()
                kept.keep(name, x, None)
        found = {name: kept.take(name, torch.randn(2, 3, 8), None, (2, 3)) for name in inputs}
        assert all(torch.equal(found[name], inputs[name]) for name in inputs)
        assert found["k"] is found["v"]


def test_rounding_to_nearest_knows_no_base_stream() -> None:
    assert QuantizationModifier(scheme="W4A16").base_stream == "unused"


def test_an_alpha_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(CompressorError, match=r"alpha=0\.5 moves nothing with target='propagated'; leave one of them out"):
        gptq(alpha=0.5, target="propagated")
    assert gptq(alpha=0.5, mode="fast", target="base").base_stream == "required"
