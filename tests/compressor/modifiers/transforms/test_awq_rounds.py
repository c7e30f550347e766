"""AWQ that is given schemes, as older recipes write it, and the ranges that it narrows before weights are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from compressor import AWQModifier, GPTQModifier, QuantizationModifier, load_recipe, oneshot, plan
from compressor.algorithms.clipping import search_clipping
from compressor.errors import RecipeError, TargetError
from compressor.numerics import QuantizationArgs
from compressor.recipe import Recipe
from harness.validation import validate
from tests import tiny

IDS = torch.randint(64, (12, 10), generator=torch.Generator().manual_seed(0))
INT4 = {"num_bits": 4, "group_size": 16, "strategy": "group"}
OLDER = """
quant_stage:
  quant_modifiers:
    AWQModifier:
      ignore: [lm_head]
      duo_scaling: false
      max_chunk_memory: 1073741824
      config_groups:
        group_0:
          targets: [Linear]
          weights: {num_bits: 4, type: int, symmetric: true, strategy: group, group_size: 16}
          input_activations: null
          output_activations: null
"""


def apart() -> Recipe:
    awq = AWQModifier(duo_scaling=False)
    return load_recipe([awq, QuantizationModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": INT4}}, ignore=["lm_head"])])


def weights_of(recipe: Any) -> dict[str, Tensor]:
    model = tiny.llama()
    oneshot(model, recipe=recipe, dataset=IDS)
    return dict(model.state_dict())


def test_schemes_go_to_what_rounds_right_behind_it() -> None:
    recipe = load_recipe(OLDER)
    assert [type(one) for one in recipe.modifiers] == [AWQModifier, QuantizationModifier]
    assert [one.group for one in recipe.modifiers] == ["quant", "quant"] and [one.index for one in recipe.modifiers] == [0, 1]
    assert load_recipe(recipe.dump()) == recipe
    ours, theirs = weights_of(recipe), weights_of(apart())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_objects_and_short_forms_say_the_same() -> None:
    given = AWQModifier(targets=["Linear"], scheme="W4A16", ignore="lm_head")
    first, second = load_recipe(given).modifiers
    assert first is given and first.ignore == [] and first.scheme is None
    assert isinstance(second, QuantizationModifier) and second.scheme == "W4A16" and second.ignore == ["lm_head"]
    alone = load_recipe([AWQModifier(ignore=["re:.*input_layernorm$"]), GPTQModifier(scheme="W4A16")])
    assert alone.modifiers[0].ignore == ["re:.*input_layernorm$"]  # type: ignore[attr-defined]


def test_its_schemes_may_be_lent_to_a_solver() -> None:
    kinds = [type(one) for one in load_recipe([AWQModifier(scheme="W4A16"), GPTQModifier()]).modifiers]
    assert kinds == [AWQModifier, GPTQModifier]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("scheme: W4A17", "did you mean 'W4A16'"),
        ("targets: ['re:.*mlp.*']", "neither scheme nor config_groups was given"),
        ("scheme: W4A16, sequential_update: false", "asks for something that is not done here"),
    ],
)
def test_what_means_nothing_is_refused_with_its_line(settings: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why) as caught:
        load_recipe(f"quant_stage:\n  quant_modifiers:\n    AWQModifier: {{{settings}}}")
    assert "recipe:3" in str(caught.value)


def test_it_and_another_modifier_do_not_quantize_the_same_layers() -> None:
    with pytest.raises(TargetError, match="make their targets disjoint"):
        oneshot(tiny.llama(), recipe=[AWQModifier(scheme="W8A8"), GPTQModifier(scheme="W8A8")], dataset=IDS)


def test_an_older_recipe_is_planned_run_resumed_and_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.llama().save_pretrained(tmp_path / "base")
    planned = plan(tmp_path / "base", recipe=OLDER)
    assert {module.modifier for module in planned.modules} == {"QuantizationModifier"} and planned.pipeline != "data_free"
    run: dict[str, Any] = {"recipe": OLDER, "dataset": IDS, "pipeline": "sequential"}
    oneshot(tmp_path / "base", output_dir=tmp_path / "whole", **run)
    place, done = QuantizationModifier.round_module, []

    def stops(self: QuantizationModifier, state: Any, name: str) -> None:
        if "layers.1" in name and not done:
            done.append(name)
            raise KeyboardInterrupt
        place(self, state, name)

    monkeypatch.setattr(QuantizationModifier, "round_module", stops)
    with pytest.raises(KeyboardInterrupt):
        oneshot(tmp_path / "base", output_dir=tmp_path / "again", **run)
    oneshot(tmp_path / "base", output_dir=tmp_path / "again", resume=True, **run)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert files[0] == files[1]
    outcomes = {record.name: record.outcome for record in validate(tmp_path / "base", tmp_path / "whole", (IDS + 1) % 64).records}
    assert outcomes["behaviour.transforms"] == "pass"
    assert not {name for name, outcome in outcomes.items() if outcome == "fail" and not name.startswith("behaviour.")}


@pytest.mark.parametrize(("symmetric", "size"), [(True, 8), (False, 8), (True, None)])
def test_ranges_are_what_forwards_of_single_groups_would_choose(symmetric: bool, size: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 16, generator=draw) ** 3
    x = torch.randn(200, 16, generator=draw) * torch.linspace(0.1, 3, 16)
    strategy = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, **strategy)
    found = search_clipping(weight, args, x.T @ x)
    width = size or 16
    before = after = 0.0
    for row in range(6):
        for group in range(16 // width):
            columns = slice(group * width, (group + 1) * width)
            w, inputs = weight[row, columns].double(), x[:, columns].double()
            errors = []
            for step in range(10):
                low, high = min(float(w.min()), 0.0) * (1 - step / 20), max(float(w.max()), 0.0) * (1 - step / 20)
                scale = max(-low, high) / 7.5 if symmetric else (high - low) / 15
                zero = 0.0 if symmetric else max(-8.0, min(7.0, round(-8 - low / scale)))
                rounded = ((w / scale + zero).round().clamp(-8, 7) - zero) * scale
                errors.append(float((inputs @ (rounded - w)).square().sum()))
            kept = round((1 - float(found.kept_RG[row, group])) * 20)
            assert errors[kept] <= min(errors) * (1 + 1e-4)
            before, after = before + errors[0], after + min(errors)
    # The largest weight lies half a step beyond the last code, where float32 and float64 round apart.
    assert found.error_before == pytest.approx(before, rel=0.02) and found.error == pytest.approx(after, rel=0.02) and after < before


def outliers() -> LlamaForCausalLM:
    """One weight in twenty stands out, which is what ranges are narrowed for."""
    model = tiny.llama()
    draw = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "proj" in name:
            weight.data *= torch.where(torch.rand(weight.shape, generator=draw) < 0.05, 4.0, 1.0)
    return model


def test_narrowed_ranges_bring_outputs_closer_and_are_noted() -> None:
    base, off = outliers(), {}
    with torch.no_grad():
        wanted = base(IDS).logits
        for clip in (None, True, False):
            model = outliers()
            recipe = [AWQModifier(clip=clip), QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": INT4}})]
            report = oneshot(model, recipe=recipe, dataset=IDS).report
            off[clip] = float((model(IDS).logits - wanted).square().sum())
            assert any("15 weights were narrowed" in note for note in report.notes) == (clip is not False)
    assert off[None] == off[True] < 0.9 * off[False]


@pytest.mark.parametrize(
    "behind",
    [
        GPTQModifier(config_groups={"g": {"targets": ["Linear"], "weights": INT4}}),
        QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": {**INT4, "observer": "mse"}}}),
        QuantizationModifier(scheme="FP8_DYNAMIC"),
    ],
)
def test_ranges_that_something_else_chooses_are_not_narrowed(behind: Any) -> None:
    with pytest.raises(RecipeError, match=r"AWQModifier\[0\].clip: True was given"):
        oneshot(tiny.llama(), recipe=[AWQModifier(clip=True), behind], dataset=IDS)
