"""The observer imatrix_mse: errors of a weight count by the inputs that they meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from compressor import AutoRoundModifier, AWQModifier, GPTQModifier, QuantizationModifier, oneshot
from compressor.errors import CalibrationError, CompressorError, NumericsError, SchemeError
from compressor.numerics import QuantizationArgs, calculate_qparams, weight_qparams
from compressor.numerics.quantize import fake_quantize
from tests import tiny

IDS = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(0))


def args(**settings: Any) -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, observer="imatrix_mse", **{"strategy": "group", "group_size": 16, **settings})


def groups(**settings: Any) -> dict[str, Any]:
    return {"g": {"targets": ["Linear"], "weights": args(**settings).model_dump(exclude_none=True, exclude_defaults=True)}}


def llama() -> LlamaForCausalLM:
    model = tiny.llama()
    model.model.layers[0].input_layernorm.weight.data[::5] *= 30
    return model


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_each_group_gets_the_range_with_the_least_weighted_error(strategy: str, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, importance = torch.randn(6, 32, generator=generator), torch.rand(32, generator=generator) ** 4
    form = args(strategy=strategy, group_size=16 if strategy == "group" else None, symmetric=symmetric, observer_kwargs={"patience": None})
    found = weight_qparams(weight, form, importance_C=importance)
    width = 16 if strategy == "group" else 32
    flat = form.model_copy(update={"strategy": "channel", "group_size": None})
    for row in range(6):
        for start in range(0, 32, width):
            piece, counts = weight[row, start : start + width][None], importance[start : start + width].double()
            errors = {}
            for step in range(19):  # 0.95 of 20
                tried = calculate_qparams(piece.amin(-1) * (1 - step / 20), piece.amax(-1) * (1 - step / 20), form)
                tried = tried.map(lambda part: part.unsqueeze(-1))
                errors[float(tried.scale)] = float(((fake_quantize(piece, tried, flat) - piece).abs().double() ** 3 * counts).sum())
            best = min(errors, key=lambda scale: errors[scale])
            assert float(found.scale[row, start // width]) == pytest.approx(best, rel=1e-6)


def test_without_importance_or_with_useless_one_it_is_told() -> None:
    weight = torch.randn(4, 32)
    with pytest.raises(SchemeError, match=r"^w: imatrix_mse weighs errors by inputs, and of this weight's inputs nothing is known"):
        weight_qparams(weight, args(), "w")
    with pytest.raises(NumericsError, match="NaN or infinity"):
        weight_qparams(weight, args(), "w", importance_C=torch.full((32,), torch.nan))
    even = weight_qparams(weight, args(), "w", importance_C=torch.ones(32))
    assert torch.equal(weight_qparams(weight, args(), "w", importance_C=torch.zeros(32)).scale, even.scale)
    with pytest.raises(ValueError, match="not strategy='tensor'"):
        args(strategy="tensor", group_size=None)
    with pytest.raises(ValueError, match="is not a setting of the mse observer"):
        args(observer_kwargs={"strict": 1})


def output_error(model: nn.Module, base: nn.Module) -> float:
    def inputs(name: str) -> Tensor:
        seen: list[Tensor] = []
        handle = base.get_submodule(name).register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten(0, -2)))
        with torch.no_grad():
            base(IDS)
        handle.remove()
        return torch.cat(seen)

    name = "model.layers.0.self_attn.q_proj"
    off = model.get_submodule(name).dequantized_weight() - base.get_submodule(name).get_parameter("weight").detach()  # type: ignore[operator]
    return float((inputs(name) @ off.t()).square().mean())


def test_rounding_errs_less_where_inputs_are_large() -> None:
    errors = {}
    for observer in ("minmax", "mse", "imatrix_mse"):
        model = llama()
        recipe = QuantizationModifier(config_groups=groups(), ignore=["lm_head"], weight_observer=observer)
        oneshot(model, recipe=recipe, dataset=IDS)
        errors[observer] = output_error(model, llama())
    assert errors["imatrix_mse"] < errors["mse"] and errors["imatrix_mse"] < errors["minmax"]


@pytest.mark.parametrize("others", [[], [AWQModifier()]], ids=["alone", "AWQ"])
@pytest.mark.parametrize("kind", [QuantizationModifier, GPTQModifier])
def test_it_works_with_all_that_round(kind: Any, others: list[Any]) -> None:
    recipe = [*(one.model_copy() for one in others), kind(config_groups=groups(), ignore=["lm_head"])]
    report = oneshot(llama(), recipe=recipe, dataset=IDS).report
    assert report.fallbacks == [] and sum("int4" in str(record.scheme) for record in report.modules.values()) == 14


def test_as_the_recipes_of_llm_compressor_name_it() -> None:
    recipe = QuantizationModifier(scheme="NVFP4A16", ignore=["lm_head"], weight_observer="imatrix_mse")
    plain = QuantizationModifier(scheme="NVFP4A16", ignore=["lm_head"])
    models = [llama(), llama()]
    for model, one in zip(models, (recipe, plain), strict=True):
        oneshot(model, recipe=one, dataset=IDS)
    assert output_error(models[0], llama()) < output_error(models[1], llama())


def test_where_it_cannot_work_it_is_refused() -> None:
    with pytest.raises(SchemeError, match="which are learned here"):
        oneshot(llama(), recipe=AutoRoundModifier(config_groups=groups(), ignore=["lm_head"]), dataset=IDS)
    with pytest.raises(CompressorError, match=r"imatrix_mse (is for weights|weighs the columns of a weight)"):
        oneshot(llama(), recipe=QuantizationModifier(scheme="FP8", ignore=["lm_head"], input_observer="imatrix_mse"), dataset=IDS)


def test_an_expert_that_no_token_reaches_is_an_error_unless_allowed() -> None:
    def moe() -> Qwen3MoeForCausalLM:
        return tiny.qwen3_moe(num_experts=8, num_experts_per_tok=1)

    def run(budget: int) -> Any:
        recipe = QuantizationModifier(config_groups=groups(), ignore=["lm_head"], fallback_budget=budget)
        return oneshot(moe(), recipe=recipe, dataset=IDS[:1, :2]).report

    with pytest.raises(CalibrationError, match="its errors are not weighed by inputs; the recipe allows fallback_budget=0"):
        run(0)
    assert {fallback.kind for fallback in run(100).fallbacks} == {"no_tokens"}


def test_a_layer_whose_input_is_zero_is_a_fallback() -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data.zero_()
    with pytest.raises(CalibrationError, match=r"layers\.1\.mlp\.down_proj: its input was zero, or below 1e-22, so its errors are not"):
        oneshot(model, recipe=QuantizationModifier(config_groups=groups(), ignore=["lm_head"]), dataset=IDS)
    allowed = QuantizationModifier(config_groups=groups(), ignore=["lm_head"], fallback_budget=1)
    assert [one.kind for one in oneshot(model, recipe=allowed, dataset=IDS).report.fallbacks] == ["dead_input"]
