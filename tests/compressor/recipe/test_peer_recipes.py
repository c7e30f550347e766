"""Recipes in the forms of llm-compressor's examples: ours load and read back, and of the others it is said what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import field_validator

from compressor.errors import RecipeError
from compressor.lifecycle import Modifier, State
from compressor.modifiers import registry
from compressor.recipe import load_recipe

INT4 = "{num_bits: 4, type: int, symmetric: true, strategy: %s, dynamic: false}"
LOADS = {
    "config groups": f"""
quant_stage:
  quant_modifiers:
    GPTQModifier:
      ignore: [lm_head, "re:.*mlp.gate$", "model.embed_tokens"]
      config_groups:
        group_0:
          weights: {INT4 % "channel"}
          targets: [Linear]
""",
    "activations too": """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: ["lm_head", "re:vision_tower.*"]
      config_groups:
        group_0:
          weights: {num_bits: 8, type: "float", symmetric: true, strategy: "channel", dynamic: false}
          input_activations: {num_bits: 8, type: "float", symmetric: true, strategy: "token", dynamic: true}
          targets: ["Linear"]
""",
    "two modifiers": """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: ["lm_head"]
      scheme: "W4A16"
      targets: ["re:.*self_attn\\\\.(k|q|o|v)_proj$"]
    GPTQModifier:
      ignore: ["lm_head"]
      scheme: "W8A8"
      targets: ["re:.*mlp\\\\.(down|gate|up)_proj$"]
      block_size: 128
      dampening_frac: 0.001
      actorder: null
""",
    "run type": """
quantization_stage:
  run_type: oneshot
  quantization_modifiers:
    GPTQModifier: {ignore: [lm_head], scheme: W4A16, targets: Linear, actorder: weight}
""",
    "arguments": """
args: {bits: 4}
quant_stage:
  args: {size: 128}
  quant_modifiers:
    GPTQModifier:
      config_groups:
        group_0:
          weights: {num_bits: "${bits}", type: int, group_size: "${size}", strategy: group}
          targets: [Linear]
""",
    "front matter": """---
quant_stage:
  quant_modifiers:
    QuantizationModifier: {scheme: FP8_DYNAMIC, ignore: [lm_head], targets: Linear}
---
# What this is
A model card.
""",
    "gradual pruning": """
pruning_stage:
  pruning_modifiers:
    MagnitudePruningModifier:
      {init_sparsity: 0.0, final_sparsity: 0.5, start: 0.0, end: 2.0, update: 0.5, targets: ["re:.*q_proj$"], update_scheduler: cubic,
       scheduler_args: {exponent: 3}, mask_structure: unstructured, leave_enabled: false, apply_globally: false}
    ConstantPruningModifier: {targets: ["re:.*q_proj$"], start: 2.0}
""",
    "pruning of whole rows": """
pruning_stage:
  pruning_modifiers:
    MagnitudePruningModifier: {final_sparsity: 0.25, mask_structure: channel, targets: ["re:.*up_proj$"]}
    ConstantPruningModifier: {targets: ["re:.*up_proj$"], start: 2.0}
""",
    "scales and rounding in one": """
quant_stage:
  quant_modifiers:
    AWQModifier: {scheme: W4A16, targets: [Linear], ignore: [lm_head, "re:.*mlp.gate$"], duo_scaling: both, n_grid: 10}
