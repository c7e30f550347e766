"""Rounding that is learned brings blocks closer to what they gave, keeps the best step, and ends alike however the run went"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    Qwen3MoeForCausalLM,
)

from compressor import load_compressed, oneshot, plan
from compressor.algorithms.autoround import LearnedRounding
from compressor.errors import CalibrationError, NumericsError, TracingError
from compressor.numerics import QuantizationArgs, dequantize, quantize, weight_qparams
from tests import tiny

TOKENS = torch.randint(0, 96, (32, 24), generator=torch.Generator().manual_seed(5))
FORMATS: dict[str, dict[str, Any]] = {
    "groups": {"num_bits": 3, "group_size": 16},
    "asymmetric": {"num_bits": 3, "group_size": 16, "symmetric": False},
    "channels": {"num_bits": 4, "strategy": "channel"},
    "tensor": {"num_bits": 4, "strategy": "tensor"},
    "asymmetric channels": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "fp8 channels": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 20]},  # the last are not full
    "MXFP8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "MXFP4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


def begun(weight: Tensor, args: QuantizationArgs) -> LearnedRounding:
    return LearnedRounding(weight, args, weight_qparams(weight, args, "w").global_scale, learn_range=True)


def llama() -> LlamaForCausalLM:
    return tiny.llama(vocab_size=96, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2)


def recipe(weights: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    groups = {"g": {"targets": ["Linear"], "weights": weights or FORMATS["groups"], **settings.pop("scheme", {})}}
    return {"AutoRoundModifier": {"ignore": settings.pop("ignore", ["lm_head"]), "config_groups": groups, "iters": 30, **settings}}


def details(result: Any, name: str = "model.layers.0.mlp.up_proj") -> dict[str, Any]:
    return dict(result.report.modules[name].details)


def error(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model.model(TOKENS).last_hidden_state - llama().model(TOKENS).last_hidden_state).square().mean())


def test_without_steps_nothing_is_said_of_losses_that_nobody_measured() -> None:
    result = oneshot(llama(), recipe=recipe(FORMATS[next(iter(FORMATS))], iters=0), dataset=TOKENS)
    assert result.report.modules and not any("block_loss" in one.details for one in result.report.modules.values())


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_come_closer_and_so_does_the_model(name: str) -> None:
    args = FORMATS[name]
    rounded = {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"], "weights": args}}}}
    result = oneshot(llama(), recipe=recipe(args), dataset=TOKENS)
    # A power of two as a scale halves or stays, which the rates of so few steps do not always get over in the first block.
    steps, before, after = (
        [details(result, f"model.layers.{layer}.mlp.up_proj")[what] for layer in (0, 1)]
        for what in ("best_step", "block_loss_before", "block_loss")
    )
    assert 0 < steps[1] <= 30 and min(now / then for now, then in zip(after, before, strict=True)) < 0.93
    assert error(result.model) < 0.9 * error(oneshot(llama(), recipe=rounded).model)


@pytest.mark.parametrize("name", FORMATS)
def test_it_begins_with_rounding_to_nearest(name: str) -> None:
    args = QuantizationArgs(**FORMATS[name])
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounding = begun(weight, args)
    qparams = weight_qparams(weight, args, "w")
    assert torch.equal(rounding.qparams().scale, qparams.scale)
    wide = qparams._replace(scale=qparams.scale.float())
    assert torch.equal(rounding.codes().float(), quantize(weight.float(), wide, args).float())
    assert torch.equal(rounding.values(), dequantize(rounding.codes(), rounding.qparams(), args).to(weight.dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_follows_the_signs_of_the_gradient(name: str) -> None:
    args = QuantizationArgs(**FORMATS[name])
    weight, slope = (torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    rounding = begun(weight, args)
    before = (rounding.values() * slope).sum()
    for _ in range(20):
        rounding.step(slope, 0.02, 0.005)
    assert (rounding.values() * slope).sum() < before
    assert rounding.state()[0].abs().max() <= 0.5
    assert all(float(one.min()) >= 0.5 and float(one.max()) <= 1 for one in rounding.state()[1:])
    kept = rounding.state()
    values = rounding.values()
    rounding.step(-slope, 0.3, 0.3)
    rounding.restore(kept)
    assert torch.equal(rounding.values(), values)


@pytest.mark.parametrize("name", FORMATS)
def test_an_offset_goes_to_either_neighbour_and_no_further(name: str) -> None:
    args = QuantizationArgs(**FORMATS[name])
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    rounding = begun(weight, args)
    nearest = rounding.values()
    found = []
    for sign in (1, -1):
        for _ in range(3):
            rounding.step(torch.full_like(weight, -sign), 0.5, 0.0)
        found.append(rounding.values())
    up, down = found
    assert bool((down <= nearest).all()) and bool((nearest <= up).all()) and bool((down < up).any())
    middle = (up + down) / 2
    between = dequantize(quantize(middle, rounding.qparams(), args), rounding.qparams(), args)
    assert all(bool(((one == up) | (one == down)).all()) for one in (nearest, between))


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_pruned_stays_zero(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(8, 32, generator=generator)
    gone = torch.rand(8, 32, generator=generator) < 0.5
    rounding = begun(weight.masked_fill(gone, 0), QuantizationArgs(**FORMATS[name]))
    for _ in range(20):
        rounding.step(torch.randn(8, 32, generator=generator), 0.2, 0.05)
        assert not rounding.values()[gone].any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_follow_the_slope_of_the_loss_where_nothing_is_rounded_away(symmetric: bool) -> None:
    """With 8 bits the sum over roundings is smooth enough for differences to tell the sign of each slope."""
    args = QuantizationArgs(num_bits=8, group_size=64, symmetric=symmetric)
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    rounding = begun(weight, args)
    kept = rounding.state()
    for part in (1, 2):
        start = [one.clone() for one in kept]
        start[1].fill_(0.7)
        start[2].fill_(0.7)
        losses = []
        for share in (0.65, 0.75):
            moved = [one.clone() for one in start]
            moved[part].fill_(share)
            rounding.restore(tuple(moved))
            losses.append((rounding.values() - weight).square().sum(1))
        rounding.restore(tuple(start))
        rounding.step(2 * (rounding.values() - weight), 0.0, 0.01)
        went = (rounding.state()[part] - 0.7).flatten().sign()
        clear = ((losses[0] - losses[1]).abs() > 1e-3) & (went != 0)  # of a symmetric range only the longer end counts
        assert clear.any()
        assert torch.equal(went[clear], (losses[0] - losses[1]).sign()[clear])


def digest(model: nn.Module) -> str:
    state = sorted(model.state_dict().items())
    return hashlib.sha256(b"".join(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for _, tensor in state)).hexdigest()


@pytest.mark.parametrize("target", ["propagated", "base"])
def test_engines_and_passes_end_alike(target: str) -> None:
    options: list[dict[str, Any]] = [{}, {"passes": "one"}, *([{"engine": "suspend"}] if target == "propagated" else [])]
    found = {digest(oneshot(llama(), recipe=recipe(target=target, iters=5), dataset=TOKENS, **one).model) for one in options}
    assert len(found) == 1


def test_the_base_as_target_brings_the_model_closer() -> None:
    result = oneshot(llama(), recipe=recipe(target="base"), dataset=TOKENS)
    assert (
        details(result, "model.layers.1.mlp.up_proj")["block_loss"]
        < 0.9 * details(result, "model.layers.1.mlp.up_proj")["block_loss_before"]
    )


@pytest.mark.nightly
def test_the_uncompressed_stream_is_taken_where_layers_run_once() -> None:
    def run(target: str | None, **options: Any) -> str:
        return digest(oneshot(llama(), recipe=recipe(iters=3, target=target), dataset=TOKENS, **options).model)

    assert run(None, passes="one") == run("base", passes="one") != run("propagated", passes="one")
    assert run(None, engine="suspend") == run("propagated", passes="two")
    with pytest.raises(TracingError, match="target 'base' runs the uncompressed model beside the other"):
        run("base", engine="suspend")


@pytest.mark.nightly
def test_experts_learn_with_the_block_that_they_lie_in() -> None:
    torch.manual_seed(0)
    config = tiny.config("qwen3_moe", vocab_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=16, moe_intermediate_size=32)
    config.initializer_range = 0.2
    model = Qwen3MoeForCausalLM(config).eval()
    result = oneshot(model, recipe=recipe(ignore=["lm_head", "re:.*mlp.gate$"]), dataset=TOKENS)
    found = details(result, "model.layers.1.mlp.experts.2.gate_proj")
    assert found["block_loss"] < found["block_loss_before"]
    assert found["best_step"] == details(result, "model.layers.1.self_attn.q_proj")["best_step"]


def test_modules_outside_of_blocks_are_blocks_of_their_own_and_quantized_inputs_are_seen() -> None:
    inputs = {"input_activations": {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True}}
    plain, coarse = (
        oneshot(llama(), recipe=recipe(FORMATS["channels"], ignore=["re:.*layers.1.*"], scheme=one, iters=10), dataset=TOKENS)
        for one in ({}, inputs)
    )
    for name in ("lm_head", "model.layers.0.mlp.up_proj"):
        assert 0 < details(plain, name)["block_loss"] <= details(plain, name)["block_loss_before"]
        assert details(coarse, name)["block_loss_before"] > 1.2 * details(plain, name)["block_loss_before"]
    assert details(coarse)["block_loss"] < details(coarse)["block_loss_before"]


@pytest.mark.parametrize("name", ["groups", "fp8 blocks", "NVFP4"])
def test_a_checkpoint_is_read_back(name: str, tmp_path: Path) -> None:
    llama().bfloat16().save_pretrained(tmp_path / "base")
    result = oneshot(tmp_path / "base", recipe=recipe(FORMATS[name], iters=4), dataset=TOKENS, output_dir=tmp_path / "out")
    loaded = load_compressed(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS[:2]).logits, result.model(TOKENS[:2]).logits)


class Twice(nn.Module):
    """Calls a layer before and after another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.first(self.middle(torch.relu(self.first(x))))))
        return out


