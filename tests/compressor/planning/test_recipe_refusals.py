"""What recipe and config alone rule out, a plan refuses as a run does, in the same words; and it changes nothing by looking."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import PrivateAttr
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from compressor import GPTQModifier, QuantizationModifier, oneshot
from compressor.cli.main import main
from compressor.console import Console
from compressor.errors import CompressorError, LifecycleError
from compressor.lifecycle import Flags, Modifier, State
from compressor.modifiers.pruning.magnitude import ConstantPruningModifier
from compressor.modifiers.pruning.reap import REAPPruningModifier
from compressor.modifiers.pruning.sparsegpt import SparseGPTModifier
from compressor.modifiers.pruning.wanda import WandaPruningModifier
from compressor.modifiers.transforms.quip import QuIPModifier
from compressor.modifiers.transforms.spinquant import SpinQuantModifier
from compressor.planning import plan, planner
from compressor.planning.estimate import Speed
from compressor.planning.show import show_plan
from tests import tiny

LEAVING = """
import sys
from compressor import Modifier

class Leaving(Modifier):
    def on_initialize(self, state):
        sys.exit(0)
"""


def test_a_modifier_that_ends_the_process_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "leaving_modifier.py").write_text(LEAVING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    model, out = str(Path(__file__).parents[3] / "golden" / "reference"), str(tmp_path / "out")
    recipe = "quant_stage:\n  quant_modifiers:\n    'leaving_modifier:Leaving': {}\n"
    assert main(["oneshot", model, "--recipe", recipe, "--output-dir", out, "--pipeline", "data_free"]) == 1
    assert "code that it ran called sys.exit(0); take that out" in capsys.readouterr().err and not Path(out).exists()


IDS = [torch.arange(8)[None] + shift for shift in range(2)]
REST = {"ignore": ["lm_head"]}
INTS = {"scheme": "W8A8", **REST}
GPTQ = {"GPTQModifier": INTS}
PER_HEAD = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}
SHARES = {"sparsity": [0.5], **REST}


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of this file times anything: 1 GFLOP/s, a microsecond for a column."""
    monkeypatch.setattr(planner, "measure_speed", lambda device, dtype: Speed(1e9, 1e9, 1e-6, 1e-9))


