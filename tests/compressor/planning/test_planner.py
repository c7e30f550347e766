"""A plan follows what the run would do: dtype, batch size, engine, memory for activations; and where it cannot know, it says so."""

from __future__ import annotations

import copy
import functools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BartConfig, ViTConfig, WhisperConfig

from compressor.cli.main import main
from compressor.errors import TargetError, UserInputError
from compressor.pipelines import settings as pipeline_settings
from compressor.planning import Plan, plan, planner
from compressor.planning import stages as planning_stages
from compressor.planning.estimate import Estimate, Speed, fit_into, measure_speed
from compressor.planning.show import estimate_lines
from compressor.planning.stages import Setting
from compressor.planning.workload import Batches
from tests import tiny

RECIPE = {"quant_stage": {"quant_modifiers": {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16"}}}}
NO_HEAD = {"quant_stage": {"quant_modifiers": {"GPTQModifier": {"targets": ["Linear"], "scheme": "W4A16"}}}}
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of this file times anything: 1 GFLOP/s, a microsecond for a column."""
    monkeypatch.setattr(planner, "measure_speed", lambda device, dtype: Speed(1e9, 1e9, 1e-6, 1e-9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.config("llama", **SIZES, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return path


def make(folder: Path | nn.Module, **options: Any) -> Plan:
    return made(folder, **options) if isinstance(folder, nn.Module) else planned_once(folder, **options)


def made(folder: Path | nn.Module, **options: Any) -> Plan:
    return plan(folder, recipe=RECIPE, **{"num_calibration_samples": 64, "passes": "two", **options})


planned_once = functools.cache(made)  # of a config that stays as it is


def layer(made: Plan, index: int = 1) -> Any:
    return next(stage for stage in made.estimate.stages if stage.name == f"model.layers.{index}")


def test_more_tokens_than_the_model_takes_are_refused(folder: Path) -> None:
    with pytest.raises(UserInputError, match="max_seq_length: 65 is more than the model takes; give at most 64"):
        make(folder, max_seq_length=65)


def test_statistics_and_activations_are_what_they_must_be(folder: Path) -> None:
    made = make(folder)
    stage = layer(made)
    # 4,096 tokens are shared out; three sums are alive, of 256 columns in two panels.
    assert stage.statistics_bytes == 3 * 4 * (3 * 128**2 + 256**2 - 64 * 192)
    rotary, ids = 2 * 64 * 32 * 2, 64 * 64 * 8
    assert stage.activations_bytes == 64 * 64 * 128 * 2 + rotary + ids
    assert stage.phase == "calibrate"
    assert made.estimate.basis == "one forward followed on shapes"
    assert [one.name for one in made.estimate.stages] == ["trace", *(f"model.layers.{i}" for i in range(3)), "rest", "save"]
    assert made.estimate.journal_bytes == sum(int(module.details["bytes_after"]) for module in made.modules)


def test_in_one_pass_modules_with_one_input_are_a_stage_and_wide_inputs_wait(folder: Path) -> None:
    once = make(folder, passes="one")
    stages = {stage.name: stage for stage in once.estimate.stages}
    parts = (
        "self_attn.q_proj, model.layers.1.self_attn.k_proj, model.layers.1.self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj, model.layers.1.mlp.up_proj",
        "mlp.down_proj",
    )
    assert [name for name in stages if ".1." in name] == [f"model.layers.1.{part}" for part in parts]
    assert once.forwards == "one, and one beside in the uncompressed model"
    one_stream, ids = 64 * 64 * 2, 64 * 64 * 8
    down = stages[f"model.layers.1.{parts[3]}"]
    # The residual stream and the wide input; the uncompressed model's waits before it.
    assert down.activations_bytes == one_stream * (128 + 256 + 128) + ids + 2 * _rotary(once)
    assert down.statistics_bytes == 3 * 4 * (2 * 256**2 - 64 * 192)  # three sums of H, in panels, and of D


@pytest.mark.parametrize(("target", "num_streams"), [("base", 2), ("propagated", 3)])
def test_inputs_that_would_take_more_than_three_streams_wait_for_few_batches(
    folder: Path, tmp_path: Path, target: str, num_streams: int
) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    gptq = {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16", "target": target}}
    made = plan(tmp_path, recipe={"quant_modifiers": gptq}, num_calibration_samples=64, max_seq_length=64, batch_size=8, passes="one")
    down = next(stage for stage in made.estimate.stages if stage.name == "model.layers.1.mlp.down_proj")
    assert down.activations_bytes == 64 * 64 * (num_streams * 2 * 128 + 8) + (1 + (target == "base")) * _rotary(made)


def test_ranks_share_samples_and_solvers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, half, eighth = (layer(make(folder, ranks=ranks)) for ranks in (1, 2, 8))
    assert 3 * half.statistics_bytes == 2 * one.statistics_bytes
    assert 1.5 < one.activations_bytes / half.activations_bytes < 2  # rotary tables are nobody's share
    assert 2 < one.seconds / eighth.seconds < 8  # of seven weights q, k and v are one problem, and gate and up
    one_process = make(folder)
    with pytest.raises(UserInputError, match="ranks: 3 was given, where 1 or 2 or 4 or 8 belongs"):
        make(folder, ranks=3)
    assert main(["plan", str(folder), "--recipe", json.dumps(RECIPE), "--ranks", "2"]) == 0
    assert "of each of 2 ranks" in (said := capsys.readouterr().out) and "times as long" in " ".join(said.split())
    assert make(folder, ranks=2).alone_seconds == one_process.estimate.seconds and one_process.alone_seconds is None


@pytest.mark.parametrize("passes", ["one", "two"])
def test_what_a_gpu_of_a_size_holds_is_told_to_the_byte(folder: Path, passes: str) -> None:
    made = make(folder, device_memory="1GB", passes=passes)
    stages, fit = made.estimate.stages, made.fit
    assert fit is not None and (fit.holds, fit.waiting_bytes) == ("everything", 0)
    needs = {
        "everything": max(stage.peak_bytes for stage in stages),
        "weights": max(stage.peak_bytes - stage.activations_bytes for stage in stages),
        "layer": max(stage.peak_bytes - stage.activations_bytes - stage.away_bytes for stage in stages),
    }
    assert needs["everything"] > needs["weights"] > needs["layer"] > 0
    ways = [*needs, "nothing"]
    for number, (way, needed) in enumerate(needs.items()):
        enough, less = (fit_into(size, made.estimate) for size in (needed, needed - 1))
        assert (enough.holds, less.holds) == (way, ways[number + 1])
        assert enough.needed_bytes == needed
        text = dict(estimate_lines(replace(made, fit=enough)))
        on_gpu = text[f"on a GPU of {needed / 1e6:,.1f} MB (estimate)"]
        assert ("of weights, which until they are compressed are pages of files" in on_gpu) == (way == "layer")
        assert text["time (estimate)"].endswith("on the processor here, for how fast that GPU is nobody has said")
        assert not dict(estimate_lines(replace(made, fit=enough, timed_on="cuda")))["time (estimate)"].endswith("said")
    assert less.needed_bytes == needs["layer"]  # what the last way would need
    waiting = max(stages, key=lambda stage: stage.activations_bytes + stage.away_bytes)
    assert (less.waiting_bytes, less.waiting_weights_bytes) == (waiting.activations_bytes + waiting.away_bytes, waiting.away_bytes)


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("1GB", "on a GPU of 1,000.0 MB (estimate): fits as a whole; at most "),
        ("4MB", "on a GPU of 4.0 MB (estimate): does not fit, not even layer by layer: "),
    ],
)
def test_the_command_says_what_fits(folder: Path, capsys: pytest.CaptureFixture[str], memory: str, said: str) -> None:
    command = ["plan", str(folder), "--recipe", json.dumps(RECIPE), "--num-calibration-samples", "64", "--device-memory", memory]
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert said in text and ("are temporaries; take a smaller --batch-size" in text) == (memory == "4MB")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"]["device_bytes"] == int(memory[:-2]) * 10 ** (9 if "GB" in memory else 6)


def test_what_a_solver_lacks_no_smaller_batch_gives(folder: Path) -> None:
    made_ = make(folder)
    stage = replace(made_.estimate.stages[1], phase="compress", temporaries_bytes=10**9)
    fit = fit_into(1, replace(made_.estimate, stages=[stage]))
    assert dict(estimate_lines(replace(made_, fit=fit)))["on a GPU of 0.0 MB (estimate)"].endswith(
        "or leave its widest modules out (ignore)"
    )


UNWRITABLE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a layer without a quantized form": (
        tiny.config("gpt2", n_embd=128, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"]),
        {"targets": ["Conv1D"], "ignore": ["lm_head"], "scheme": "FP8_DYNAMIC"},
        "no quantized form of Conv1D",
    ),
    "a format for another dtype": (
        tiny.config("llama", **SIZES, dtype="float16", architectures=["LlamaForCausalLM"]),
        {"targets": ["re:.*mlp.*proj"], "scheme": "NVFP4"},
        "the model computes in torch.float16",
    ),
    "nothing": (
        tiny.config("llama", **SIZES, dtype="bfloat16", architectures=["LlamaForCausalLM"]),
        {"targets": ["re:.*mlp.*proj"], "scheme": "NVFP4"},
        "",
    ),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_a_plan_says_what_would_be_refused_for_its_checkpoint(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, settings, said = UNWRITABLE[name]
    config.save_pretrained(tmp_path)
    recipe = {"q_modifiers": {"QuantizationModifier": settings}}
    command = ["plan", str(tmp_path), "--recipe", json.dumps(recipe), "--num-calibration-samples", "4", "--max-seq-length", "8"]
    assert main(command) == bool(said)
    shown = " ".join(capsys.readouterr().out.split())
    assert ("no checkpoint of this can be written: " in shown) == bool(said) and said in shown
    assert main([*command, "--json"]) == bool(said)
    found = json.loads(capsys.readouterr().out)["unwritable"]
    assert found is None if not said else said in found


def test_on_a_gpu_the_next_layer_and_what_lies_beside_them_are_at_hand(folder: Path) -> None:
    here, there = (layer(make(folder, **options), 0) for options in ({}, {"device_memory": "1GB"}))
    assert there.weights_bytes - there.away_bytes > 2 * (here.weights_bytes - here.away_bytes)


def test_a_gpu_without_memory_is_none(folder: Path) -> None:
    with pytest.raises(UserInputError, match="device_memory: '0GB' holds nothing; give the memory of a GPU"):
        make(folder, device_memory="0GB")


def test_experts_too_many_for_one_stage_are_planned_one_by_one_as_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_settings, "HESSIAN_BYTES", 0)
    sizes = SIZES | {"num_experts": 4, "moe_intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1}
    tiny.config("qwen3_moe", **sizes, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"]).save_pretrained(tmp_path)
    made = make(tmp_path, passes="auto")
    assert made.forwards == "two"
    assert [f"model.layers.0.mlp.experts.{number}" for number in range(4)] == [
        name for name in made.sequential_targets if "experts" in name
    ]


@pytest.mark.nightly
def test_a_plan_grows_with_the_model_and_not_with_its_square(tmp_path: Path) -> None:
    """DeepSeek-V3 has 45,000 linear layers: what looked at all pairs of names took hours."""

    seconds = []
    for experts in (64, 256):
        sizes = SIZES | {"num_experts": experts, "moe_intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32}
        tiny.config("qwen3_moe", **sizes, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"]).save_pretrained(tmp_path / str(experts))
        start = time.process_time()
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(pipeline_settings, "HESSIAN_BYTES", 0)  # every expert is a stage
            made = make(tmp_path / str(experts))
        seconds.append(time.process_time() - start)
        assert len(made.sequential_targets) > 3 * experts
    assert seconds[1] < 10 * seconds[0]


def _rotary(made: Plan) -> int:
    """Cosines and sines wait once for all samples; behind the last attention nobody reads them."""
    names = [stage.name for stage in made.estimate.stages]
    return 2 * 64 * 32 * 2 if any(".2." in name for name in names) else 0


def test_without_the_base_stream_a_run_in_one_pass_holds_less_and_computes_half(folder: Path) -> None:
    propagated = {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16", "target": "propagated"}}
    plain = plan(folder, recipe={"quant_stage": {"quant_modifiers": propagated}}, num_calibration_samples=64, passes="one")
    beside, twice = make(folder, passes="one"), make(folder)
    assert plain.forwards == "one"
    assert plain.estimate.seconds < 0.7 * beside.estimate.seconds
    assert plain.estimate.seconds < twice.estimate.seconds
    assert plain.estimate.peak_extra_bytes < 0.8 * beside.estimate.peak_extra_bytes


@pytest.fixture
def by_layers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Estimate, Estimate]:
    """The estimates of three layers and of twelve, of models that are too large to be copied while they are traced."""
    monkeypatch.setattr(planning_stages, "COPIED_BYTES", 0)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 12}), encoding="utf-8")
    return made(folder).estimate, made(tmp_path).estimate


def test_where_layers_come_one_by_one_more_of_them_need_no_more_memory(folder: Path, by_layers: tuple[Estimate, Estimate]) -> None:
    few, many = by_layers
    assert many.peak_bytes > few.peak_bytes + 8 * 200_000
    assert many.peak_by_layers_bytes == few.peak_by_layers_bytes < few.peak_bytes
    held = make(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))).estimate
    assert held.peak_by_layers_bytes == held.peak_bytes


def test_a_model_that_is_copied_while_it_is_traced_counts_twice_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make(folder).estimate
    monkeypatch.setattr(planning_stages, "COPIED_BYTES", small.model_bytes - 1)
    large = made(folder).estimate
    assert small.stages[0].peak_bytes == large.stages[0].peak_bytes + small.model_bytes
    assert [stage.peak_bytes for stage in small.stages[1:]] == [stage.peak_bytes for stage in large.stages[1:]]


def test_the_head_takes_turns_with_the_layers_but_on_a_gpu() -> None:
    common = {
        "in_frames": False,
        "memory_bytes": None,
        "batches": Batches.of(4, 8, 1, torch.device("cpu")),
        "speed": Speed(1.0, 1.0, 0.0, 0.0),
    }
    setting = Setting(100, keeps_float=True, num_ahead=0, stretches={"layers.0": 10, "layers.1": 20}, **common)
    assert [setting.at_hand(stage) for stage in ("trace", "layers.0.q_proj", "layers.1")] == [70, 10, 20]
    ahead = replace(setting, num_ahead=1)
    assert [ahead.at_hand(stage) for stage in ("trace", "layers.0.q_proj", "layers.1")] == [110, 100, 110]


def test_training_behind_the_stages_is_counted(folder: Path) -> None:
    def flops(**tuning: int) -> float:
        recipe = {**RECIPE["quant_stage"]["quant_modifiers"], "ScaleTuningModifier": tuning}
        made = plan(folder, recipe=recipe, num_calibration_samples=64)
        found = [stage for stage in made.estimate.stages if stage.name == "ScaleTuningModifier[1]"]
        assert [stage.name for stage in made.estimate.stages][-2:] == ["ScaleTuningModifier[1]", "save"]
        return found[0].flops

    forwards = [64 + 9 * 8 + 3 * 8 * steps for steps in (64, 128)]
    assert flops(steps=128) / flops(steps=64) == pytest.approx(forwards[1] / forwards[0])


def test_the_number_of_layers_does_not_matter_beyond_the_weights(by_layers: tuple[Estimate, Estimate]) -> None:
    few, many = by_layers
    assert many.worst.peak_bytes - many.worst.weights_bytes == few.worst.peak_bytes - few.worst.weights_bytes


def test_options_show(folder: Path) -> None:
    plain, more = make(folder, batch_size=8), make(folder, num_calibration_samples=128).estimate
    assert make(folder, dtype="float32").estimate.model_bytes == pytest.approx(2 * plain.estimate.model_bytes, rel=1e-3)
    assert layer(make(folder, engine="suspend")).activations_bytes > layer(plain).activations_bytes
    assert more.seconds > plain.estimate.seconds and more.peak_bytes > plain.estimate.peak_bytes
    small, large = make(folder, batch_size=1), make(folder, batch_size=64)
    assert small.estimate.stages[0].temporaries_bytes < large.estimate.stages[0].temporaries_bytes
    granted = make(folder, batch_size=8, activation_memory="200kB", offload_dir=folder).estimate
    assert granted.offload_bytes == layer(plain).activations_bytes - 64 * 64 * 8 - 200_000
    assert granted.peak_bytes < plain.estimate.peak_bytes and plain.estimate.offload_bytes == 0
    with pytest.raises(UserInputError, match="activation_memory: 'x' is no size"):
        make(folder, activation_memory="x")
    with pytest.raises(UserInputError, match=f"activation_memory: '200kB' was given, and about {granted.offload_bytes:,} bytes more"):
        make(folder, batch_size=8, activation_memory="200kB")
    assert make(folder, batch_size=8, activation_memory="200kB", device_memory="1GB").estimate.offload_bytes > 0  # a GPU takes a part


def test_a_model_in_memory_is_planned_without_a_copy_of_its_weights(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).bfloat16()
    before = copy.deepcopy(model.state_dict())
    made = make(model)
    assert made.estimate.model_bytes == pytest.approx(make(folder).estimate.model_bytes, rel=1e-3)
    assert layer(made).statistics_bytes == layer(make(folder)).statistics_bytes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Asking(nn.Module):
    """Its forward looks at what its weights make."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 128)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.layers:
            x = block(x) if float(x.sum()) > 0 else x
        return x


def test_what_cannot_be_followed_is_guessed_and_said(folder: Path) -> None:
    made = plan(Asking(), recipe=NO_HEAD, num_calibration_samples=8, max_seq_length=32, sequential_targets=["Sequential"])
    assert made.estimate.basis.startswith("a guess from the shapes of the weights")
    stage = next(stage for stage in made.estimate.stages if stage.name == "layers.1")
    assert stage.statistics_bytes == 4 * 512**2  # the wider solve is the worst moment
    assert stage.activations_bytes == 8 * 32 * (128 * 4 + 8)


WIDE = {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 512}
SOUND = {"max_source_positions": 100, "max_target_positions": 64, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
PICTURES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "image_size": 32}


@pytest.mark.parametrize(
    ("config", "model_class", "inputs"),
    [
        (BartConfig(d_model=128, **WIDE), "AutoModelForSeq2SeqLM", "input_ids (8, 16), decoder_input_ids (8, 16)"),
        (
            WhisperConfig(d_model=128, decoder_start_token_id=1, **WIDE, **SOUND),
            "AutoModelForSpeechSeq2Seq",
            "input_features (8, 80, 200), decoder_input_ids (8, 8)",
        ),
        (ViTConfig(**PICTURES, patch_size=8), "AutoModelForImageClassification", "pixel_values (8, 3, 32, 32)"),
    ],
)
def test_models_that_read_more_than_token_ids_are_followed(config: Any, model_class: str, inputs: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    recipe = {"quant_modifiers": {"GPTQModifier": {"targets": ["re:.*fc[12]"], "scheme": "W4A16"}}}
    made = plan(tmp_path, recipe=recipe, num_calibration_samples=8, max_seq_length=16, model_class=model_class)
    assert made.estimate.basis == f"one forward followed on shapes: {inputs}"
    assert all(stage.temporaries_bytes > 0 for stage in made.estimate.stages if stage.name != "save")


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_model_without_a_stack_of_layers_is_one_stage(num_layers: int, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    names = [stage.name for stage in make(tmp_path).estimate.stages]
    assert names == (["the model", "save"] if num_layers == 1 else ["trace", "model.layers.0", "model.layers.1", "rest", "save"])


def test_without_data_only_weights_and_rounding_count(folder: Path) -> None:
    recipe = {
        "quant_stage": {
            "quant_modifiers": {"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "FP8_DYNAMIC"}}
        }
    }
    made = plan(folder, recipe=recipe)
    assert [stage.name for stage in made.estimate.stages] == ["compress", "save"]
    assert made.estimate.stages[0].statistics_bytes == made.estimate.journal_bytes == 0


@pytest.mark.parametrize("setting", [{"scheme": "FP8"}, {"scheme": "W4A16", "weight_observer": "imatrix_mse"}])
def test_what_calibrates_in_one_go_keeps_what_it_made_until_the_end_too(folder: Path, setting: dict[str, str]) -> None:
    made = plan(folder, recipe={"QuantizationModifier": {"ignore": ["lm_head"], **setting}})
    assert made.pipeline == "basic"
    assert made.estimate.journal_bytes == sum(int(module.details["bytes_after"]) for module in made.modules) > 0


def test_the_command_prints_stages_and_takes_the_options_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(folder), "--recipe", json.dumps(RECIPE), "--num-calibration-samples", "63", "--device", "cpu"]
    granted = ["--activation-memory", "100kB", "--offload-dir", str(folder)]
    assert main([*command, "--batch-size", "4", "--passes", "two", "--dtype", "float32", *granted]) == 0
    printed = capsys.readouterr().out
    for words in (
        "Peak memory by stage",
        "model.layers.2",
        "propagate",
        "forwards per layer: two",
        "with weights of one layer at a time",
        "disk for activations (estimate)",
        "GFLOP/s",
        "one forward followed on shapes",
    ):
        assert words in printed
    assert main([*command, "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)["estimate"]
    assert estimate["peak_bytes"] == max(stage["peak_bytes"] for stage in estimate["stages"])
    assert {"checkpoint_bytes", "journal_bytes", "seconds", "flops_per_second", "process_bytes"} <= estimate.keys()


def test_speed_is_timed_on_this_machine() -> None:
    speed = measure_speed(torch.device("cpu"), torch.bfloat16)
    assert speed.flops > 1e6 and speed.model_flops > 1e6
    assert 0 < speed.column_seconds < 10 and 0 <= speed.rounding_seconds < 1


def test_a_weight_may_be_pruned_and_quantized_and_the_plan_says_both() -> None:
    pruner = {"MagnitudePruningModifier": {"final_sparsity": 0.5, "mask_structure": "2:4"}}
    channels = {"group": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}
    quantizer = {"QuantizationModifier": {"config_groups": channels}}
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 4))
    for modifiers in ({**pruner, **quantizer}, {**quantizer, **pruner}):
        made = plan(model, recipe={"a_stage": {"a_modifiers": modifiers}})
        schemes = {module.name: module.scheme for module in made.modules}
        assert all("2:4, 50% zeros" in scheme and "int8 channel" in scheme for scheme in schemes.values()) and set(schemes) == {"0", "1"}
        assert made.modules[0].details["bytes_after"] < made.modules[0].details["bytes_before"]
    with pytest.raises(TargetError, match="0, one of 2, is set to zero by"):
        plan(model, recipe={f"{stage}_stage": {"a_modifiers": pruner} for stage in "ab"})
    alone = plan(model, recipe={"a_stage": {"a_modifiers": pruner}})
    assert [module.details["bytes_after"] for module in alone.modules] == [32 * 8 * 4, 8 * 4 * 4]
