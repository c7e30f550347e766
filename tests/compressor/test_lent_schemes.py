"""Recipes in which one modifier says the schemes and another one solves, and settings that come as objects of compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs as ForeignArgs
from compressed_tensors.quantization import QuantizationScheme as ForeignScheme
from transformers import LlamaForCausalLM

from compressor import AutoRoundModifier, GPTQModifier, QuantizationModifier, load_recipe, oneshot
from compressor.errors import CompressorError, RecipeError
from compressor.lifecycle import Modifier
from compressor.nn import QuantizedLinear
from tests import tiny

INT4 = {"num_bits": 4, "group_size": 16, "strategy": "group"}
IDS = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))


def llama() -> LlamaForCausalLM:
    return tiny.llama(intermediate_size=48)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.state_dict().items()}


def recipe_of(targets: list[str], **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": targets, "weights": {**INT4, **weights}}}
    lender = {"ignore": ["lm_head"], "config_groups": groups}
    return {"quant_stage": {"quant_modifiers": {"QuantizationModifier": lender, "GPTQModifier": {"block_size": 64}}}}


def test_a_solver_without_schemes_takes_those_of_the_modifier_before_it() -> None:
    recipe = load_recipe(recipe_of(["Linear"]))
    assert [type(one) for one in recipe.modifiers] == [GPTQModifier]
    assert load_recipe(recipe.dump()) == recipe  # what is recorded says what was done
    lent, plain = llama(), llama()
    oneshot(lent, recipe=recipe, dataset=IDS)
    groups = {"group_0": {"targets": ["Linear"], "weights": INT4}}
    oneshot(plain, recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"], block_size=64), dataset=IDS)
    assert isinstance(lent.model.layers[0].mlp.up_proj, QuantizedLinear)
    ours, theirs = weights_of(lent), weights_of(plain)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_objects_lend_as_files_do() -> None:
    lender, solver = QuantizationModifier(scheme="W8A16", ignore=["lm_head"]), GPTQModifier(block_size=64)
    recipe = load_recipe([lender, solver])
    assert recipe.modifiers == (solver,) and solver.ignore == ["lm_head"]
    assert [scheme.weights.num_bits for scheme in solver.target_schemes() if scheme.weights] == [8]


def test_embeddings_stay_with_the_modifier_that_can_round_them() -> None:
    recipe = load_recipe(recipe_of(["Linear", "Embedding"]))
    kept, solver = recipe.modifiers
    assert isinstance(kept, QuantizationModifier) and isinstance(solver, GPTQModifier)
    model = llama()
    result = oneshot(model, recipe=recipe, dataset=IDS)
    found = {name: record.modifier for name, record in result.report.modules.items()}
    assert found["model.embed_tokens"] == "QuantizationModifier"
    assert found["model.layers.1.self_attn.q_proj"] == "GPTQModifier"


def test_an_order_of_columns_may_be_lent_but_not_kept() -> None:
    (solver,) = load_recipe(recipe_of(["Linear"], actorder="group")).modifiers
    assert isinstance(solver, GPTQModifier)
    assert [scheme.weights.actorder for scheme in solver.target_schemes() if scheme.weights] == ["group"]
    alone = QuantizationModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": {**INT4, "actorder": "group"}}})
    with pytest.raises(RecipeError, match="orders no columns"):
        load_recipe(alone)


@pytest.mark.parametrize(
    "modifiers",
    [
        [GPTQModifier()],
        [GPTQModifier(), QuantizationModifier(scheme="W4A16")],  # what comes behind lends nothing
        [QuantizationModifier(scheme="W4A16"), GPTQModifier(), AutoRoundModifier()],  # lent once
    ],
)
def test_a_solver_to_which_nobody_lends_is_refused(modifiers: list[Modifier]) -> None:
    with pytest.raises(RecipeError, match="neither scheme nor config_groups was given"):
        load_recipe(modifiers)


def test_a_solver_with_targets_of_its_own_must_have_schemes_of_its_own() -> None:
    with pytest.raises(CompressorError, match="neither scheme nor config_groups was given"):
        GPTQModifier(targets=["re:.*down_proj"])


def test_objects_of_compressed_tensors_say_what_they_hold() -> None:
    args = ForeignArgs(num_bits=8, type="float", strategy="tensor")
    inputs = ForeignArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    groups: Any = {"group_0": ForeignScheme(targets=["Linear"], weights=args, input_activations=inputs)}
    (scheme,) = QuantizationModifier(config_groups=groups, kv_cache_scheme=args).target_schemes()
    assert scheme.weights is not None and scheme.input_activations is not None
    assert (scheme.weights.type, scheme.weights.strategy, scheme.input_activations.dynamic) == ("float", "tensor", True)


def test_no_steps_of_learned_rounding_are_rounding_without_data() -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": INT4}}
    learned, rounded = llama(), llama()
    modifier = AutoRoundModifier(config_groups=groups, ignore=["lm_head"], iters=0)
    oneshot(learned, recipe=modifier)
    oneshot(rounded, recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"]))
    ours, theirs = weights_of(learned), weights_of(rounded)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_attention_as_a_target_goes_along_with_the_schemes_that_are_lent() -> None:
    own = ForeignScheme(targets=["LlamaAttention"], input_activations=ForeignArgs(num_bits=8, type="float", strategy="attn_head"))
    groups = {"w": {"targets": ["Linear"], "weights": INT4}, "attention": own}
    (solver,) = load_recipe([QuantizationModifier(config_groups=groups, ignore=["lm_head"]), GPTQModifier()]).modifiers
    assert isinstance(solver, GPTQModifier)
    assert solver.attention_patterns == ["LlamaAttention"] and solver.kv_format is not None and solver.kv_format.strategy == "attn_head"
    assert [scheme.targets for scheme in solver.target_schemes()] == [["Linear"]]
