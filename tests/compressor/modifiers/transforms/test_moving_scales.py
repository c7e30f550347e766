"""SmoothQuant, logarithmic equalization, AWQ: their formulas, what counts as a token, and that the model stays what it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from compressor import oneshot
from compressor.algorithms.smoothing import equalizing_scales, search_awq, smooth_scales
from compressor.errors import CalibrationError, CompressorError, NumericsError, RecipeError, TargetError
from compressor.lifecycle import Session, State
from compressor.modifiers.gptq import GPTQModifier
from compressor.modifiers.quantization import QuantizationModifier
from compressor.modifiers.transforms.awq import AWQModifier
from compressor.modifiers.transforms.quip import QuIPModifier
from compressor.modifiers.transforms.smoothing import LogarithmicEqualizationModifier, SmoothQuantModifier
from compressor.modifiers.transforms.spinquant import SpinQuantModifier
from compressor.numerics import QuantizationArgs, weight_qparams
from compressor.numerics.quantize import dequantize, quantize
from tests import tiny

IDS = torch.randint(64, (12, 10), generator=torch.Generator().manual_seed(0))
INT4 = {"num_bits": 4, "group_size": 16, "strategy": "group"}
GROUPS: dict[str, Any] = {"group_0": {"targets": ["Linear"], "weights": INT4}}
QKV = ["q_proj", "k_proj", "v_proj"]


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = tiny.llama()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # a few channels are far larger than the others, as in large models
            parameter.data[::7] *= 20
    return model.to(dtype)


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def inputs_of(model: nn.Module, name: str, ids: Tensor) -> Tensor:
    """What a layer is handed, [N, C]."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
    logits(model, ids)
    handle.remove()
    return torch.cat(seen)


def rounding(**settings: Any) -> QuantizationModifier:
    return QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"], **settings)


def test_smoothing_is_the_formula_of_the_paper() -> None:
    act, weight = torch.tensor([4.0, 9.0, 0.0, 1.0]), torch.tensor([1.0, 4.0, 2.0, 0.0])
    found = smooth_scales(act, weight, 0.5)
    assert torch.allclose(found, torch.tensor([2.0, 1.5, 3**0.5, 3**0.5]))  # the last two are dead on one side
    assert torch.allclose(smooth_scales(act, weight, 1.0)[:2], act[:2])


def test_equalizing_is_the_formula_of_its_paper() -> None:
    found = equalizing_scales(torch.tensor([6.0, 0.0]), torch.tensor([1.0, 1.0]))
    assert torch.allclose(found, torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize(("dead", "unit"), [("weights", 20.0), ("activations", 0.005)])
def test_dead_channels_do_not_decide_what_rounding_costs(dead: str, unit: float) -> None:
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            norms = {layer.input_layernorm: ("self_attn", "qkv"), layer.post_attention_layernorm: ("mlp", ("gate", "up"))}
            for norm, (block, names) in norms.items():
                norm.weight.mul_(unit)
                norm.weight[:3] *= dead != "activations"
                for name in names:
                    layer.get_submodule(f"{block}.{name}_proj").weight.div_(unit)[:, :3] *= dead != "weights"
    before, plain = logits(model), copy.deepcopy(model)
    inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "tensor"}, "input_activations": inputs}
    rounded = QuantizationModifier(config_groups={"g": scheme}, ignore=["lm_head"])
    oneshot(model, recipe=[SmoothQuantModifier(), rounded.model_copy(deep=True)], dataset=IDS)
    oneshot(plain, recipe=[rounded], dataset=IDS)
    ratio = (logits(model) - before).norm() / (logits(plain) - before).norm()
    assert ratio < 1.2


@pytest.mark.parametrize("kind", [SmoothQuantModifier, LogarithmicEqualizationModifier])
def test_norms_and_their_readers_take_the_scales(kind: type[SmoothQuantModifier]) -> None:
    model, plain = llama(), llama()
    result = oneshot(model, recipe=kind(), dataset=IDS)
    x = inputs_of(plain, "model.layers.1.self_attn.q_proj", IDS).abs().amax(0)
    attention = plain.model.layers[1].self_attn
    weights = torch.cat([attention.get_submodule(name).weight for name in QKV]).detach().abs().amax(0)
    scales = (x / weights).sqrt() if kind is SmoothQuantModifier else x / torch.log2(2 + x)
    assert torch.allclose(model.model.layers[1].input_layernorm.weight, plain.model.layers[1].input_layernorm.weight / scales, rtol=1e-5)
    for name in QKV:
        given, before = model.model.layers[1].self_attn.get_submodule(name).weight, attention.get_submodule(name).weight
        assert torch.allclose(given, before * scales, rtol=1e-5)
    assert torch.allclose(logits(model), logits(plain), atol=1e-5)
    assert "scales of 5 modules were moved" in result.report.notes[0]