ROWS = [{"x": row} for row in torch.randn(24, 6, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.2, 3, 32)]


def test_where_streams_do_not_correspond_the_target_is_the_other_one_unless_it_was_asked_for() -> None:
    def run(target: str | None) -> Any:
        return oneshot(Twice().eval(), recipe=recipe(ignore=[], iters=4, target=target), dataset=DataLoader(ROWS, batch_size=4))

    left_to_us = run(None)
    assert digest(left_to_us.model.first) == digest(run("propagated").model.first)
    told = "(first: the forward uses it again after later layers, compressed by then)"
    assert f"the uncompressed model did not run beside the other {told}" in left_to_us.report.notes, left_to_us.report.notes
    with pytest.raises(TracingError, match=f"target 'base' .* cannot be had here {re.escape(told)}"):
        run("base")


class Picks(nn.Module):
    """Hands two layers the rows that a layer before them scores highest, or above zero."""

    def __init__(self, by_mask: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.by_mask = nn.Linear(32, 32), by_mask
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x).sum(-1)
        index: Any = scores > 0 if self.by_mask else (torch.arange(len(x))[:, None], scores.topk(3, dim=1).indices)
        x = x.clone()
        x[index] = self.layers[1](self.layers[0](x[index]))
        return x


@pytest.mark.parametrize("by_mask", [False, True], ids=["as many", "more or fewer"])
def test_rows_that_a_router_picks_are_those_of_other_tokens(by_mask: bool) -> None:
    def run(target: str | None) -> Any:
        return oneshot(Picks(by_mask).eval(), recipe=recipe(ignore=[], iters=4, target=target), dataset=DataLoader(ROWS, batch_size=4))

    left_to_us, propagated = run(None), run("propagated")
    for name in ("layers.0.0", "layers.1.0"):
        assert digest(left_to_us.model.get_submodule(name)) == digest(propagated.model.get_submodule(name))
        assert details(left_to_us, name)["target"] == "propagated"
    assert any("calls of the blocks of layers.0.0, layers.1.0" in note for note in left_to_us.report.notes), left_to_us.report.notes
    with pytest.raises(CalibrationError, match="correspond, for their rows are other tokens; use target='propagated'"):
        run("base")


