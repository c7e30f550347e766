"""SparseGPT and Wanda in a run: shares, patterns, layers, resume, experts, quantization of what is left, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from compressor import (
    AutoRoundModifier,
    ConstantPruningModifier,
    GPTQModifier,
    MagnitudePruningModifier,
    QuantizationModifier,
    SparseGPTModifier,
    WandaPruningModifier,
    oneshot,
)
from compressor.errors import CalibrationError, CompressorError, NumericsError, RecipeError, SchemeError, TargetError
from compressor.lifecycle import EventType, Session, State
from compressor.nn import QuantizedLayer
from compressor.recipe import load_recipe
from tests import tiny

IDS = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(0))
BOTH = [SparseGPTModifier, WandaPruningModifier]
REST = {"ignore": ["lm_head"]}
GROUPS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}


def linear(model: nn.Module) -> dict[str, Tensor]:
    return {name: module.weight.data for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}


def zeros(weight: Tensor) -> float:
    return float((weight == 0).double().mean())


@pytest.mark.parametrize("kind", BOTH)
def test_a_weight_that_two_targets_have_is_not_pruned_by_the_inputs_of_one(kind: Any) -> None:
    model = tiny.llama()
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    second.weight = first.weight
    with pytest.raises(TargetError, match=r"layers\.0\.mlp\.up_proj: its weight is tied to model\.layers\.1\.mlp\.up_proj\.weight"):
        oneshot(model, recipe=kind(sparsity=0.5, **REST), dataset=IDS)
    assert second.weight is first.weight and zeros(first.weight) == 0


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("structure", ["0:0", "unstructured", "2:4"])
def test_every_layer_gets_its_zeros(kind: Any, structure: str) -> None:
    model = tiny.llama()
    before = {name: weight.clone() for name, weight in linear(model).items()}
    head = model.lm_head.weight.clone()
    report = oneshot(model, recipe=kind(sparsity=0.5, mask_structure=structure, **REST), dataset=IDS).report
    for name, weight in linear(model).items():
        assert zeros(weight) == 0.5
        if structure == "2:4":
            assert bool((weight.unflatten(1, (-1, 4)).ne(0).sum(-1) == 2).all())
        if kind is WandaPruningModifier:
            assert torch.equal(weight, before[name].masked_fill(weight == 0, 0.0))
        record = report.modules[name]
        assert record.details["sparsity"] == 0.5 and 0 < record.error < 0.2 and record.num_tokens == IDS.numel()
    assert torch.equal(model.lm_head.weight, head) and report.notes == []


LARGE: dict[str, Any] = {
    "Wanda": lambda: WandaPruningModifier(sparsity=0.5, **REST),
    "magnitude": lambda: MagnitudePruningModifier(final_sparsity=0.5, **REST),
    "2:4": lambda: MagnitudePruningModifier(final_sparsity=0.5, mask_structure="2:4", **REST),
    "learned rounding": lambda: AutoRoundModifier(config_groups=GROUPS, iters=0, **REST),
    "rounding": lambda: QuantizationModifier(config_groups=GROUPS, **REST),
}


@pytest.mark.parametrize("size", [2.0**66, 2.0**-55])
@pytest.mark.parametrize("name", LARGE)
def test_errors_do_not_depend_on_the_size_of_weights(name: str, size: float, tmp_path: Path) -> None:
    """Whose squares float32 does not hold, though it holds all that the model computes."""
    errors = []
    for factor in (1.0, size):
        model = tiny.llama()
        model.model.layers[0].mlp.up_proj.weight.data *= factor
        model.model.layers[0].mlp.down_proj.weight.data /= factor
        report = oneshot(model, recipe=LARGE[name](), dataset=IDS, output_dir=tmp_path / str(factor)).report
        errors.append({key: record.error for key, record in report.modules.items() if ".layers.0.mlp" in key})
    assert errors[1] == pytest.approx(errors[0], rel=1e-4) and min(errors[0].values()) > 0


@pytest.mark.parametrize(("modifier", "said"), [
    (GPTQModifier(config_groups=GROUPS, **REST), "GPTQModifier finds loss=inf"),
    (SparseGPTModifier(sparsity=0.5, **REST), "SparseGPTModifier finds error=(nan|inf)"),
])  # fmt: skip
def test_a_number_that_no_report_can_hold_names_its_module(modifier: Any, said: str, tmp_path: Path) -> None:
    model = tiny.llama()
    model.model.layers[0].mlp.up_proj.weight.data *= 1e30
    model.model.layers[0].mlp.down_proj.weight.data /= 1e30
    with pytest.raises(NumericsError, match=rf"^model\.layers\.0\.mlp\.up_proj: {said}.* too large for float32"):
        oneshot(model, recipe=modifier, dataset=IDS, output_dir=tmp_path / "out")


@pytest.mark.parametrize("modifier", [
    MagnitudePruningModifier(final_sparsity=0.5, **REST), MagnitudePruningModifier(final_sparsity=0.5, apply_globally=True, **REST),
    MagnitudePruningModifier(final_sparsity=0.5, mask_structure="channel", **REST), ConstantPruningModifier(**REST),
    WandaPruningModifier(sparsity=0.5, **REST), SparseGPTModifier(sparsity=0.5, fallback_budget=9, **REST),
    SparseGPTModifier(sparsity=0.5, **REST),
])  # fmt: skip
def test_a_weight_that_holds_nan_is_named(modifier: Any) -> None:
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(
        NumericsError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight: holds NaN or infinity.* or ignore model.layers.1.mlp.up"
    ):
        oneshot(model, recipe=[modifier, QuantizationModifier(config_groups=GROUPS, **REST)], dataset=IDS)
    session = Session(State(model), [MagnitudePruningModifier(final_sparsity=0.5, mask_structure="filter", **REST)])
    session.initialize()
    with pytest.raises(NumericsError, match=r"^model\.layers\.1\.mlp\.up_proj: holds NaN"):  # in the midst of a training
        session.send(EventType.CALIBRATION_START)


def test_a_list_gives_each_layer_its_own_share() -> None:
    model = tiny.llama()
    oneshot(model, recipe=WandaPruningModifier(sparsity=[0.25, 0.75], targets=["LlamaDecoderLayer"]), dataset=IDS)
    assert {zeros(weight) for name, weight in linear(model).items() if ".layers.0." in name} == {0.25}
    assert {zeros(weight) for name, weight in linear(model).items() if ".layers.1." in name} == {0.75}
    with pytest.raises(TargetError, match="lists 3 shares, and the targets lie in 2 layers"):
        oneshot(tiny.llama(), recipe=WandaPruningModifier(sparsity=[0.25, 0.75, 0.5], **REST), dataset=IDS)


@pytest.mark.parametrize("kind", BOTH)
def test_layers_with_outliers_keep_more_and_all_together_have_the_share(kind: Any) -> None:
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[:, 3] *= 50
    report = oneshot(model, recipe=kind(sparsity=0.5, sparsity_profile="OWL", owl_m=3, owl_lmbda=0.1, **REST), dataset=IDS).report
    first, second = (
        torch.cat([weight.flatten() for name, weight in linear(model).items() if f".layers.{index}." in name]) for index in (0, 1)
    )
    assert abs(zeros(first) - zeros(second)) == pytest.approx(0.2, abs=0.02)
    assert zeros(torch.cat([first, second])) == pytest.approx(0.5, abs=0.02)
    assert "by their outliers 2 layers get 40.0% to 60.0% zeros, 50.0% together" in report.notes[0]


@pytest.mark.parametrize("kind", BOTH)
def test_a_layer_that_would_lose_all_weights_is_refused(kind: Any) -> None:
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[:, 3] *= 50
    settings = {"sparsity": 0.9, "sparsity_profile": "OWL", "owl_m": 3, "owl_lmbda": 0.2, **REST}
    with pytest.raises(CalibrationError, match=r"by its outliers model\.layers\.\d\.\S+ gets 100\.0% zeros, all \d+ weights of a row"):
        oneshot(model, recipe=kind(**settings), dataset=IDS)


def test_the_uncompressed_model_runs_beside_and_makes_a_difference() -> None:
    found = {}
    for target in ("base", "propagated", None):
        model = tiny.llama()
        oneshot(model, recipe=SparseGPTModifier(sparsity=0.5, target=target, **REST), dataset=IDS)
        found[target] = linear(model)
    last = "model.layers.1.mlp.down_proj"
    assert not torch.equal(found["base"][last], found["propagated"][last])
    assert all(torch.equal(found["base"][name], found[None][name]) for name in found["base"])
    first = "model.layers.0.self_attn.q_proj"
    assert torch.equal(found["base"][first], found["propagated"][first])  # nothing was pruned before it


@pytest.mark.nightly
@pytest.mark.parametrize("passes", ["one", "two"])
@pytest.mark.parametrize("kind", BOTH)
def test_a_run_that_was_stopped_ends_with_the_same_bytes(kind: Any, passes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.llama().save_pretrained(tmp_path / "base")
    recipe = [kind(sparsity=0.5, mask_structure="2:4", **REST), GPTQModifier(config_groups=GROUPS, target="propagated", **REST)]

    def run(out: str, **settings: Any) -> None:
        oneshot(
            tmp_path / "base",
            recipe=[one.model_copy() for one in recipe],
            dataset=IDS,
            output_dir=tmp_path / out,
            passes=passes,
            **settings,
        )

    run("whole")
    owner, method = (SparseGPTModifier, "prune") if kind is SparseGPTModifier else (GPTQModifier, "compress")
    real, calls = getattr(owner, method), []

    def failing(self: Any, state: Any, names: Any) -> None:
        calls.append(names)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(self, state, names)

    monkeypatch.setattr(owner, method, failing)
    with pytest.raises(KeyboardInterrupt):
        run("stopped")
    monkeypatch.setattr(owner, method, real)
    run("stopped", resume=True)
    for name in ("model.safetensors", "compression.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


def test_a_float_checkpoint_resumes_and_is_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.llama().save_pretrained(tmp_path / "base")

    def run(out: str, **settings: Any) -> None:
        oneshot(tmp_path / "base", recipe=SparseGPTModifier(sparsity=0.5, **REST), dataset=IDS, output_dir=tmp_path / out, **settings)

    run("whole")
    real = SparseGPTModifier.prune

    def failing(self: Any, state: Any, names: list[str]) -> None:
        if "down" in names[0]:
            raise KeyboardInterrupt
        real(self, state, names)

    monkeypatch.setattr(SparseGPTModifier, "prune", failing)
    with pytest.raises(KeyboardInterrupt):
        run("stopped")
    monkeypatch.setattr(SparseGPTModifier, "prune", real)
    run("stopped", resume=True)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "stopped" / "model.safetensors").read_bytes()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    assert all(zeros(weight) == 0.5 for weight in linear(loaded).values())
    assert "quantization_config" not in (tmp_path / "whole" / "config.json").read_text()


@pytest.mark.parametrize(
    "pruner",
    [
        SparseGPTModifier(sparsity=0.5, mask_structure="2:4", **REST),
        WandaPruningModifier(sparsity=0.5, mask_structure="2:4", **REST),
        MagnitudePruningModifier(final_sparsity=0.5, mask_structure="2:4", **REST),
    ],
    ids=lambda pruner: type(pruner).__name__,
)
@pytest.mark.parametrize("quantizer", [GPTQModifier, QuantizationModifier])
def test_quantization_keeps_what_was_pruned(pruner: Any, quantizer: Any) -> None:
    model = tiny.llama()
    report = oneshot(model, recipe=[pruner.model_copy(), quantizer(config_groups=GROUPS, **REST)], dataset=IDS).report
    for name, record in report.modules.items():
        weight = model.get_submodule(name).dequantized_weight()
        assert bool((weight.unflatten(1, (-1, 4)).ne(0).sum(-1) <= 2).all()), name
        assert float(record.details["sparsity"]) >= 0.5 and record.details["pruned"] == "2:4, 50% zeros"
    assert not [note for note in report.notes if "that were pruned are not zero" in note]


@pytest.mark.parametrize(("settings", "said"), [({"target": "base", "alpha": 0.5}, "target and alpha did not count for"), ({}, None)])
def test_what_does_not_count_behind_weights_that_were_moved_is_said(settings: dict[str, Any], said: str | None) -> None:
    recipe = [SparseGPTModifier(sparsity=0.5, **REST), GPTQModifier(config_groups=GROUPS, **settings, **REST)]
    notes = [note for note in oneshot(tiny.llama(), recipe=recipe, dataset=IDS).report.notes if "did not count" in note]
    assert len(notes) == (said is not None) and all(str(said) in note for note in notes)


def test_a_model_that_was_sparse_before_keeps_its_zeros_unless_they_may_move() -> None:
    broken = []
    for keep in (None, False):
        model = tiny.llama()
        oneshot(model, recipe=MagnitudePruningModifier(final_sparsity=0.5, mask_structure="2:4", **REST))
        oneshot(model, recipe=GPTQModifier(config_groups=GROUPS, preserve_sparsity_mask=keep, **REST), dataset=IDS)
        codes = [module.codes() for module in model.modules() if isinstance(module, QuantizedLayer)]
        broken.append(sum(int((one.unflatten(1, (-1, 4)).ne(0).sum(-1) > 2).sum()) for one in codes))
    assert broken[0] == 0 < broken[1]


def test_zeros_may_be_moved_when_that_is_asked_for() -> None:
    recipe = [WandaPruningModifier(sparsity=0.5, **REST), GPTQModifier(config_groups=GROUPS, preserve_sparsity_mask=False, **REST)]
    report = oneshot(tiny.llama(), recipe=recipe, dataset=IDS).report
    assert min(float(record.details["sparsity"]) for record in report.modules.values()) < 0.5
    assert not any("pruned" in record.details for record in report.modules.values())
    assert any(re.search(r"at least [0-9,]+ of the [0-9,]+ weights that were pruned are not zero", note) for note in report.notes)


@pytest.mark.parametrize("structure", ["2:4", "channel", "block_2,4"])
def test_a_structure_that_is_gone_is_noted_though_there_are_as_many_zeros(structure: str) -> None:
    model = tiny.llama()
    session = Session(State(model), [MagnitudePruningModifier(final_sparsity=0.5, mask_structure=structure, **REST)])
    session.initialize()
    session.send(EventType.CALIBRATION_START)
    session.send(EventType.CALIBRATION_END)
    weight = model.model.layers[1].mlp.down_proj.weight.data
    zero, kept = (weight.flatten() == 0).nonzero()[0], weight.flatten().nonzero()[-1]
    weight.view(-1)[zero], weight.view(-1)[kept] = 1.0, 0.0
    session.finalize()
    report = session.state.report
    assert f"{structure}, 50% zeros does not stand in model.layers.1.mlp.down_proj at the end; what came after" in report.notes[0]
    assert {tuple(record.details.items()) for record in report.modules.values()} == {(("sparsity", 0.5),)}


@pytest.mark.parametrize("kind", BOTH)
def test_experts_are_pruned_one_by_one(kind: Any, tmp_path: Path) -> None:
    tiny.qwen3_moe().save_pretrained(tmp_path / "base")
    oneshot(tmp_path / "base", recipe=kind(sparsity=0.5, mask_structure="2:4", **REST), dataset=IDS, output_dir=tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    pruned = [name for name in tensors if name.endswith("_proj.weight")]
    assert len([name for name in pruned if ".experts." in name]) == 24
    assert all(zeros(tensors[name]) == 0.5 for name in pruned)
    Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kind", BOTH)
def test_an_expert_that_no_token_reaches_is_an_error_unless_allowed(kind: Any) -> None:
    def moe() -> Qwen3MoeForCausalLM:
        return tiny.qwen3_moe(num_experts=8, num_experts_per_tok=1)

    with pytest.raises(CalibrationError, match=r"no calibration token reached it; the recipe allows fallback_budget=0"):
        oneshot(moe(), recipe=kind(sparsity=0.5, **REST), dataset=IDS[:1, :2])
    report = oneshot(moe(), recipe=kind(sparsity=0.5, fallback_budget=100, **REST), dataset=IDS[:1, :2]).report
    assert {fallback.kind for fallback in report.fallbacks} == {"no_tokens"} and len(report.fallbacks) >= 12
    assert {record.details["sparsity"] for record in report.modules.values()} == {0.5}


@pytest.mark.parametrize("kind", BOTH)
def test_a_layer_whose_input_was_zero_is_pruned_by_size_if_that_is_allowed(kind: Any) -> None:
    model = tiny.llama()
    model.model.embed_tokens.weight.data.zero_()
    before = {name: weight.clone() for name, weight in linear(model).items()}
    report = oneshot(model, recipe=kind(sparsity=0.5, fallback_budget=100, **REST), dataset=IDS).report
    assert {(one.kind, one.detail) for one in report.fallbacks} == {
        ("dead_input", f"its input was zero, or below 1e-22, on all {IDS.numel()} calibration tokens")
    }
    for name, weight in linear(model).items():
        assert zeros(weight) == 0.5 and before[name][weight == 0].abs().max() <= before[name][weight != 0].abs().min()


WRONG: dict[str, tuple[dict[str, Any], type[CompressorError], str]] = {
    "no share": ({"sparsity": 1.5}, RecipeError, "no share of weights"),
    "nothing": ({"sparsity": 0.0}, RecipeError, "prunes nothing"),
    "everything": ({"sparsity": 1.0}, RecipeError, "prunes nothing or everything"),
    "everything of one layer": ({"sparsity": [0.5, 1.0]}, RecipeError, "prunes nothing or everything"),
    "an empty list": ({"sparsity": []}, RecipeError, "no share"),
    "yaml's number": ({"sparsity": 0.5, "mask_structure": 124}, RecipeError, "YAML reads 2:4"),
    "no structure": ({"sparsity": 0.5, "mask_structure": "4:2"}, RecipeError, "leaves all weights or none"),
    "another share": ({"sparsity": 0.6, "mask_structure": "2:4"}, RecipeError, "give sparsity=0.5"),
    "half of owl": ({"sparsity": 0.5, "sparsity_profile": "owl"}, RecipeError, "needs owl_m and owl_lmbda"),
    "owl of a pattern": (
        {"sparsity": 0.5, "mask_structure": "2:4", "sparsity_profile": "owl", "owl_m": 5, "owl_lmbda": 0.08},
        RecipeError,
        "a pattern fixes the share",
    ),
    "owl of a list": ({"sparsity": [0.5], "sparsity_profile": "owl", "owl_m": 5, "owl_lmbda": 0.08}, RecipeError, "a list gives each"),
    "another profile": ({"sparsity": 0.5, "sparsity_profile": "bat"}, RecipeError, "owl"),
    "training": ({"sparsity": 0.5, "start": 1, "end": 2}, RecipeError, "has no steps"),
    "rows": ({"sparsity": 1 - 3 / 7, "mask_structure": "3:7"}, SchemeError, "do not divide into runs of 7"),
    "no linear": ({"sparsity": 0.5, "targets": ["LlamaRMSNorm"]}, TargetError, "holds no linear layer"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("kind", BOTH)
def test_what_cannot_be_meant_is_refused(kind: Any, what: str) -> None:
    settings, error, said = WRONG[what]
    with pytest.raises(error, match=said):
        oneshot(tiny.llama(), recipe=kind(**{**REST, **settings}), dataset=IDS)


def test_two_modifiers_do_not_prune_one_weight() -> None:
    recipe = [SparseGPTModifier(sparsity=0.5, **REST), WandaPruningModifier(sparsity=0.5, **REST)]
    with pytest.raises(TargetError, match="is set to zero by SparseGPTModifier"):
        oneshot(tiny.llama(), recipe=recipe, dataset=IDS)


def test_what_is_quantized_first_is_not_pruned_afterwards() -> None:
    with pytest.raises(RecipeError, match=r"q_proj is quantized by GPTQModifier\[0\] before it is pruned; let this one stand before"):
        oneshot(tiny.llama(), recipe=[GPTQModifier(config_groups=GROUPS, **REST), SparseGPTModifier(sparsity=0.5, **REST)], dataset=IDS)


def test_the_recipes_of_llm_compressor_are_read() -> None:
    text = """
sparsity_stage:
  run_type: oneshot
  sparsity_modifiers:
    SparseGPTModifier:
      sparsity: 0.5
      mask_structure: "2:4"
      sequential_update: false
      targets: ['re:model.layers.\\d*$']
      ignore: ['re:.*lm_head']
"""
    model = tiny.llama()
    oneshot(model, recipe=load_recipe(text), dataset=IDS)
    assert {zeros(weight) for weight in linear(model).values()} == {0.5}


@pytest.mark.parametrize("kind", BOTH)
def test_a_run_without_calibration_does_not_pass_for_a_pruned_one(kind: Any) -> None:
    model = tiny.llama()
    before = {name: weight.clone() for name, weight in linear(model).items()}
    session = Session(State(model=model), [kind(sparsity=0.5, **REST)])
    session.initialize()
    with pytest.RaisesGroup(pytest.RaisesExc(CalibrationError, match="up_proj.* are not pruned yet; run a calibration first")):
        session.finalize()
    assert all(torch.equal(weight, before[name]) for name, weight in linear(model).items())