def deepseek() -> nn.Module:
    """A mixture whose router divides its experts into groups, with latent attention: keys enter the cache with one head for all."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **experts, q_lora_rank=16, kv_lora_rank=16)).eval()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "scales of nothing": (tiny.llama, {"ScaleTuningModifier": {}}, "no scales can be trained"),
    "scales of what comes later": (tiny.llama, {"ScaleTuningModifier": {}, **GPTQ}, "let it stand last"),
    "AWQ alone": (tiny.llama, {"AWQModifier": {}}, "no modifier behind it quantizes weights"),
    "nothing to narrow": (tiny.llama, {"AWQModifier": {"clip": True}, **GPTQ}, "clip: True was given"),
    "a share for SparseGPT": (tiny.llama, {"SparseGPTModifier": SHARES}, "sparsity lists 1 shares"),
    "a share for Wanda": (tiny.llama, {"WandaPruningModifier": SHARES}, "sparsity lists 1 shares"),
    "too few experts": (tiny.qwen3_moe, {"REAPPruningModifier": {"sparsity": 0.9}}, r"\(num_experts_per_tok is 2\)"),
    "heads of latent attention": (deepseek, {"QuantizationModifier": PER_HEAD}, "has 1 heads, and readers count 4 by its config"),
    "heads beside weights": (deepseek, {"QuantizationModifier": {**INTS, **PER_HEAD}}, "has 1 heads, and readers count 4 by its config"),
    "experts too late": (tiny.qwen3_moe, {**GPTQ, "REAPPruningModifier": {"sparsity": 0.5}}, "let it stand first"),
    "smoothed too late": (tiny.llama, {**GPTQ, "SmoothQuantModifier": {}}, "is quantized by a modifier before it"),
    "turned too late": (tiny.llama, {**GPTQ, "SpinQuantModifier": {}}, "is quantized by a modifier before it"),
    "pruned too late": (tiny.llama, {**GPTQ, "SparseGPTModifier": {"sparsity": 0.5, **REST}}, "before it is pruned"),
    "zeros turned": (tiny.llama, {"MagnitudePruningModifier": {"final_sparsity": 0.5, **REST}, "QuIPModifier": {}}, "would fill"),
    "blocks of R1": (tiny.llama, {"SpinQuantModifier": {"transform_block_size": 7}}, "does not divide"),
    "learned from nothing": (tiny.llama, {"SpinQuantModifier": {"learnable": True}}, "no modifier behind it quantizes weights"),
    "a schedule": (
        tiny.llama,
        {"MagnitudePruningModifier": {"final_sparsity": 0.5, "start": 0, "end": 4}},
        "count the steps of a training",
    ),
    "a step of what takes none": (tiny.llama, {"GPTQModifier": {**INTS, "start": 3}}, r"start=3\.0 is for training"),
    "zeros kept, and nothing else": (tiny.llama, {"ConstantPruningModifier": {"start": 2.0}}, "would leave every tensor"),
    "turned twice": (tiny.llama, {"SpinQuantModifier": {"rotations": ["R4"]}, "QuIPModifier": {}}, "is turned by R4 already"),
    "R4 of what is turned": (tiny.llama, {"QuIPModifier": {}, "SpinQuantModifier": {"rotations": ["R4"]}}, "is turned by v already"),
    "smoothed behind rotations": (
        tiny.llama,
        {"QuIPModifier": {}, "SmoothQuantModifier": {}, **GPTQ},
        "put this modifier in front",
    ),
    "turned behind rotations": (
        tiny.llama,
        {"QuIPModifier": {}, "SpinQuantModifier": {}},
        r"the input of .*; put this modifier",
    ),
    "turned behind outputs": (
        tiny.llama,
        {"QuIPModifier": {"rotations": ["u"]}, "SpinQuantModifier": {}},
        r"the output of .* is turned in every forward already \(u\)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_refuses_what_a_run_refuses_in_its_words(what: str) -> None:
    make, modifiers, said = REFUSED[what]
    recipe = {"q_stage": {"q_modifiers": modifiers}}
    with pytest.raises(CompressorError, match=said) as planned:
        plan(make(), recipe=recipe)
    with pytest.raises(CompressorError) as run:
        oneshot(make(), recipe=recipe, dataset=IDS)
    assert (type(planned.value), str(planned.value)) == (type(run.value), str(run.value))


STATIC = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}}, **REST}
DATA_FREE = {"QuantizationModifier": INTS}
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an engine for whole forwards": ({"engine": "suspend", "pipeline": "basic"}, GPTQ, "the basic pipeline traces nothing"),
    "passes without data": ({"passes": "two"}, DATA_FREE, "the data_free pipeline traces nothing"),
    "targets without data": ({"sequential_targets": ["LlamaDecoderLayer"]}, DATA_FREE, "the data_free pipeline has none"),
    "memory without data": ({"activation_memory": "1GB"}, DATA_FREE, "the data_free pipeline traces nothing"),
    "memory for paused forwards": ({"activation_memory": "1GB", "engine": "suspend"}, GPTQ, "the suspend engine keeps activations"),
    "a folder for paused forwards": ({"offload_dir": ".", "engine": "suspend"}, GPTQ, "the suspend engine keeps activations"),
    "no sample": ({"num_calibration_samples": 0}, GPTQ, "num_calibration_samples: 0 is not positive"),
    "no sequence": ({"batch_size": 0}, GPTQ, "batch_size: 0 is not positive"),
}


@pytest.mark.parametrize("what", CHOICES)
def test_a_plan_refuses_the_choices_that_a_run_refuses(what: str) -> None:
    choices, modifiers, said = CHOICES[what]
    recipe = {"q_stage": {"q_modifiers": modifiers}}
    with pytest.raises(CompressorError, match=said) as planned:
        plan(tiny.llama(), recipe=recipe, **choices)
    with pytest.raises(CompressorError) as run:
        oneshot(tiny.llama(), recipe=recipe, dataset=IDS, **choices)
    assert (type(planned.value), str(planned.value)) == (type(run.value), str(run.value))


def test_a_plan_refuses_a_recipe_of_another_run_a_used_modifier_and_ranks_that_cannot_share() -> None:
    class Alone(GPTQModifier):
        across_ranks = None

    used = GPTQModifier(**INTS)
    oneshot(tiny.llama(), recipe=used, dataset=IDS)
    training = {"q_stage": {"run_type": "train", "q_modifiers": GPTQ}}
    for recipe, ranks, said in ((used, 1, "used in an earlier run"), (Alone(**INTS), 2, "2 ranks cannot share"), (training, 1, "run_type")):
        with pytest.raises(CompressorError, match=said):
            plan(tiny.llama(), recipe=recipe, ranks=ranks)
    assert plan(tiny.llama(), recipe=Alone(**INTS)).modules


def test_a_plan_says_when_routers_find_too_few_experts_in_a_group() -> None:
    left = "no forward can be followed on shapes of what is left"
    for behind in (dict[str, Any](), DATA_FREE):  # with weights alone behind it no data flows
        few, enough = ({"q_modifiers": {"REAPPruningModifier": {"sparsity": share}, **behind}} for share in (0.75, 0.5))
        assert any(left in note for note in plan(deepseek(), recipe=few).notes)
        assert not any(left in note for note in plan(deepseek(), recipe=enough).notes)
    with pytest.raises(CompressorError, match="its routers cannot choose among 2 of 8 experts"):
        oneshot(deepseek(), recipe=few, dataset=IDS)


def test_what_only_a_forward_shows_is_said_by_a_plan() -> None:
    said = [plan(tiny.llama(), recipe={"q_modifiers": {name: {}, **GPTQ}}).notes for name in ("SpinQuantModifier", "AWQModifier")]
    assert said == [
        ("SpinQuantModifier[0]: what R1 and R2 turn shows in a forward of the weights, so that a run may refuse it",),
        ("AWQModifier[0]: which scales may move shows in a forward of the weights, so that a run may refuse it",),
    ]
    assert plan(tiny.llama(), recipe={"q_modifiers": GPTQ}).notes == ()


TIMES: list[dict[str, float]] = [{"start": 0.0}, {"start": 2.0}, {"end": 1.0}, {"update": 1.0}, {"start": 0.0, "end": 4.0}]


@pytest.mark.parametrize("times", TIMES, ids=str)
@pytest.mark.parametrize("kind", [ConstantPruningModifier, QuantizationModifier])
def test_steps_that_a_run_does_not_count_are_noted_by_plan_and_run_and_change_nothing(
    kind: type[Modifier], times: dict[str, float]
) -> None:
    if kind is QuantizationModifier:
        times = {"start": 0.0, **times}
    first = {"SmoothQuantModifier": {}} if kind is QuantizationModifier else {"MagnitudePruningModifier": {"final_sparsity": 0.5, **REST}}
    own, behind = (REST, {"QuantizationModifier": STATIC}) if kind is ConstantPruningModifier else (STATIC, {})
    recipe, plain = ({"q_stage": {"q_modifiers": {**first, kind.__name__: {**own, **given}, **behind}}} for given in (times, {}))
    note, *_ = plan(tiny.llama(), recipe=recipe).notes
    given = ", ".join(f"{name}={value}" for name, value in times.items())
    assert note == f"{kind.__name__}[1]: {given} {'count' if len(times) > 1 else 'counts'} in a training, and here there is none"
    ours, theirs = (oneshot(tiny.llama(), recipe=one, dataset=IDS) for one in (recipe, plain))
    assert ours.report.notes == [note, *theirs.report.notes]
    left, right = ours.model.state_dict(), theirs.model.state_dict()
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_the_base_stream_is_none_for_the_engine_that_was_asked_for() -> None:
    recipe = [GPTQModifier(target="base", **INTS)]
    with pytest.raises(CompressorError, match="which the suspend engine cannot") as planned:
        plan(tiny.llama(), recipe=recipe, engine="suspend")
    with pytest.raises(CompressorError) as run:
        oneshot(tiny.llama(), recipe=recipe, dataset=IDS, engine="suspend")
    assert str(planned.value) == str(run.value)
    assert plan(tiny.llama(), recipe=[GPTQModifier(target="base", **INTS)]).modules


def test_the_command_ends_with_1_and_shows_what_no_checkpoint_could_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.gpt2().config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--recipe", json.dumps({"q_modifiers": {"AWQModifier": {}}})]) == 1
    assert "compressor plan: error: AWQModifier[0]: no modifier behind it quantizes weights" in capsys.readouterr().err
    conv = {"q_modifiers": {"GPTQModifier": {"targets": ["Conv1D"], "scheme": "W8A8"}}}
    assert main(["plan", str(tmp_path), "--recipe", json.dumps(conv), "--num-calibration-samples", "4"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "no checkpoint of this can be written: " in shown and "has no quantized form of Conv1D" in shown


LEGAL: dict[str, list[Modifier]] = {
    "zeros of a pass of its own": [GPTQModifier(**INTS), WandaPruningModifier(sparsity=0.5, **REST)],
    "two sides of one layer": [SpinQuantModifier(rotations=["R1", "R4"]), QuIPModifier(rotations=["u"]), GPTQModifier(**INTS)],
}


@pytest.mark.parametrize("what", LEGAL)
def test_what_a_run_takes_is_planned(what: str) -> None:
    made = plan(tiny.llama(), recipe=copy.deepcopy(LEGAL[what]))
    assert made.modules and made.untried is None
    assert oneshot(tiny.llama(), recipe=copy.deepcopy(LEGAL[what]), dataset=IDS).report.modules


def test_model_and_modifiers_are_as_they_were() -> None:
    class Hooking(Modifier):
        _seen: dict[str, int] = PrivateAttr(default_factory=dict)

        def on_initialize(self, state: State) -> bool:
            self._seen["times"] = 1
            self.register_hook(state.model.get_submodule("lm_head"), lambda *args: None, "forward")
            state.replace_module("model.norm", torch.nn.Identity())
            return True

    model = tiny.qwen3_moe()
    before, weights = dict(model.named_modules()), {key: value.clone() for key, value in model.state_dict().items()}
    recipe = [REAPPruningModifier(sparsity=0.5), SparseGPTModifier(sparsity=0.5, **REST), QuantizationModifier(**INTS), Hooking()]
    made = plan(model, recipe=recipe)
    assert made.untried is None and all(module.modifier != "Hooking" for module in made.modules)
    assert dict(model.named_modules()) == before and not model.lm_head._forward_hooks and model.config.num_experts == 4
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(one.flags == Flags() and not one.hooked_modules() for one in recipe) and recipe[-1]._seen == {}


def test_a_modifier_that_asks_for_values_is_planned_and_that_is_said() -> None:
    class Looking(Modifier):
        def on_initialize(self, state: State) -> bool:
            return bool(state.model.lm_head.weight.any())

    class Unwilling(Modifier):
        def on_initialize(self, state: State) -> bool:
            return False

    made = plan(tiny.llama(), recipe=[Looking(), QuantizationModifier(**INTS)])
    assert made.modules and made.untried is not None and made.to_dict()["untried"] == made.untried
    assert made.untried.startswith("Looking[0] asks for more than shapes when it is initialized (")
    show_plan(made, Console(file=(text := io.StringIO()), width=400))
    assert f"not all of the recipe was held against the model: {made.untried}" in text.getvalue()
    with pytest.raises(LifecycleError, match=r"Unwilling\[0\]: on_initialize\(\) returned False"):
        plan(tiny.llama(), recipe=[Unwilling(), QuantizationModifier(**INTS)])


def test_one_that_takes_modules_out_without_saying_how_is_said_too() -> None:
    class Dropping(Modifier):
        reshapes = True

        def on_initialize(self, state: State) -> bool:
            raise AssertionError("no plan has the data that it looks at")

    made = plan(tiny.llama(), recipe=[Dropping(), QuantizationModifier(**INTS)])
    assert made.untried == "Dropping[0] changes the modules of the model, and has no method reshape that says how"