def test_a_call_goes_once_through_the_hooks_of_the_models_author() -> None:
    """Which swap the halves of the input: what a block gives is of one size with them and without, unless they swap twice."""

    def before(swaps: bool) -> tuple[float, float]:
        model = nn.Sequential(nn.Linear(32, 32)).eval()
        torch.nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(0))
        if swaps:
            with torch.no_grad():
                model[0].weight.copy_(model[0].weight.roll(16, 1))
            model[0].register_forward_pre_hook(lambda module, args: (args[0].roll(16, -1),))
        data = DataLoader([{"input": row["x"]} for row in ROWS], batch_size=4)
        found = details(oneshot(model, recipe=recipe(FORMATS["channels"], ignore=[], iters=4), dataset=data), "0")
        return found["block_loss_before"], found["block_loss"]

    assert before(True) == pytest.approx(before(False), rel=1e-3)


def test_an_expert_without_tokens_is_a_fallback() -> None:
    model, tokens = tiny.qwen3_moe(vocab_size=96), torch.full((3, 4), 7)
    settings = {"ignore": ["lm_head", "re:.*mlp.gate$"], "iters": 2}
    with pytest.raises(CalibrationError, match=r"experts\.\d+\.\w+: no calibration token reached it; the recipe allows fallback_budget=0"):
        oneshot(model, recipe=recipe(**settings), dataset=tokens)
    result = oneshot(tiny.qwen3_moe(vocab_size=96), recipe=recipe(fallback_budget=99, **settings), dataset=tokens)
    assert result.report.fallbacks and all(one.kind == "no_tokens" and "experts" in one.module for one in result.report.fallbacks)
    assert not any("no gradient came to" in note for note in result.report.notes)


