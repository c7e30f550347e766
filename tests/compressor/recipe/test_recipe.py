"""Recipes: every form that llm-compressor's files take, strictness with names and lines, and reading back what was written."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator

from compressor import AWQModifier, QuIPModifier
from compressor.errors import RecipeError, SchemeError, UserInputError
from compressor.lifecycle import Modifier, State
from compressor.modifiers import registry
from compressor.recipe import Recipe, Stage, load_recipe, recipe_schema


class Weights(BaseModel, extra="forbid"):
    """A nested setting."""

    num_bits: int = Field(default=8, ge=2)
    symmetric: bool = True


class Group(BaseModel, extra="forbid"):
    """A setting nested in a mapping."""

    targets: list[str]
    weights: Weights | None = None


class ToyModifier(Modifier):
    """Has settings of every kind."""

    targets: list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: list[str] = Field(default_factory=list)
    scheme: str | dict[str, list[str]] | None = None
    dampening_frac: float = 0.01
    block_size: int = Field(default=128, gt=0)
    actorder: str | None = "static"
    config_groups: dict[str, Group] | None = None
    extras: dict[str, Any] = Field(default_factory=dict)

    @field_validator("scheme")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value == "W5":
            raise SchemeError("scheme: 'W5' does not exist; use W4A16")
        return value

    def on_initialize(self, state: State) -> bool:
        return True


class OtherModifier(ToyModifier):
    """A second type."""


class Needy(Modifier):
    """Has a setting without default, and one that no text can hold."""

    sparsity: float
    function: Callable[[], None] | None = None

    def on_initialize(self, state: State) -> bool:
        return True


@pytest.fixture(scope="module", autouse=True)
def _toys() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", {cls.__name__: cls for cls in (ToyModifier, OtherModifier, Needy)})
        yield


def toys(*settings: dict[str, Any]) -> list[ToyModifier]:
    return [ToyModifier(index=number, **{"group": "default", **given}) for number, given in enumerate(settings)]


# --- forms

ONE = toys({"scheme": "W4A16", "ignore": ["lm_head"], "group": "quant"})
SETTINGS = "{scheme: W4A16, ignore: [lm_head]}"
FORMS_OF_ONE = {
    "nested": f"quant_stage:\n  quant_modifiers:\n    ToyModifier: {SETTINGS}\n",
    "numbered stage": f"quant_stage_0:\n  quant_modifiers:\n    ToyModifier: {SETTINGS}\n",
    "run type": f"test_stage:\n  run_type: oneshot\n  quant_modifiers:\n    ToyModifier: {SETTINGS}\n",
    "list in a group": f"test_stage:\n  quant_modifiers:\n  - ToyModifier: {SETTINGS}\n",
    "modifiers of a stage": f"quant_stage:\n  modifiers:\n    ToyModifier: {SETTINGS}\n",
    "list of a stage": f"quant_stage:\n  modifiers:\n    - ToyModifier: {SETTINGS}\n",
    "directly in a stage": f"quant_stage:\n  ToyModifier: {SETTINGS}\n",
    "group without a stage": f"quant_modifiers:\n  ToyModifier: {SETTINGS}\n",
    "group in the settings": "modifiers:\n- ToyModifier: {scheme: W4A16, ignore: [lm_head], group: quant}\n",
    "flat list": "- ToyModifier: {scheme: W4A16, ignore: [lm_head], group: quant}\n",
    "directly": "ToyModifier: {scheme: W4A16, ignore: [lm_head], group: quant, index: 0}\n",
    "by path": f"quant_modifiers:\n  {__name__}:ToyModifier: {SETTINGS}\n",
    "by path, directly in a stage": f"quant_stage:\n  {__name__}:ToyModifier: {SETTINGS}\n",
    "merge key": "quant_stage:\n  quant_modifiers:\n    ToyModifier:\n      <<: &a {scheme: W4A16}\n      ignore: [lm_head]\n",
    "json": '{"quant_modifiers": {"ToyModifier": {"scheme": "W4A16", "ignore": ["lm_head"]}}}',
    "front matter": f"---\nquant_modifiers:\n  ToyModifier: {SETTINGS}\n---\n# A model card\n\n---\nmore: [\n",
    "plus front matter": f"\n+++\nquant_modifiers:\n  ToyModifier: {SETTINGS}\n+++\n",
    "yaml document": f"---\nquant_modifiers:\n  ToyModifier: {SETTINGS}\n",
    "one line": f"quant_modifiers: {{ToyModifier: {SETTINGS}}}",
}


@pytest.mark.parametrize("form", FORMS_OF_ONE)
def test_every_form_gives_the_same_modifier(form: str) -> None:
    recipe = load_recipe(FORMS_OF_ONE[form])
    assert list(recipe.modifiers) == ONE
    assert recipe.text == FORMS_OF_ONE[form]


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".md", ".json", ".YAML", ".txt", ""])
@pytest.mark.parametrize("as_path", [True, False])
def test_files_of_every_kind(tmp_path: Path, suffix: str, as_path: bool) -> None:
    form = {".md": "front matter", ".json": "json"}.get(suffix, "nested")
    file = tmp_path / f"recipe{suffix}"
    file.write_text(FORMS_OF_ONE[form], encoding="utf-8-sig" if suffix == ".yml" else "utf-8")
    assert list(load_recipe(file if as_path else str(file)).modifiers) == ONE


@pytest.mark.parametrize(
    "data",
    [
        {"quant_stage": {"quant_modifiers": {"ToyModifier": {"scheme": "W4A16", "ignore": ["lm_head"]}}}},
        {"quant_modifiers": [{"ToyModifier": {"scheme": "W4A16", "ignore": ("lm_head",)}}]},
        [{"ToyModifier": {"scheme": "W4A16", "ignore": ["lm_head"], "group": "quant"}}],
        ({"ToyModifier": {"scheme": "W4A16", "ignore": ["lm_head"], "group": "quant"}},),
    ],
)
def test_plain_data(data: Any) -> None:
    recipe = load_recipe(data)
    assert list(recipe.modifiers) == ONE
    assert load_recipe(recipe.text) == recipe  # for the record, data is written out


def test_a_modifier_may_have_no_settings() -> None:
    for text in ("modifiers:\n- ToyModifier\n", "modifiers:\n  ToyModifier:\n", "[ToyModifier]", "ToyModifier: {}"):
        assert list(load_recipe(text).modifiers) == toys({})


def test_stages_groups_and_positions_are_filled_in_in_order() -> None:
    recipe = load_recipe(
        """
        first_stage:
          run_type: oneshot
          a_modifiers:
            ToyModifier: {block_size: 1}
            OtherModifier: {block_size: 2}
          b_modifiers:
            ToyModifier: {block_size: 3, group: own}
        second_stage:
          run_type: train
          modifiers:
          - ToyModifier: {block_size: 4}
          - ToyModifier: {block_size: 5}
        """
    )
    assert [(stage.name, stage.run_type, len(stage.modifiers)) for stage in recipe.stages] == [
        ("first", "oneshot", 3),
        ("second", "train", 2),
    ]
    found = [(type(m).__name__, m.index, m.group, m.block_size) for m in recipe.modifiers if isinstance(m, ToyModifier)]
    assert found == [
        ("ToyModifier", 0, "a", 1),
        ("OtherModifier", 1, "a", 2),
        ("ToyModifier", 2, "own", 3),
        ("ToyModifier", 3, "second", 4),
        ("ToyModifier", 4, "second", 5),
    ]
    assert load_recipe(recipe.dump()) == Recipe.create_instance(recipe.dump()) == recipe
    assert Recipe.create_instance(recipe, target_stage="second").stages == recipe.stages[1:]


def test_merged_recipes_of_llm_compressor_number_their_stages() -> None:
    recipe = load_recipe("q_stage_0: {q_modifiers: {ToyModifier: {}}}\nq_stage_1: {q_modifiers: {ToyModifier: {}}}\n")
    assert [stage.name for stage in recipe.stages] == ["q_0", "q_1"]
    assert load_recipe(recipe.dump()) == recipe


@pytest.mark.parametrize("text", ["ToyModifier: {dampening_frac: 1e-3}", '{"ToyModifier": {"dampening_frac": 1e-3}}'])
@pytest.mark.parametrize("key", ["dampening_frac", "extras"])
def test_numbers_with_an_exponent_are_numbers(text: str, key: str) -> None:
    if key == "extras":
        text = text.replace("dampening_frac: 1e-3", "extras: {x: 1e-3}").replace('"dampening_frac": 1e-3', '"extras": {"x": 1e-3}')
    (modifier,) = load_recipe(text).modifiers
    assert isinstance(modifier, ToyModifier)
    value = modifier.extras["x"] if key == "extras" else modifier.dampening_frac
    assert value == 0.001 and isinstance(value, float)


def test_json_with_tabs_and_escapes_keeps_its_lines() -> None:
    text = '{\n\t"modifiers": {\n\t\t"ToyModifier": {\n\t\t\t"scheme": "\\u0041\\/\\n",\n\t\t\t"block_siz": 1}}}'
    with pytest.raises(RecipeError, match=r"^recipe:5: ToyModifier.block_siz: "):
        load_recipe(text)
    (modifier,) = load_recipe(text.replace("block_siz", "block_size")).modifiers
    assert isinstance(modifier, ToyModifier)
    assert modifier.scheme == "A/\n"


def test_json_that_is_no_yaml_is_read_without_lines() -> None:
    long_key = "k" * 2000  # YAML wants the colon within 1024 characters
    text = json.dumps({"ToyModifier": {"extras": {long_key: 1}}})
    assert only(text).extras == {long_key: 1}
    with pytest.raises(RecipeError, match=r"^recipe: ToyModifier.extra: there is no such setting; did you mean 'extras'"):
        load_recipe(text.replace("extras", "extra"))


# --- arguments


def only(text: str, args: dict[str, Any] | None = None) -> ToyModifier:
    (modifier,) = load_recipe(text, args).modifiers
    assert isinstance(modifier, ToyModifier)
    return modifier


def test_arguments_keep_their_type_alone_and_are_written_out_in_a_longer_string() -> None:
    text = """
    args: {size: 64, frac: 0.5, names: [a, b], layer: 3, pattern: "re:.*${layer}$"}
    modifiers:
      ToyModifier:
        block_size: ${size}
        dampening_frac: ${frac}
        ignore: ${names}
        targets: ["re:model.layers.${layer}.mlp", "${pattern}", "${layer}${layer}"]
        extras: {deep: [{deeper: "${size}"}], text: "$${size} $ {x} $$", "${pattern}": {"$${layer}.${layer}": 1}}
    """
    modifier = only(text)
    assert (modifier.block_size, modifier.dampening_frac, modifier.ignore) == (64, 0.5, ["a", "b"])
    assert modifier.targets == ["re:model.layers.3.mlp", "re:.*3$", "33"]
    assert modifier.extras == {"deep": [{"deeper": 64}], "text": "${size} $ {x} $$", "re:.*3$": {"${layer}.3": 1}}


def test_the_callers_arguments_come_first_then_the_stages_then_the_recipes() -> None:
    text = """
    args: {size: 1, frac: 0.25}
    a_stage:
      args: {size: 2}
      modifiers: {ToyModifier: {block_size: "${size}", dampening_frac: "${frac}"}}
    """
    assert (only(text).block_size, only(text).dampening_frac) == (2, 0.25)
    assert (only(text, {"size": 3}).block_size, only(text, {"frac": 0.75}).dampening_frac) == (3, 0.75)
    assert only("ToyModifier: {block_size: '${size}'}", {"size": 4}).block_size == 4
    assert only("- ToyModifier: {block_size: '${size}'}", {"size": 4}).block_size == 4


@pytest.mark.parametrize("args", [None, {"siez": 4}], ids=["its own", "and given"])
def test_an_argument_that_nothing_reads_is_refused_where_it_stands(args: Any) -> None:
    with pytest.raises(RecipeError, match=r"^recipe:1: the argument 'siez' is not used by the recipe; did you mean 'size'\?$"):
        only("args: {siez: 9, size: 5}\nToyModifier: {block_size: '${size}'}", args)
    with pytest.raises(RecipeError, match=r"^recipe:2: 1 is no name of an argument; "):
        only("a_stage:\n  args: {1: 9}\n  modifiers: {ToyModifier: {}}")
    assert only("args: {size: &size 9}\nToyModifier: {block_size: *size}").block_size == 9  # YAML reads it


@pytest.mark.parametrize("args", [{1: 2}, {"": 2}, 5, ["size"], [b"size=2"]], ids=str)
def test_arguments_of_another_kind_are_refused(args: Any) -> None:
    with pytest.raises(UserInputError, match=r"^recipe_args: .* was given, where a mapping of names to values, or a list of texts"):
        only("ToyModifier: {block_size: '${size}'}", args)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"GPTQModifier": {"scheme": {"a": 1}}},
            "recipe: GPTQModifier.scheme.a: 1 was given, but input should be a valid list; correct it",
        ),
        ({"GPTQModifier": {"scheme": {"W4A16": ["Linear", 5]}}}, "recipe: GPTQModifier.scheme.W4A16.1: 5 was given, but "),
        ({"SparseGPTModifier": {"sparsity": [0.5, None]}}, "recipe: SparseGPTModifier.sparsity.1: None was given, but "),
        ({"SparseGPTModifier": {"sparsity": {"a": 1}}}, "recipe: SparseGPTModifier.sparsity: {'a': 1} was given, but "),
        ({"AWQModifier": {"offload_device": math.nan}}, "recipe: AWQModifier.offload_device: nan was given, where the name of a device "),
        ({"AWQModifier": {"max_chunk_memory": math.nan}}, "recipe: AWQModifier.max_chunk_memory: "),
        ({"SparseGPTModifier": {"sparsity": 0.5, "offload_hessians": math.nan}}, "recipe: SparseGPTModifier.offload_hessians: "),
        ({"GPTQModifier": {"scheme": "W4A16", "offload_hessians": math.nan}}, "recipe: GPTQModifier: GPTQModifier.offload_hessians: nan "),
    ],
    ids=str,
)
def test_one_mistake_is_one_line_of_the_branch_that_fits_best(given: Any, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(given)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        (
            "args: {size: 1}\nToyModifier:\n  block_size: ${siez}\n",
            None,
            "recipe:3: '${siez}' refers to the argument 'siez', which is not given; did you mean 'size'?",
        ),
        ("ToyModifier: {block_size: '${size}'}", None, "recipe:1: '${size}' refers to the argument 'size', which is not given; add it"),
        (
            "args: {a: '${b}', b: 1}\nToyModifier: {block_size: '${a}'}",
            None,
            "'${b}' refers to the argument 'b', which does not stand above",
        ),
        (
            "args: {a: '${a}'}\nToyModifier: {block_size: '${a}'}",
            None,
            "recipe:1: '${a}' refers to the argument 'a', which does not",
        ),
        ("args: {m: ToyModifier}\n${m}: {}", None, "recipe:2: '${m}' stands for no argument here, only below a modifier"),
        ("args: {m: ToyModifier}\nmodifiers:\n- ${m}", None, "recipe:3: '${m}' stands for no argument"),
        ("args: {s: a}\n${s}_stage: {ToyModifier: {}}", None, "recipe:2: '${s}_stage' stands for no argument"),
        ("args: {s: a}\na_stage:\n  ${s}_modifiers: {ToyModifier: {}}", None, "recipe:3: '${s}_modifiers' stands for no argument"),
        ("ToyModifier: {ignore: ['${}']}", None, "'${}' holds '${' without the name"),
        ("ToyModifier:\n  ignore:\n  - a\n  - ${1 + 1}\n", None, "recipe:4: '${1 + 1}' holds '${' without the name"),
        ("ToyModifier: {ignore: ['${x']}", None, "'${x' holds '${' without the name"),
        (
            "args: {size: 1}\nToyModifier: {block_size: '${size}'}",
            {"siz": 2},
            "recipe: the argument 'siz' is not used by the recipe; did you mean 'size'?",
        ),
        ("args: {a: [b, c]}\nToyModifier:\n  ignore: ['x${a}']", None, "recipe:3: 'x${a}' holds ${a} beside other text"),
        ("args: {a: true}\nToyModifier: {ignore: ['x${a}']}", None, "${a} beside other text, and it stands for True, neither text nor"),
        ("args: {a: null}\nToyModifier: {ignore: ['x${a}']}", None, "${a} beside other text, and it stands for an empty entry"),
        ("args: {a: 3}\nToyModifier: {extras: {'${a}': 1}}", None, "recipe:2: '${a}' stands for 3, and a key is text; give"),
        ("args: {a: b}\nToyModifier: {extras: {b: 1, '${a}': 1}}", None, "recipe:2: '${a}' gives 'b', which stands twice"),
        ("args: [1]\nToyModifier: {}", None, "recipe:1: args holds [1]"),
        ("a_stage:\n  args: 3\n  ToyModifier: {}", None, "recipe:2: args holds 3"),
    ],
)
def test_wrong_arguments(text: str, args: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(text, args)
    assert message in str(caught.value)


def test_nothing_is_evaluated(tmp_path: Path) -> None:
    assert only("ToyModifier: {ignore: ['eval(a)', '__import__']}").ignore == ["eval(a)", "__import__"]
    with pytest.raises(RecipeError, match=r"eval is not supported, write \$\{name\}"):
        load_recipe("args: {a: 1}\nToyModifier: {block_size: eval(a)}")
    trap = tmp_path / "trap"
    with pytest.raises(RecipeError, match=r"^recipe:1: this is not safe YAML"):
        load_recipe(f"ToyModifier: !!python/object/apply:os.mkdir ['{trap}']\n")
    assert not trap.exists()


# --- strictness

HEAD = "quant_stage:\n  quant_modifiers:\n"
GROUP = HEAD + "    ToyModifier:\n      config_groups:\n"
MISTAKES: dict[str, tuple[str, str]] = {
    "unknown modifier": (HEAD + "    ToyModifer: {}", "recipe:3: ToyModifer: there is no such modifier; did you mean 'ToyModifier'?"),
    "unknown setting": (
        HEAD + "    ToyModifier:\n      scheme: A\n      blok_size: 4",
        "recipe:5: ToyModifier.blok_size: there is no such setting; did you mean 'block_size'?",
    ),
    "state as a setting": (
        HEAD + "    ToyModifier: {initialized: true}",
        "recipe:3: ToyModifier.initialized: there is no such setting; choose from ",
    ),
    "unknown nested setting": (
        GROUP + "        g0:\n          targets: []\n          weights:\n            num_bit: 4",
        "recipe:8: ToyModifier.config_groups.g0.weights.num_bit: there is no such setting; did you mean 'num_bits'?",
    ),
    "unknown group setting": (
        HEAD + "    ToyModifier:\n      config_groups:\n        g0: {target: []}",
        "recipe:5: ToyModifier.config_groups.g0.target: there is no such setting; did you mean 'targets'?",
    ),
    "missing nested setting": (
        HEAD + "    ToyModifier:\n      config_groups:\n        g0: {}",
        "recipe:5: ToyModifier.config_groups.g0: 'targets' is required; add it",
    ),
    "missing setting": (HEAD + "    Needy: {}", "recipe:3: Needy: 'sparsity' is required; add it"),
    "wrong value": (
        HEAD + "    ToyModifier:\n      block_size: -1",
        "recipe:4: ToyModifier.block_size: -1 was given, but input should be greater than 0; correct it",
    ),
    "wrong value in a list": (
        HEAD + "    ToyModifier:\n      ignore:\n      - a\n      - 3",
        "recipe:6: ToyModifier.ignore.1: 3 was given, but",
    ),
    "no branch of a union": (
        HEAD + "    ToyModifier: {scheme: 4}",
        "ToyModifier.scheme: 4 was given, but input should be a valid string or a valid dictionary",
    ),
    "list for a union": (HEAD + "    ToyModifier:\n      scheme: [1]", "recipe:4: ToyModifier.scheme: [1] was given, but input should be"),
    "error of our own": (
        HEAD + "    ToyModifier:\n      scheme: W5",
        "recipe:4: ToyModifier.scheme: 'W5' does not exist; use W4A16",
    ),
    "rule between settings": (
        HEAD + "    ToyModifier: {start: 3, end: 2}",
        "recipe:3: ToyModifier: start=3.0 is not before end=2.0, so it would never start; give a smaller start",
    ),
    "long value": (HEAD + f"    ToyModifier: {{block_size: {'x' * 99}}}", f"'{'x' * 56}... was given"),
    "unknown stage key": (
        "quant_stage:\n  quant_modifers:\n    ToyModifier: {}",
        "recipe:2: 'quant_modifers' means nothing in a recipe; did you mean 'quant_modifiers'?",
    ),
    "misspelt run type key": (
        "quant_stage:\n  run_typ: oneshot\n  ToyModifier: {}",
        "recipe:2: 'run_typ' means nothing in a recipe; did you mean 'run_type'?",
    ),
    "stage without a name": ("stage:\n  ToyModifier: {}", "recipe:1: 'stage' means nothing in a recipe; did you mean 'quant_stage'?"),
    "group of another name": (
        "my_modifers:\n  ToyModifier: {}",
        "recipe:1: 'my_modifers' means nothing in a recipe; did you mean 'my_modifiers'?",
    ),
    "unknown run type": (
        "quant_stage:\n  run_type: oneshoot\n  ToyModifier: {}",
        "recipe:2: run_type: 'oneshoot' is unknown; did you mean 'oneshot'?",
    ),
    "unknown top-level key": (
        "quant_stag:\n  quant_modifiers:\n    ToyModifier: {}",
        "recipe:1: 'quant_stag' means nothing in a recipe; did you mean 'quant_stage'?",
    ),
    "top-level key beside stages": (
        "quant_stage:\n  ToyModifier: {}\narg: {a: 1}",
        "recipe:3: 'arg' stands beside stages; did you mean 'args'?",
    ),
    "stage in a stage": (
        "a_stage:\n  b_stage: {ToyModifier: {}}",
        "recipe:2: 'b_stage' stands inside of a stage; write all",
    ),
    "run type beside stages": ("quant_stage:\n  ToyModifier: {}\nrun_type: oneshot", "recipe:3: 'run_type' stands beside stages"),
    "modifier beside stages": (
        "quant_stage:\n  ToyModifier: {}\nToyModifier: {}",
        "recipe:3: 'ToyModifier' stands beside stages; move it into a stage",
    ),
    "key that is no text": ("1: {}", "recipe: 1 means nothing in a recipe"),
    "stage without content": ("a_stage:\nb_stage: {ToyModifier: {}}", "recipe:1: the stage a_stage holds an empty entry"),
    "stage of a scalar": ("a_stage: 3", "recipe:1: the stage a_stage holds 3"),
    "empty group": (HEAD + "  b_modifiers: {}", "recipe:2: an empty entry stands where modifiers should"),
    "empty group mapping": ("a_stage:\n  b_modifiers: {}", "recipe:2: {} stands where modifiers should"),
    "number in a group": ("a_stage:\n  b_modifiers:\n  - ToyModifier: {}\n  - 3", "recipe:4: 3 stands where modifiers should"),
    "settings of a scalar": (HEAD + "    ToyModifier: W4A16", "recipe:3: ToyModifier holds 'W4A16'; give its settings as a mapping"),
    "wrong index": (
        "modifiers:\n- ToyModifier: {}\n- ToyModifier: {index: 0}",
        "recipe:3: ToyModifier.index: 0 is not its position 1; leave it out",
    ),
    "key twice": (
        HEAD + "    ToyModifier: {}\n    ToyModifier: {}",
        "recipe:4: 'ToyModifier' stands twice in one mapping; rename one, or write a list (- ToyModifier: ...)",
    ),
    "setting twice": (HEAD + "    ToyModifier:\n      block_size: 1\n      block_size: 2", "recipe:5: 'block_size' stands twice"),
    "nothing": ("\n\n", "recipe: an empty entry is no recipe"),
    "empty mapping": ("{}", "recipe: it holds no modifier, so nothing would be done"),
    "empty list": ("[]", "recipe: it holds no modifier"),
    "arguments only": ("args: {a: 1}", "recipe:1: the argument 'a' is not used by the recipe"),
    "stages without modifiers": ("a_stage: {run_type: oneshot}", "recipe: it holds no modifier"),
    "empty list in a group": ("a_stage:\n  b_modifiers: []", "recipe: it holds no modifier"),
    "a number": ("3\n", "recipe: 3 is no recipe"),
    "no name": ("", "recipe: an empty entry is no recipe"),
    "text": ("just words\nand more\n", "recipe: 'just words and more' is neither an existing file nor the text of a recipe"),
    "minutes": (
        HEAD + "    ToyModifier: {extras: 1:30}",
        'recipe:3: YAML reads 1:30 as another number; write that number, or a text ("1:30")',
    ),
    "octal digits": (
        HEAD + "    ToyModifier: {block_size: 0128}\n    OtherModifier: {block_size: 012}",
        "recipe:4: YAML reads 012 as another",
    ),
    "broken yaml": ("a_stage:\n  b_modifiers: [\n", "recipe:3: this is not safe YAML"),
    "impossible date": ("ToyModifier: {scheme: 2024-13-45}", "recipe:1: this is not safe YAML ('2024-13-45': month must be in 1"),
    "unreadable character": ("ToyModifier: {scheme: '\x00'}", "recipe: this is not safe YAML"),
    "unhashable key": ("? [a]\n: b", "recipe:1: this is not safe YAML"),
    "two documents": ("ToyModifier: {}\n---\nToyModifier: {}\n", "recipe:2: this is not safe YAML"),
    "two documents behind fences": ("---\nToyModifier: {}\n---\nToyModifier: {}\n", "recipe: several YAML documents stand in it"),
    "a document behind a comment": ("---\nToyModifier: {}\n---\n# Card\n---\n- ToyModifier\n", "recipe: several YAML documents stand in"),
    "foreign tag": (
        "- !GPTQModifier\n  scheme: A\n",
        "recipe:1: this is not safe YAML (could not determine a constructor for the tag '!GPTQModifier')",
    ),
    "self-reference": ("ToyModifier: &a {extras: *a}", "recipe:1: the aliases in this text expand without bounds"),
    "alias bomb": (
        "\n".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" if n else "x0: &x0 [0]" for n in range(9)),
        "expand without bounds",
    ),
    "too deep": ("[" * 5000 + "]" * 5000, "recipe: its entries are nested too deeply"),
}


@pytest.mark.parametrize("head", ["version: 1.1.0\n", "version: '0.14'\n", "version: 2\n", "metadata: {a: [1, '${b}']}\n"])
@pytest.mark.parametrize("body", ["quant_stage:\n  quant_modifiers:\n    ToyModifier: {}\n", "quant_modifiers:\n  ToyModifier: {}\n"])
def test_what_a_writer_notes_at_the_top_changes_nothing(head: str, body: str) -> None:
    schema = recipe_schema()
    for text in (head + body, body + head):
        assert load_recipe(text) == load_recipe(body)
        assert load_recipe(text).text == text
        assert accepts(schema, yaml.safe_load(text), schema)
    with pytest.raises(RecipeError, match="no modifier"):
        load_recipe(head)
    with pytest.raises(RecipeError, match="'version' means nothing in a recipe"):
        load_recipe("quant_stage:\n  version: 1\n  ToyModifier: {}")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_line_and_what_to_do(mistake: str) -> None:
    text, message = MISTAKES[mistake]
    with pytest.raises(RecipeError) as caught:
        load_recipe(text)
    assert message in str(caught.value)
    assert ";" in str(caught.value)
    assert len(str(caught.value)) < 440


def test_a_mistake_inside_a_python_set_is_named_as_far_as_it_has_a_place() -> None:
    with pytest.raises(RecipeError, match=r"^recipe: ToyModifier.ignore: 3 was given"):
        load_recipe({"ToyModifier": {"ignore": {3}}})


def test_all_mistakes_in_one_modifier_are_named_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(HEAD + "    ToyModifier:\n      blok_size: 3\n      dampening_frac: [1]\n")
    lines = str(caught.value).splitlines()
    assert {line.split(": ")[0] for line in lines} == {"recipe:4", "recipe:5"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.yaml", "modifiers:\n- ToyModifier: {blok_size: 1}", "r.yaml:2: ToyModifier.blok_size"),
        ("r.md", "\n---\nmodifiers:\n- ToyModifier: {blok_size: 1}\n---\n# Card", "r.md:4: ToyModifier.blok_size"),
        ("r.md", "# Card\n---\nToyModifier: {}\n---\n", "r.md: no front matter was found"),
        ("r.md", "---\nToyModifier: {}\n", "r.md: no front matter was found"),
        ("r.md", "", "r.md: no front matter was found"),
        ("r.json", "ToyModifier: {}", "r.json:1: this is not JSON"),
        ("r.json", '{\n"ToyModifier": {},\n}', "r.json:3: this is not JSON"),
        ("r.json", '{"ToyModifier": {}, "ToyModifier": {}}', "r.json: 'ToyModifier' stands twice"),
        ("r.json", '{"ToyModifier":\n {"blok_size": 1}}', "r.json:2: ToyModifier.blok_size"),
        ("r.json", "[" * 100_000, "r.json: its entries are nested too deeply"),
        ("r.yaml", "[" * 5_000, "r.yaml: its entries are nested too deeply"),
        ("r.yaml", b"\xff\xfe\x00", "r.yaml: byte 0 is not UTF-8 text"),
        ("r.txt", "---\nToyModifier: {}\n---\na: 1", "r.txt: several YAML documents stand in it"),
        ("r.txt", "just words", "r.txt: 'just words' is no recipe"),
    ],
)
def test_mistakes_in_files_name_the_file(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert message in str(caught.value)


def test_a_missing_file_is_answered_with_the_nearest(tmp_path: Path) -> None:
    for source in (tmp_path / "recipe.yaml", str(tmp_path / "recipe.yaml")):
        with pytest.raises(RecipeError, match=r"recipe.yaml: there is no such recipe file; give the path of a .yaml"):
            load_recipe(source)
    for name in ("README.md", "config.json"):  # of a model, and no recipes
        (tmp_path / name).write_text("")
    for source in (tmp_path / "recipe.yaml", str(tmp_path / "recipe.md")):
        with pytest.raises(RecipeError, match=r"there is no such recipe file; give the path of a .yaml"):
            load_recipe(source)
    (tmp_path / "w4.yml").write_text("")
    with pytest.raises(RecipeError, match=r"there is no such recipe file; choose from w4.yml$"):
        load_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "recipes.yaml").write_text("")
    for source in (tmp_path / "recipe.yaml", str(tmp_path / "recipe.yaml")):
        with pytest.raises(RecipeError, match=r"did you mean 'recipes.yaml'\?"):
            load_recipe(source)


@pytest.mark.parametrize("form", [Path, str])
def test_folders_and_devices_are_no_recipes(form: Callable[[Path], str | Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"{tmp_path}: is a folder; give the path of a file"):
        load_recipe(form(tmp_path))
    with pytest.raises(RecipeError, match="/dev/null: is a pipe or device, which gives its text once"):
        load_recipe(form(Path(os.devnull)))


def test_a_text_that_ends_like_a_file_name_is_a_text() -> None:
    assert only("ToyModifier:\n  scheme: a.yaml").scheme == "a.yaml"


def test_a_text_longer_than_a_file_name_is_a_text() -> None:
    assert only("ToyModifier: {ignore: [" + ", ".join(["x" * 50] * 100) + "]}").ignore == ["x" * 50] * 100


@pytest.mark.parametrize("source", [3, None, 2.5, b"x", {1, 2}])
def test_other_things_are_no_recipes(source: Any) -> None:
    with pytest.raises(RecipeError, match="is no recipe; give a mapping of stages or a list of modifiers"):
        load_recipe(source)


# --- objects


def test_objects_are_used_themselves_and_get_their_place() -> None:
    first, second = ToyModifier(), OtherModifier(group="own", index=9)
    recipe = load_recipe([first, [second]])
    assert recipe.modifiers[0] is first and recipe.modifiers[1] is second
    assert [(m.index, m.group) for m in recipe.modifiers] == [(0, "default"), (1, "own")]
    assert load_recipe(recipe) is recipe
    assert load_recipe(recipe.text) == recipe
    assert load_recipe(first).modifiers[0] is first


@pytest.mark.parametrize("mixed", [[ToyModifier(), "OtherModifier"], [{"ToyModifier": {}}, [ToyModifier()]], [ToyModifier(), []]])
def test_objects_and_data_do_not_mix(mixed: list[Any]) -> None:
    with pytest.raises(RecipeError, match="stands in a list of modifier objects; give only objects, or only data"):
        load_recipe(mixed)


def test_one_object_cannot_stand_twice() -> None:
    modifier = ToyModifier()
    with pytest.raises(RecipeError, match="stands twice in the list"):
        load_recipe([modifier, modifier])


@pytest.mark.parametrize("source", [[ToyModifier()], Recipe((Stage("a", (ToyModifier(),)),))])
def test_arguments_for_objects_are_an_error(source: Any) -> None:
    with pytest.raises(RecipeError, match="given with modifier objects"):
        load_recipe(source, {"a": 1})


def test_what_torch_writes_as_a_name_is_written_so() -> None:
    recipe = load_recipe([AWQModifier(offload_device=torch.device("cpu")), QuIPModifier(precision=torch.float64)])
    assert "offload_device: cpu" in recipe.dump() and "precision: float64" in recipe.dump()
    assert load_recipe(recipe.dump()).dump() == recipe.dump()


def test_a_setting_that_no_text_can_hold_is_an_error_at_once() -> None:
    with pytest.raises(RecipeError, match=r"Needy\[0\]: setting function cannot be written into a recipe"):
        load_recipe([Needy(sparsity=0.5, function=lambda: None)])


class One(BaseModel):
    kind: Literal["one"] = "one"
    k: int = 1


class Two(BaseModel):
    kind: Literal["two"] = "two"
    k: float = 1.0


class Either(Modifier):
    told: Annotated[One | Two, Field(discriminator="kind")] = One()
    tried: One | Two = One()
    several: list[One | Two] = Field(default_factory=list)

    def on_initialize(self, state: State) -> bool:
        return True


@pytest.mark.parametrize("settings", [{"told": Two(k=5)}, {"told": Two()}, {"tried": Two()}, {"several": [Two(), One(k=3), Two(k=2)]}])
def test_a_default_that_tells_the_member_of_a_union_is_written(settings: dict[str, Any]) -> None:
    recipe = load_recipe([Either(**settings)])
    text = recipe.dump()
    own, again = recipe.modifiers[0], Either.model_validate({**Either().model_dump(), **_settings_in(text)})
    assert {name: getattr(again, name) for name in settings} == settings == {name: getattr(own, name) for name in settings}


def _settings_in(text: str) -> dict[str, Any]:
    (stage,) = yaml.safe_load(text).values()
    (modifiers,) = stage.values()
    (found,) = modifiers.values()
    return dict(found)


class Holds(Modifier):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    values: Any = None
    raw: bytes = b"a"

    def on_initialize(self, state: State) -> bool:
        return True


@pytest.mark.parametrize(("name", "value"), [("values", torch.zeros(2)), ("values", np.zeros(2)), ("raw", b"\xff\x00")])
def test_a_setting_that_is_no_plain_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=rf"Holds\[0\]: setting {name} cannot be written into a recipe \(.*\); use plain values"):
        load_recipe([Holds(**{name: value})]).dump()


# --- writing and reading back

NAMES = st.text(min_size=1, max_size=8)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "${x}",
            "$${x}",
            "$$${",
            "$",
            "re:.*q_proj$",
            "1e3",
            "1e-3",
            "yes",
            "null",
            "~",
            "0x1f",
            "1_0",
            "2024-01-01",
            "",
            " a",
            "- b",
            "#",
            "a: b",
            "eval(x)",
        ]
    ),
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
MODIFIERS = st.builds(
    lambda cls, settings: cls(**settings),
    st.sampled_from([ToyModifier, OtherModifier]),
    st.fixed_dictionaries(
        {},
        optional={
            "group": NAMES | st.just("${x}"),
            "start": st.floats(-5, 5),
            "update": st.floats(0, 5),
            "targets": st.lists(TEXTS, max_size=3),
            "scheme": st.one_of(TEXTS, st.dictionaries(TEXTS, st.lists(TEXTS, max_size=2), max_size=2)),
            "dampening_frac": st.floats(1e-12, 1e6),
            "actorder": st.none() | TEXTS,
            "config_groups": st.dictionaries(NAMES, st.builds(Group, targets=st.lists(TEXTS), weights=st.none() | st.builds(Weights))),
            "extras": st.dictionaries(TEXTS, PLAIN, max_size=3),
        },
    ),
)


@given(st.lists(MODIFIERS, min_size=1, max_size=4))
def test_what_is_written_reads_back_equal(modifiers: list[ToyModifier]) -> None:
    recipe = load_recipe(modifiers)
    again = load_recipe(recipe.dump())
    assert again == recipe
    assert again.dump() == recipe.dump()


STAGE_NAMES = NAMES.filter(lambda name: "${" not in name)  # there it would stand for an argument, and is refused
STAGES = st.tuples(STAGE_NAMES, st.sampled_from([None, "oneshot", "train"]), st.lists(MODIFIERS, min_size=1, max_size=3))


@given(st.lists(STAGES, min_size=1, max_size=3, unique_by=lambda stage: stage[0]))
def test_stages_and_groups_read_back_equal(parts: list[tuple[str, str | None, list[ToyModifier]]]) -> None:
    every = [modifier for _, _, members in parts for modifier in members]
    load_recipe(every)  # fills in index and group
    recipe = Recipe(tuple(Stage(name, tuple(members), run_type) for name, run_type, members in parts))
    assert load_recipe(recipe.dump()) == recipe


@given(st.text(max_size=30), st.sampled_from(["", "ToyModifier: ", "a_stage: ", "---\n", "{", "args: {a: 1}\nToyModifier: "]))
def test_any_text_is_a_recipe_or_a_recipe_error(text: str, head: str) -> None:
    try:
        recipe = load_recipe(head + text + "\n")
    except RecipeError:
        return
    assert load_recipe(recipe.dump()) == recipe


def test_two_modifiers_of_one_type_keep_their_order_and_settings() -> None:
    recipe = load_recipe([ToyModifier(scheme="W4A16"), ToyModifier(scheme="W8A8"), OtherModifier(), ToyModifier(group="x")])
    assert [m.scheme for m in load_recipe(recipe.dump()).modifiers if isinstance(m, ToyModifier)] == ["W4A16", "W8A8", None, None]


def test_a_dump_uses_the_nested_form_where_it_can() -> None:
    recipe = load_recipe([ToyModifier(scheme="W4A16", actorder=None), OtherModifier(group="b")])
    assert recipe.dump() == (
        "default_stage:\n  default_modifiers:\n    ToyModifier: {scheme: W4A16, actorder: null}\n  b_modifiers:\n    OtherModifier: {}\n"
    )


def test_groups_that_come_back_later_keep_their_place() -> None:
    recipe = load_recipe([ToyModifier(group="a"), OtherModifier(group="b"), OtherModifier(group="a")])
    assert load_recipe(recipe.dump()) == recipe


def test_a_recipe_made_by_hand_can_be_written_before_it_is_filled_in() -> None:
    recipe = Recipe((Stage("a", (ToyModifier(block_size=1), OtherModifier(block_size=2))),))
    assert recipe.dump() == (
        "a_stage:\n  modifiers:\n  - ToyModifier: {group: null, block_size: 1}\n  - OtherModifier: {group: null, block_size: 2}\n"
    )


def test_a_class_without_a_name_is_written_as_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    recipe = load_recipe([ToyModifier(scheme="A")])
    assert f"{__name__}:ToyModifier" in recipe.dump()
    assert load_recipe(recipe.dump()) == recipe


# --- schema


def accepts(schema: Any, value: Any, root: dict[str, Any]) -> bool:
    """The part of JSON schema that recipe_schema uses."""
    if schema is True or schema is False:
        return bool(schema)
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    kinds = {"object": dict, "array": list, "string": str, "null": type(None), "boolean": bool, "integer": int, "number": (int, float)}
    types = schema.get("type", list(kinds))
    types = types if isinstance(types, list) else [types]
    fits = any(isinstance(value, kinds[kind]) and (kind in ("boolean",) or not isinstance(value, bool)) for kind in types)
    fits = (
        fits
        and ("enum" not in schema or value in schema["enum"])
        and ("anyOf" not in schema or any(accepts(s, value, root) for s in schema["anyOf"]))
    )
    if isinstance(value, str):
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        return fits and len(value) >= schema.get("minItems", 0) and all(accepts(schema.get("items", True), item, root) for item in value)
    if not isinstance(value, dict) or not fits:
        return fits
    fits = len(value) >= schema.get("minProperties", 0) and set(schema.get("required", [])) <= set(value)
    for key, item in value.items():
        known = [s for name, s in schema.get("properties", {}).items() if name == key]
        known += [s for pattern, s in schema.get("patternProperties", {}).items() if re.search(pattern, key)]
        fits = fits and all(accepts(s, item, root) for s in known or [schema.get("additionalProperties", True)])
    return fits


GOOD_DATA = [
    {"quant_stage": {"run_type": "oneshot", "quant_modifiers": {"ToyModifier": {"scheme": "${a}"}}}, "args": {"a": "W4A16"}},
    {"modifiers": [{"ToyModifier": {"block_size": "${a}"}}, "OtherModifier"], "args": {"a": 4}},
    [{"ToyModifier": None}, {f"{__name__}:ToyModifier": {"ignore": []}}],
    {"ToyModifier": {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}},
]
BAD_DATA = [
    {"quant_stage": {"quant_modifers": {"ToyModifier": {}}}},
    {"quant_stag": {"quant_modifiers": {"ToyModifier": {}}}},
    {"ToyModifier": {"blok_size": 4}},
    {"ToyModifier": {"block_size": "four"}},
    {"ToyModifier": {"config_groups": {"g": {"targets": [], "weights": {"num_bit": 4}}}}},
    {"modifiers": [{"ToyModifer": {}}]},
    {"a_stage": {"run_type": "oneshoot", "ToyModifier": {}}},
    {"quant_stage": {"ToyModifier": {}}, "ToyModifier": {}},
    {"Needy": {}},
    {},
    [],
    3,
]


@pytest.mark.parametrize("data", [*GOOD_DATA, *BAD_DATA], ids=repr)
def test_the_schema_and_the_reader_agree(data: Any) -> None:
    schema = recipe_schema()
    assert accepts(schema, data, schema) is (data in GOOD_DATA)
    if data in GOOD_DATA:
        load_recipe(data)
    else:
        with pytest.raises(RecipeError):
            load_recipe(data)


def test_the_schema_is_json_and_holds_every_known_modifier() -> None:
    schema = json.loads(json.dumps(recipe_schema()))
    assert set(registry.known_modifiers()) <= set(schema["$defs"]["one_or_more"]["properties"])
    assert "targets" in schema["$defs"]["ToyModifier"]["properties"]
    assert schema["$defs"]["ToyModifier"]["properties"]["block_size"]["default"] == 128


# --- the modifiers of this package, in files as llm-compressor's users write them

ITS_FILES = {
    "channel weights in a group": """
        quant_stage:
          quant_modifiers:
            GPTQModifier:
              ignore: [lm_head, "re:.*mlp.gate$", "model.embed_tokens"]
              config_groups:
                group_0:
                  weights: {num_bits: 4, type: int, symmetric: true, strategy: channel, dynamic: false}
                  targets: [Linear]
        """,
    "weights and activations": """
        test_stage:
            obcq_modifiers:
                GPTQModifier:
                    block_size: 128
                    dampening_frac: 0.001
                    actorder: static
                    config_groups:
                        group_0:
                            targets: ["Linear"]
                            input_activations: {num_bits: 8, type: "int", symmetric: true, strategy: "tensor"}
                            output_activations: null
                            weights:
                                num_bits: 8
                                type: "int"
                                symmetric: true
                                strategy: "channel"
        """,
    "a preset, one target as a string": """
        DEFAULT_stage:
          DEFAULT_modifiers:
            QuantizationModifier:
              ignore: [lm_head]
              targets: Linear
              scheme: FP8
        """,
    "two modifiers with their own targets": r"""
        quant_stage:
          run_type: oneshot
          quant_modifiers:
            QuantizationModifier:
              ignore: ["lm_head"]
              scheme: "W4A16"
              targets:
                - "re:.*self_attn\\.(k|q|o|v)_proj$"
            GPTQModifier:
              ignore: ["lm_head"]
              scheme: "W8A8"
              targets:
                - "re:.*mlp\\.(down|gate|up)_proj$"
              block_size: 128
              dampening_frac: 0.001
              actorder: null
        """,
}


@pytest.mark.parametrize("form", ITS_FILES)
def test_files_written_for_llm_compressor_load_unchanged(form: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(ITS_FILES[form])
    recipe = load_recipe(str(file))
    assert {type(modifier).__name__ for modifier in recipe.modifiers} == set(re.findall(r"\w+Modifier\b", ITS_FILES[form]))
    assert load_recipe(recipe.dump()) == recipe


class MakesOthers(Modifier):
    made: Any = None
    behind: Any = ()

    def on_initialize(self, state: State) -> bool:
        return True

    def parts(self) -> list[Modifier]:
        return [self] if self.made is None else self.made

    def followers(self) -> list[Modifier]:
        return self.behind


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"made": [3]}, r"MakesOthers\[0\]: parts\(\) returned \[3\], where a list of modifiers is due; return one"),
        ({"made": []}, r"MakesOthers\[0\]: parts\(\) returned none, and nothing would do what it asks for; return \[self\] at least"),
        ({"behind": "GPTQModifier"}, r"MakesOthers\[0\]: followers\(\) returned 'GPTQModifier', where a list of modifiers is due"),
    ],
)
def test_what_a_modifier_makes_in_its_place_or_behind_it_are_modifiers(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe([MakesOthers(**settings)])
