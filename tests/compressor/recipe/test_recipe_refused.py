"""Settings that would do nothing, or something else than they say, are refused when the recipe is read, with the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.cli.main import main
from compressor.errors import RecipeError
from compressor.modifiers.registry import find_modifier, known_modifiers
from compressor.recipe import load_recipe

INT4 = {"num_bits": 4, "group_size": 128}
NEEDED: dict[str, dict[str, Any]] = {
    "GPTQModifier": {"scheme": "W4A16"},
    "QuantizationModifier": {"scheme": "W8A8"},
    "MagnitudePruningModifier": {"final_sparsity": 0.5},
    "ConstantPruningModifier": {},
    "AWQModifier": {},
    "AutoRoundModifier": {"scheme": "W4A16"},
    "LogarithmicEqualizationModifier": {},
    "QuIPModifier": {},
    "REAPPruningModifier": {"sparsity": 0.5},
    "ScaleTuningModifier": {},
    "SmoothQuantModifier": {},
    "SparseGPTModifier": {"sparsity": 0.5},
    "SpinQuantModifier": {},
    "WandaPruningModifier": {"sparsity": 0.5},
}
# Modifier, settings, the setting that is named, and what is said of it.
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no targets": ("GPTQModifier", {"targets": []}, "targets", "nothing would be changed"),
    "nothing to turn": ("QuIPModifier", {"targets": []}, "targets", "nothing would be changed"),
    "nothing to prune": ("MagnitudePruningModifier", {"targets": []}, "targets", "nothing would be changed"),
    "an empty target": ("QuantizationModifier", {"targets": [""]}, "targets", "empty pattern"),
    "an expression of nothing": ("QuantizationModifier", {"ignore": ["re:"]}, "ignore", "empty pattern"),
    "no expression": ("ConstantPruningModifier", {"ignore": "re:("}, "ignore", "not a regular expression"),
    "no scheme": ("QuantizationModifier", {"scheme": {}}, "scheme", "no scheme"),
    "a scheme for nothing": ("GPTQModifier", {"scheme": {"W4A16": []}}, "scheme", "targets of W4A16: [] names no module"),
    "no groups": ("GPTQModifier", {"scheme": None, "config_groups": {}}, "config_groups", "no scheme"),
    "a group for nothing": (
        "GPTQModifier",
        {"scheme": None, "config_groups": {"g": {"targets": [], "weights": INT4}}},
        "config_groups",
        "targets of g: [] names no module",
    ),
    "a misspelt observer inside": (
        "GPTQModifier",
        {"scheme": None, "config_groups": {"g": {"targets": ["Linear"], "weights": {**INT4, "observer": "minmx"}}}},
        "config_groups.g.weights.observer",
        "weights.observer: 'minmx' does not exist; did you mean 'minmax'?",
    ),
    "a number for a scheme": (
        "GPTQModifier",
        {"scheme": 4},
        "scheme",
        "4 was given, but input should be a valid string or a valid dictionary;",
    ),
    "no dtype": (
        "GPTQModifier",
        {"scheme": None, "config_groups": {"g": {"targets": ["Linear"], "weights": {**INT4, "scale_dtype": "foo"}}}},
        "config_groups.g.weights.scale_dtype",
        ": 'foo' was given, but",
    ),
    "a misspelt observer": ("GPTQModifier", {"weight_observer": "minmx"}, "weight_observer", "did you mean 'minmax'?"),
    "a misspelt observer of inputs": ("QuantizationModifier", {"input_observer": "mes"}, "input_observer", "did you mean 'mse'?"),
    "an observer of nothing": ("GPTQModifier", {"input_observer": "mse"}, "", "no scheme has inputs with static scales"),
    "groups of columns without groups": ("GPTQModifier", {"scheme": "W8A8", "actorder": "group"}, "", "strategy='channel'"),
    "two orders": (
        "GPTQModifier",
        {"scheme": None, "actorder": "static", "config_groups": {"g": {"targets": ["Linear"], "weights": {**INT4, "actorder": "group"}}}},
        "",
        "leave one of them out",
    ),
    "an order for what orders nothing": (
        "QuantizationModifier",
        {"scheme": None, "config_groups": {"g": {"targets": ["Linear"], "weights": {**INT4, "actorder": "group"}}}},
        "",
        "use GPTQModifier",
    ),
    "targets that nobody reads": (
        "QuantizationModifier",
        {"scheme": {"W8A8": ["re:.*q_proj"]}, "targets": ["re:.*k_proj"]},
        "",
        "leave targets",
    ),
    "targets without a scheme": ("GPTQModifier", {"scheme": None, "kv_cache_scheme": {"num_bits": 8}, "targets": ["x"]}, "", "targets"),
    "an update without a start": ("MagnitudePruningModifier", {"update": 2.0}, "", "needs a start"),
    "no zeros": ("MagnitudePruningModifier", {"final_sparsity": 0.0}, "final_sparsity", "greater than 0"),
    "more than all dampening": ("GPTQModifier", {"dampening_frac": 1e308}, "dampening_frac", "less than or equal to 1"),
    "a flag for a number": ("GPTQModifier", {"block_size": True}, "block_size", "a number is wanted"),
    "a flag for a share": ("MagnitudePruningModifier", {"final_sparsity": True}, "final_sparsity", "a number is wanted"),
    "a flag for a group": (
        "GPTQModifier",
        {"scheme": None, "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": True}}}},
        "config_groups.g.weights.group_size",
        "a number is wanted",
    ),
    "a search without end": (
        "QuantizationModifier",
        {
            "scheme": None,
            "config_groups": {
                "g": {"targets": ["Linear"], "weights": {"num_bits": 8, "observer": "mse", "observer_kwargs": {"grid": 1e308}}}
            },
        },
        "config_groups.g.weights",
        "grid=1e+308 is above 10000",
    ),
    "half a block": (
        "QuantizationModifier",
        {
            "scheme": None,
            "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "block_structure": [128]}}},
        },
        "config_groups.g.weights.block_structure",
        "[128] is not two positive numbers; give rows and columns, such as [128, 128]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_means_nothing_is_refused_with_its_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modifier, settings, setting, words = CASES[name]
    merged = {key: value for key, value in {**NEEDED[modifier], **settings}.items() if value is not None}
    lines = "\n".join(f"      {key}: {json.dumps(value)}" for key, value in merged.items())
    path = tmp_path / "recipe.yaml"
    path.write_text(f"quant_stage:\n  quant_modifiers:\n    {modifier}:\n{lines}\n")
    assert main(["recipe", "check", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    number = 3 if not setting else 4 + list(merged).index(setting.partition(".")[0])
    assert line.startswith(f"compressor recipe: error: recipe.yaml:{number}: {modifier}{'.' if setting else ''}{setting}: "), line
    assert words in line
    assert "; " in line


WRONG: list[Any] = [[], ["x"], [None], [[]], {}, {"a": 1}, "", "x", "re:(", True, -1, 2.5, 1e308, 10**30, float("nan"), float("inf")]


def test_every_modifier_of_ours_is_tried() -> None:
    ours = {name for name in known_modifiers() if find_modifier(name).__module__.startswith("compressor.")}
    assert ours == set(NEEDED)


@pytest.mark.parametrize("modifier", sorted(name for name in NEEDED if "targets" in find_modifier(name).model_fields))
def test_no_targets_are_no_targets_of_any_modifier(modifier: str) -> None:
    load_recipe({"quant_stage": {"quant_modifiers": {modifier: NEEDED[modifier]}}})
    with pytest.raises(RecipeError, match="nothing would be changed"):
        load_recipe({"quant_stage": {"quant_modifiers": {modifier: {**NEEDED[modifier], "targets": []}}}})


@pytest.mark.parametrize("modifier", sorted(NEEDED))
def test_no_setting_ends_in_anything_but_our_error(modifier: str) -> None:
    assert modifier in known_modifiers()
    said: list[str] = []
    for setting in find_modifier(modifier).model_fields:
        for value in WRONG:
            data = {"quant_stage": {"quant_modifiers": {modifier: {**NEEDED[modifier], setting: value}}}}
            try:
                load_recipe(data)
            except RecipeError as error:
                said += str(error).splitlines()
    assert len(said) > 20
    assert all(line.startswith("recipe: ") and "; " in line for line in said)


def test_the_order_of_a_group_is_that_of_the_modifier_unless_it_says_so() -> None:
    def order(**settings: Any) -> str | None:
        weights = {**INT4, **settings.pop("weights", {})}
        data = {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}, **settings}
        (modifier,) = load_recipe({"s_stage": {"s_modifiers": {"GPTQModifier": data}}}).modifiers
        (scheme,) = modifier.target_schemes()  # type: ignore[attr-defined]
        return scheme.weights.actorder

    assert order() == "static"
    assert order(weights={"actorder": "group"}) == "group"
    assert order(weights={"actorder": "weight"}) == "static"
    assert order(actorder="group") == "group"
    assert order(actorder=None) is None


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "W4A8"])
def test_an_order_that_the_file_has_no_room_for_is_refused_when_the_recipe_is_read(scheme: str) -> None:
    data = {"s_stage": {"s_modifiers": {"GPTQModifier": {"scheme": scheme, "targets": ["Linear"], "actorder": "group"}}}}
    with pytest.raises(RecipeError, match=r"beside integers in groups alone .pack-quantized.*; use actorder='static'$"):
        load_recipe(data)