class Handing(nn.Module):
    """Two layers, the second of which is handed what the first gives, in some container."""

    class Layer(nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            self.inner, self.wrap = nn.Linear(32, 32), wrap

        def forward(self, given: Any) -> Any:
            x = given["x"] if isinstance(given, dict) else given.x if hasattr(given, "x") else given
            return self.wrap(torch.tanh(self.inner(x)))

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([self.Layer(wrap), self.Layer(lambda x: x)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Shelf:
    """What layers hand each other beside their arguments, in an object that torch does not look into."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Sharing(nn.Module):
    """Layers add what those before have left in an object, and leave their own there."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: Tensor, shelf: Any) -> Tensor:
            seen = shelf.seen if isinstance(shelf, Shelf) else shelf["seen"]
            x = torch.tanh(self.inner(x + sum(seen)))
            seen.append(x)
            return x

    def __init__(self, shelf: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shelf, self.layers = shelf, nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        shelf = self.shelf()
        for layer in self.layers:
            x = layer(x, shelf)
        return x


@pytest.mark.parametrize("target", ["base", "propagated"])
def test_what_layers_share_in_an_object_is_kept_as_what_they_share_in_a_dict(target: str) -> None:
    chosen = recipe(ignore=[], iters=4, target=target)
    losses = []
    for shelf in (lambda: {"seen": []}, Shelf):
        data = DataLoader(ROWS[:8], batch_size=4)
        result = oneshot(Sharing(shelf).eval(), recipe=chosen, dataset=data, sequential_targets=["Layer"])
        losses.append([details(result, f"layers.{number}.inner")["block_loss_before"] for number in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=0.05) and min(losses[0]) > 0


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_block_may_be_handed_a_container_that_torch_looks_into(as_dict: bool) -> None:
    model = Handing((lambda x: {"x": x}) if as_dict else (lambda x: SimpleNamespace(x=x))).eval()
    chosen, data = recipe(ignore=[], iters=4, target="propagated"), DataLoader(ROWS, batch_size=4)
    if as_dict:
        found = details(oneshot(model, recipe=chosen, dataset=data, sequential_targets=["Layer"]), "layers.1.inner")
        assert 0 < found["block_loss"] <= found["block_loss_before"]
        return
    with pytest.raises(CalibrationError, match=r"layers\.[01]: it (gives|is handed) SimpleNamespace"):
        oneshot(model, recipe=chosen, dataset=data, sequential_targets=["Layer"], engine="suspend")


WHOLE = "were calibrated as a whole, for what they take or give is learned from, too"


@pytest.mark.parametrize(
    ("pruning", "learning", "is_said"),
    [
        ({"ignore": ["lm_head"]}, {"iters": 2}, True),
        ({"ignore": ["lm_head"], "target": "base"}, {"iters": 2, "target": "propagated"}, True),
        ({"targets": ["re:.*(up|down)_proj$"]}, {"iters": 2, "ignore": ["lm_head", "re:.*(up|down)_proj"]}, True),
        ({"ignore": ["lm_head"]}, {"iters": 0}, False),
        ({"targets": ["lm_head"]}, {"iters": 2, "ignore": ["re:.*layers.*"]}, False),
    ],
    ids=["together", "towards the base", "other modules of the block", "nothing learns", "a block of one module"],
)
def test_what_is_pruned_beside_it_is_pruned_block_by_block_and_said(
    pruning: dict[str, Any], learning: dict[str, Any], is_said: bool
) -> None:
    pruner = {"SparseGPTModifier": {"sparsity": 0.5, **pruning}}
    result = oneshot(llama(), recipe={**pruner, **recipe(**learning)}, dataset=TOKENS)
    notes = result.report.notes
    assert is_said is any(WHOLE in note for note in notes), notes
    planned = plan(llama(), recipe={**pruner, **recipe(**learning)}, num_calibration_samples=len(TOKENS), max_seq_length=24)
    assert [note for note in planned.notes if WHOLE in note] == [note for note in notes if WHOLE in note]


def group(targets: str) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": [targets], "weights": {"num_bits": 2, "group_size": 16}}}}


LATE = "re:.*down_proj$"
STATIC_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("beside", "inside"),
    [
        ({"GPTQModifier": group(LATE), "AutoRoundModifier": {**group("re:.*(gate|up)_proj$"), "iters": 2}}, "mlp.down_proj"),
        ({"GPTQModifier": {**group("re:.*_proj$"), "kv_cache_scheme": STATIC_KV}}, "self_attn.o_proj"),
        ({"GPTQModifier": group("re:.*_proj$")}, None),
        ({"AutoRoundModifier": {**group("re:.*_proj$"), "iters": 2}}, None),
    ],
    ids=["a block that learns", "attention with static scales", "nothing around", "nothing inside"],
)
def test_what_is_solved_in_a_module_that_is_watched_itself_sees_no_error_in_it_and_that_is_said(
    beside: dict[str, Any], inside: str | None
) -> None:
    notes = oneshot(llama(), recipe=beside, dataset=TOKENS).report.notes
    said = [note for note in notes if WHOLE in note]
    assert len(said) == (inside is not None) and all(f"model.layers.0.{inside}" in note for note in said), notes


def test_what_was_pruned_in_a_run_before_is_not_said_to_be_pruned_as_a_whole() -> None:
    pruning = {"SparseGPTModifier": {"sparsity": 0.5, "ignore": ["lm_head"]}}
    first = oneshot(llama(), recipe=pruning, dataset=TOKENS)
    later = oneshot(first.model, recipe=recipe(iters=2), dataset=TOKENS)
    assert not any(WHOLE in note for note in later.report.notes), later.report.notes


def test_what_cannot_be_learned_is_refused() -> None:
    with pytest.raises(CalibrationError, match="a block is learned at once; leave sequential_targets out"):
        oneshot(llama(), recipe=recipe(), dataset=TOKENS, sequential_targets=["LlamaMLP", "LlamaAttention"])


SPOILT: dict[str, tuple[Any, str]] = {
    # A token that one of 32 sequences holds: not among those on which the best step is found, perhaps.
    "NaN for one token": (lambda model: model.model.embed_tokens.weight[95].fill_(torch.nan), "layers.0: its calibration outputs hold NaN"),
    "infinite values": (
        lambda model: model.model.layers[1].mlp.up_proj.weight.mul_(1e38),
        "layers.1: its calibration outputs hold NaN or inf",
    ),
    "squares that are none": (
        lambda model: [model.model.layers[1].mlp.get_submodule(name).weight.mul_(1e12) for name in ("up_proj", "gate_proj")],
        "layers.1: the squared error of its outputs is inf on 16",
    ),
}


@pytest.mark.parametrize("target", ["propagated", "base"])
@pytest.mark.parametrize("what", SPOILT)
def test_a_block_whose_loss_is_no_number_is_named(what: str, target: str) -> None:
    model, (spoil, message) = llama(), SPOILT[what]
    ids = torch.where(TOKENS == 95, 0, TOKENS)
    ids[17, 5] = 95
    with torch.no_grad():
        spoil(model)
    with pytest.raises(NumericsError, match=message):
        oneshot(model, recipe=recipe(target=target, iters=2), dataset=ids)


def test_padding_is_not_aimed_at() -> None:
    rows: list[Tensor] = [row[: 8 + index % 3 * 8] for index, row in enumerate(TOKENS)]
    data = [{"input_ids": row.tolist()} for row in rows]
    padded = oneshot(llama(), recipe=recipe(iters=4), dataset=data, batch_size=8)
    apart = oneshot(llama(), recipe=recipe(iters=4), dataset=data, batch_size=1)
    assert details(padded)["block_loss_before"] == pytest.approx(details(apart)["block_loss_before"], rel=1e-3)


ALIBI: dict[str, Any] = {
    "bloom, [batch * heads, 1, tokens]": lambda: BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4)),
    "mpt, [heads, 1, tokens] in batches of as many": lambda: MptForCausalLM(MptConfig(vocab_size=96, d_model=32, n_layers=1, n_heads=4)),
}


@pytest.mark.parametrize("name", ALIBI)
def test_a_bias_by_heads_goes_with_the_sequences_that_are_drawn(name: str) -> None:
    def run(batch_size: int) -> float:
        torch.manual_seed(0)
        result = oneshot(ALIBI[name]().eval(), recipe=recipe(iters=1, batch_size=3), dataset=TOKENS[:8], batch_size=batch_size)
        return float(next(iter(result.report.modules.values())).details["block_loss_before"])

    assert run(4) == pytest.approx(run(1), rel=1e-4)