@pytest.mark.parametrize(("modifier", "said"), [
    (SmoothQuantModifier, r"mappings: the model gives NaN, and model.layers.1.self_attn.q_proj is the first that is handed NaN"),
    (AWQModifier, r"mappings: the model gives NaN, and model.layers.1.self_attn.q_proj is the first"),
    (SpinQuantModifier, r"mappings: the model gives NaN, and model.layers.1.self_attn.q_proj is the first"),
    (QuIPModifier, r"QuIPModifier\[0\]: the model gives NaN or infinity as it is"),
])  # fmt: skip
def test_a_model_that_gives_nan_is_told_so_and_not_that_it_draws_random_numbers(modifier: Any, said: str) -> None:
    model = llama()
    model.model.layers[1].input_layernorm.weight.data[3] = torch.nan
    with pytest.raises(NumericsError, match=said):
        oneshot(model, recipe=[modifier(), rounding()], dataset=IDS)


@pytest.mark.parametrize("modifier", [SmoothQuantModifier, AWQModifier])
@pytest.mark.parametrize("make", [llama, tiny.qwen3_moe])
def test_outputs_stay_what_they_were(modifier: Any, make: Any) -> None:
    """With eight bits behind it, which hide nothing as coarse as a scale in the wrong place."""
    model, plain = make(), make()
    groups: Any = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}
    recipe = [modifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    oneshot(model, recipe=recipe, dataset=IDS)
    before, after = logits(plain), logits(model)
    assert float((after - before).abs().max() / before.abs().max()) < 0.05


def test_padding_counts_for_nothing() -> None:
    """Rows of different lengths give what the same rows give one by one, whatever stands in the padding."""
    rows: Any = [{"input_ids": row[: 4 + place % 6].tolist()} for place, row in enumerate(IDS)]
    padded, single = llama(), llama()
    oneshot(padded, recipe=SmoothQuantModifier(), dataset=rows, batch_size=6)
    oneshot(single, recipe=SmoothQuantModifier(), dataset=rows, batch_size=1)
    for name, weight in padded.state_dict().items():
        assert torch.allclose(weight, single.state_dict()[name], rtol=1e-4), name


@pytest.mark.parametrize("duo", [True, False, "both"])
def test_the_search_finds_what_forwards_would_find(duo: Any) -> None:
    """The error of each candidate by its outputs on all tokens, in float64."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(300, 32, generator=generator) * torch.logspace(-1, 1.5, 32)[torch.randperm(32, generator=generator)]
    weights = [torch.randn(24, 32, generator=generator), torch.randn(8, 32, generator=generator)]
    args = QuantizationArgs(num_bits=3, group_size=16, strategy="group")
    found = search_awq(weights, [args, args], 2 * x.T @ x / len(x), x.abs().mean(0), duo_scaling=duo)

    def error(scales: Tensor) -> float:
        total = 0.0
        for weight in weights:
            scaled = weight * scales
            qparams = weight_qparams(scaled, args)
            rounded = dequantize(quantize(scaled, qparams, args), qparams, args)
            total += float(((x / scales).double() @ rounded.double().T - x.double() @ weight.double().T).square().sum())
        return total / sum(float((x.double() @ weight.double().T).square().sum()) for weight in weights)

    assert found.error == pytest.approx(error(found.scales_C), rel=1e-3)
    assert found.error_before == pytest.approx(error(torch.ones(32)), rel=1e-3)
    assert found.error < 0.8 * found.error_before
    neighbours = [found.scales_C**power for power in (0.8, 1.25)]
    assert all(error(scales) > 0.9 * found.error for scales in neighbours)


def test_channels_that_never_fire_lie_among_the_others() -> None:
    """They set the size of all, and what moved into them hid the rows of the others in a scale for the whole tensor."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(300, 32, generator=generator) * torch.logspace(-1, 1, 32)
    x[:, ::8] = 0
    args = QuantizationArgs(num_bits=3, group_size=16, strategy="group")
    scales_C = search_awq([torch.randn(24, 32, generator=generator)], [args], 2 * x.T @ x / len(x), x.abs().mean(0)).scales_C
    assert bool((scales_C[::8] == 1).all()) and float(scales_C.min()) < 1 < float(scales_C.max())
    live = scales_C[(x != 0).any(0)]
    assert float(live.min() * live.max()) == pytest.approx(1, rel=1e-5)


def test_awq_makes_rounding_cost_less_where_activations_differ() -> None:
    plain, rounded, scaled = llama(), llama(), llama()
    oneshot(rounded, recipe=rounding(), dataset=None)
    result = oneshot(scaled, recipe=[AWQModifier(), rounding()], dataset=IDS)
    truth = logits(plain)
    assert (logits(scaled) - truth).square().mean() < 0.8 * (logits(rounded) - truth).square().mean()
    details = result.report.modules["model.layers.0.input_layernorm"].details
    assert float(details["error"]) < float(details["error_before"])


def test_written_mappings_and_ignored_sources_are_honoured() -> None:
    mappings = [[[f"re:.*{name}" for name in QKV], "re:.*input_layernorm"]]
    model, plain = llama(), llama()
    oneshot(model, recipe=SmoothQuantModifier(mappings=mappings, ignore=["model.layers.0.input_layernorm"]), dataset=IDS)
    changed = {name for name, one in model.state_dict().items() if not torch.equal(one, plain.state_dict()[name])}
    attention = {f"model.layers.1.self_attn.{name}.weight" for name in QKV}
    assert changed == {"model.layers.1.input_layernorm.weight", *attention}


def test_written_mappings_may_stand_behind_a_modifier_that_quantizes_other_layers() -> None:
    def recipe(scaled: AWQModifier) -> list[Any]:
        rest = QuantizationModifier(targets=[r"re:.*(gate|up|down)_proj$"], scheme="W8A8")
        return [GPTQModifier(targets=[r"re:.*(q|k|v|o)_proj$"], scheme="W8A8"), scaled, rest]

    scaled = AWQModifier(mappings=[[["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"]])
    result = oneshot(llama(), recipe=recipe(scaled), dataset=IDS)
    assert [one["source"] for one in result.report.transforms] == [f"model.layers.{index}.post_attention_layernorm" for index in range(2)]
    touching = AWQModifier(mappings=[[[f"re:.*{name}" for name in QKV], "re:.*input_layernorm"]])
    with pytest.raises(RecipeError, match="q_proj is quantized by a modifier before it"):
        oneshot(llama(), recipe=recipe(touching), dataset=IDS)


@pytest.mark.parametrize(
    ("recipe", "error", "why"),
    [
        ([SmoothQuantModifier(mappings=[[["re:.*gate_proj"], "re:.*input_layernorm"]])], TargetError, "gate_proj does not read"),
        ([SmoothQuantModifier(ignore=["LlamaRMSNorm"])], TargetError, "ignore names all sources"),
        ([rounding(), SmoothQuantModifier()], RecipeError, "let it stand before those that quantize"),
        ([AWQModifier()], RecipeError, "no modifier behind it quantizes weights"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_changed(recipe: list[Any], error: type[CompressorError], why: str) -> None:
    model, plain = llama(), llama()
    with pytest.raises(error, match=why):
        oneshot(model, recipe=recipe, dataset=IDS)
    assert all(torch.equal(one, plain.state_dict()[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_calibration_steps": 4}, "num_calibration_steps: it is not done here"),
        ({"mappings": []}, "an empty list"),
        ({"mappings": ["re:.*norm"]}, "is none; give"),
        ({"smoothing_strength": 1.5}, "smoothing_strength"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        SmoothQuantModifier(**settings)


def test_an_abort_brings_the_scales_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(GPTQModifier, "compress", fail)
    model, plain = llama(), llama()
    with pytest.raises(RuntimeError, match="in the middle"):
        oneshot(model, recipe=[SmoothQuantModifier(), GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])], dataset=IDS)
    assert all(torch.equal(one, plain.state_dict()[name]) for name, one in model.state_dict().items())


@pytest.mark.nightly
def test_a_resumed_run_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model"
    llama().save_pretrained(source)

    def run(folder: str, **options: Any) -> None:
        recipe = [SmoothQuantModifier(), AWQModifier(), GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])]
        oneshot(source, recipe=recipe, dataset=IDS, output_dir=tmp_path / folder, run_dir=tmp_path / f"{folder}.run", **options)

    run("whole")
    compress, calls = GPTQModifier.compress, []

    def fail_later(self: GPTQModifier, state: Any, names: list[str]) -> None:
        calls.append(names)
        if len(calls) == 4:
            raise KeyboardInterrupt
        compress(self, state, names)

    monkeypatch.setattr(GPTQModifier, "compress", fail_later)
    with pytest.raises(KeyboardInterrupt):
        run("cut")
    monkeypatch.setattr(GPTQModifier, "compress", compress)
    run("cut", resume=True)
    ours, theirs = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("whole", "cut"))
    assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_lose_no_more_than_a_rounding(dtype: torch.dtype) -> None:
    model, plain = llama(dtype), llama(dtype)
    exact = logits(plain.float())
    unmoved = (logits(llama(dtype)).float() - exact).square().mean()
    oneshot(model, recipe=SmoothQuantModifier(), dataset=IDS)
    assert all(bool(torch.isfinite(one).all()) for one in model.state_dict().values())
    assert (logits(model).float() - exact).square().mean() < 4 * unmoved


@pytest.mark.parametrize("kind", [SmoothQuantModifier, LogarithmicEqualizationModifier, AWQModifier])
def test_a_run_without_calibration_does_not_pass_for_a_smoothed_one(kind: Any) -> None:
    session = Session(State(model=llama()), [kind()])
    session.initialize()
    with pytest.RaisesGroup(pytest.RaisesExc(CalibrationError, match="no scale was moved")):
        session.finalize()


class _TwoWays(nn.Module):
    """Short batches, or those with an image, read the norm once more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed, self.norm = nn.Embedding(64, 32), nn.RMSNorm(32)
        self.norm.weight.data[::7] *= 20
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, input_ids: Tensor, image: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        x = self.norm(hidden)
        made = self.down(self.up(x).relu())
        if image is not None or (self.kind == "short" and input_ids.shape[1] < 6):
            made = made + 0.5 * x
        logits = self.head(hidden + made)
        if self.kind == "masked":
            logits = logits.masked_fill((input_ids == 0)[..., None], torch.nan)
        return (made.sum(), logits) if self.kind == "tuple" else logits  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["short", "image"])
@pytest.mark.parametrize("modifier", [SmoothQuantModifier, AWQModifier])
def test_a_way_that_other_batches_take_alone_is_noticed(modifier: Any, kind: str) -> None:
    ids = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1))
    odd = {"input_ids": ids[:, :4]} if kind == "short" else {"input_ids": ids, "image": torch.ones(8, 1)}

    def run(*batches: Any) -> Any:
        recipe = [modifier(), QuantizationModifier(config_groups=GROUPS, ignore=["head"])]
        return oneshot(_TwoWays(kind).double(), recipe=recipe, dataset=DataLoader([*batches], batch_size=None), pipeline="basic")

    with pytest.raises(TargetError, match=r"\[0\]: on batch 1 \(8, \d+\) the model gives other outputs than before"):
        run({"input_ids": ids}, odd)
    assert run({"input_ids": ids}, {"input_ids": ids[:, :8]}).report.transforms


@pytest.mark.parametrize("kind", ["tuple", "masked"])
def test_whatever_a_model_gives_is_compared_but_what_is_nan_before(kind: str) -> None:
    ids = torch.randint(1, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    short = ids[:, :4].clone()
    short[:, 1:] = 0
    batches: Any = [{"input_ids": ids}, {"input_ids": short}]
    recipe = [SmoothQuantModifier(), QuantizationModifier(config_groups=GROUPS, ignore=["head"])]
    model = _TwoWays(kind)
    assert oneshot(model, recipe=recipe, dataset=DataLoader(batches, batch_size=None), pipeline="basic").report.transforms