""",
    "a flat list": "- QuantizationModifier: {scheme: W8A16}\n",
}


@pytest.mark.parametrize("name", LOADS)
def test_a_recipe_with_our_modifiers_loads_unchanged_and_reads_back(name: str) -> None:
    recipe = load_recipe(LOADS[name])
    assert recipe.modifiers
    assert load_recipe(recipe.dump()) == recipe


@pytest.mark.parametrize("name", sorted(registry.PEER_MODIFIERS - registry.MODIFIERS.keys()))
def test_a_modifier_of_the_peer_that_is_not_here_is_named_with_what_there_is(name: str) -> None:
    text = f"quant_stage:\n  quant_modifiers:\n    {name}: {{smoothing_strength: 0.8}}\n    GPTQModifier: {{scheme: W8A8}}\n"
    with pytest.raises(RecipeError) as error:
        load_recipe(text)
    said = str(error.value)
    assert said.startswith(f"recipe:3: {name}: this modifier of llm-compressor is not available here; ")
    assert "GPTQModifier" in said
    assert "did you mean" not in said


MISSPELT = {
    "modifier": (
        "quant_stage:\n  quant_modifiers:\n    GPTQModifer: {scheme: W4A16}",
        "recipe:3: GPTQModifer: .*did you mean 'GPTQModifier'",
    ),
    "setting": ("quant_stage:\n  quant_modifiers:\n    GPTQModifier: {shceme: W4A16}", r"recipe:3: GPTQModifier\.shceme: .*'scheme'"),
    "group": ("quant_stage:\n  quant_modifers:\n    GPTQModifier: {scheme: W4A16}", "recipe:2: 'quant_modifers' .*'quant_modifiers'"),
    "stage": ("quant_stge:\n  quant_modifiers:\n    GPTQModifier: {scheme: W4A16}", "recipe:1: 'quant_stge' .*'quant_stage'"),
    "scheme": (
        "quant_stage:\n  quant_modifiers:\n    GPTQModifier: {scheme: W4A61}",
        "recipe:3: .*'W4A61' does not exist; did you mean 'W4A16'",
    ),
    "run type": ("x_stage:\n  run_type: onshot\n  modifiers: {GPTQModifier: {scheme: W8A8}}", "recipe:2: run_type: 'onshot' .*'oneshot'"),
}


@pytest.mark.parametrize(("text", "says"), MISSPELT.values(), ids=MISSPELT)
def test_a_misspelt_recipe_is_refused_with_line_and_nearest_name(text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(text)


class Curt(Modifier):
    """Its validator says no more than is needed."""

    ratio: float = 0.5

    @field_validator("ratio")
    @classmethod
    def _check(cls, value: Any) -> Any:
        if value > 1:
            raise ValueError("no share")
        return value

    def on_initialize(self, state: State) -> bool:
        return True


def test_an_error_of_a_validator_without_advice_is_given_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "Curt", Curt)
    with pytest.raises(RecipeError, match=r"^recipe:1: Curt\.ratio: no share; correct it$"):
        load_recipe("x_stage: {modifiers: {Curt: {ratio: 2}}}")


@pytest.mark.parametrize("length", [58, 59])
def test_a_long_value_is_shown_by_its_beginning(length: int) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(f"x_stage: {'a' * length}")
    shown = "a" * length + "'" if length <= 58 else "a" * 56 + "..."
    assert f"holds '{shown}; give" in str(error.value)


def test_a_file_of_another_kind_is_read_as_what_it_looks_like(tmp_path: Path) -> None:
    for name in ("front matter", "a flat list"):
        (tmp_path / "recipe.txt").write_text(LOADS[name])
        assert load_recipe(tmp_path / "recipe.txt").modifiers == load_recipe(LOADS[name]).modifiers


def test_a_missing_file_is_advised_with_recipes_only(tmp_path: Path) -> None:
    (tmp_path / "recipe.txt").write_text("")
    (tmp_path / "other_recipe.yaml").write_text("")
    with pytest.raises(RecipeError, match=r"other_recipe\.yaml"):
        load_recipe(tmp_path / "recipe.yaml")


def test_the_key_that_stands_twice_in_json_is_named() -> None:
    with pytest.raises(RecipeError, match="'b' stands twice"):
        load_recipe('{"a": 1, "b": 2, "b": 3}')


def test_a_mapping_may_merge_twice() -> None:
    args = "args: {a: &a {scheme: W8A16}, b: &b {targets: [Linear]}}"
    text = f"x_stage:\n  {args}\n  modifiers:\n    QuantizationModifier:\n      <<: *a\n      <<: *b\n"
    (modifier,) = load_recipe(text).modifiers
    assert modifier == load_recipe("x_stage: {modifiers: {QuantizationModifier: {scheme: W8A16, targets: [Linear]}}}").modifiers[0]


def test_an_error_of_yaml_without_a_place_is_still_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise yaml.MarkedYAMLError(problem="it is odd")

    monkeypatch.setattr("compressor.yaml_text.YamlLoader.get_single_node", fail)
    with pytest.raises(RecipeError, match=r"^recipe: this is not safe YAML \(it is odd\)"):
        load_recipe("x_stage: {}")


def test_an_empty_text_is_no_recipe() -> None:
    with pytest.raises(RecipeError, match="an empty entry is no recipe"):
        load_recipe("\n# nothing\n")
