"""Every verb and every flag of `compressor` changes what it says it changes."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compressor import oneshot
from compressor.cli.main import main
from compressor.recipe import load_recipe

GPTQ = "quant_stage: {quant_modifiers: {GPTQModifier: {scheme: W4A16, ignore: [lm_head]}}}"
SMOOTHED = "quant_stage: {quant_modifiers: {SmoothQuantModifier: {}, QuantizationModifier: {scheme: W8A8, ignore: [lm_head]}}}"
ROUND = "quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: '${scheme}', ignore: [lm_head]}}}"


class Runner:
    """Runs `compressor oneshot` on the tiny model and returns the JSON it prints."""

    def __init__(self, model: Path, tokens: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.tokens, self.folder, self.capsys = model, tokens, folder, capsys
        self.count = 0

    def __call__(self, *flags: str, recipe: str = GPTQ, dataset: Path | None = None, quiet: bool = True) -> dict[str, Any]:
        self.count += 1
        self.out = self.folder / f"out{self.count}"
        arguments = [
            "oneshot",
            str(self.model),
            "--recipe",
            recipe,
            "--dataset",
            str(dataset or self.tokens),
            "--output-dir",
            str(self.out),
        ]
        code = main([*arguments, "--json", *(["--quiet"] if quiet else []), *flags])
        captured = self.capsys.readouterr()
        assert code == 0, captured.err
        self.err = captured.err
        return dict(json.loads(captured.out))

    def digest(self) -> str:
        return hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def run(llama_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(llama_dir, tokens_file, tmp_path, capsys)


def test_the_amount_of_data_follows_the_flags(run: Runner) -> None:
    assert run()["data"]["num_tokens"] == 16 * 48
    few = run("--num-calibration-samples", "4", "--max-seq-length", "10")["data"]
    assert (few["num_samples"], few["num_tokens"]) == (4, 40)


def test_pipeline_and_sequential_targets(run: Runner) -> None:
    assert run()["pipeline"] == "sequential"
    layers = run.digest()
    assert run("--pipeline", "basic")["pipeline"] == "basic"
    assert run.digest() != layers
    run("--sequential-targets", "LlamaMLP", "LlamaAttention")
    assert run.digest() != layers


def test_shuffle_and_seed_choose_the_data(run: Runner) -> None:
    first, shuffled = (run("--num-calibration-samples", "4", *flags) for flags in ((), ("--shuffle", "--seed", "1")))
    assert first["data"]["sha256"] != shuffled["data"]["sha256"] and shuffled["seed"] == 1


def test_equal_seeds_choose_equal_data_and_other_seeds_other(run: Runner) -> None:
    flags = ("--num-calibration-samples", "4", "--shuffle", "--seed")
    one, again, other = (run(*flags, seed)["data"]["sha256"] for seed in ("1", "1", "2"))
    assert one == again != other


def test_text_column_and_batch_size(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"body": "a b c d e f g h"}\n{"body": "h i j"}\n')
    one = run("--text-column", "body", dataset=path)
    assert one["data"]["num_tokens"] == 11
    padded = run("--text-column", "body", "--batch-size", "2", dataset=path)
    assert padded["data"]["num_tokens"] == 11
    assert padded["modules"]["model.layers.0.mlp.down_proj"]["num_tokens"] == 11


def test_dtype_is_what_scales_are_stored_in(run: Runner) -> None:
    run("--dtype", "float32")
    with safe_open(run.out / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("model.layers.0.mlp.up_proj.weight_scale").dtype == torch.float32


def test_recipe_arguments_are_substituted(run: Runner) -> None:
    record = run("--recipe-arg", "scheme=W8A16", recipe=ROUND)
    assert record["modules"]["model.layers.0.mlp.up_proj"]["scheme"] == "int8 group 128"
    assert "W8A16" in record["recipe"]


def test_model_class_and_device_are_checked(run: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["oneshot", str(run.model), "--recipe", GPTQ, "--dataset", str(run.tokens), "--output-dir", str(tmp_path / "o"), "--quiet"]
    assert main([*common, "--model-class", "AutoModelForCausalLLM"]) == 1
    assert "AutoModelForCausalLM" in capsys.readouterr().err
    assert main([*common, "--device", "gpu"]) == 1
    assert "'gpu' cannot be used here (torch knows no such device); use auto" in capsys.readouterr().err
    assert run("--model-class", "LlamaForCausalLM", "--device", "cpu")["pipeline"] == "sequential"


def test_code_in_the_folder_runs_only_when_trusted(run: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    config = json.loads((run.model / "config.json").read_text())
    config |= {"model_type": "own_llama", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((run.model / "model.safetensors").read_bytes())
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    run.model = folder
    arguments = ["oneshot", str(folder), "--recipe", GPTQ, "--dataset", str(run.tokens), "--output-dir", str(tmp_path / "o"), "--quiet"]
    assert main(arguments) == 1
    assert "trust_remote_code" in capsys.readouterr().err
    assert len(run("--trust-remote-code")["modules"]) == 14


def test_bars_go_to_standard_error_and_quiet_hides_them(run: Runner) -> None:
    run(quiet=False)
    assert "calibrate" in run.err
    run()
    assert run.err == ""


def test_stages_say_their_error_speed_and_memory(run: Runner) -> None:
    record = run(quiet=False)
    stages = record["stages"]
    assert [phase["name"] for phase in record["phases"]] == ["load", "data", "compress", "save"]
    assert record["seconds"] == {phase["name"]: phase["seconds"] for phase in record["phases"]}
    assert max(stage["error"] for stage in stages) == max(module["error"] for module in record["modules"].values())
    assert all(stage["tokens_per_second"] > 0 and stage["host_peak_bytes"] > 1e6 for stage in stages)
    assert sum(stage["seconds"] for stage in stages) < record["seconds"]["compress"]
    last = stages[-1]
    assert f"stage {len(stages)} of {len(stages)}, error up to {last['error']:.2g}, " in run.err
    assert run.err.rstrip().endswith(last["name"])


@pytest.mark.parametrize("pipeline", ["basic", "data_free"])
def test_pipelines_of_one_stage_say_theirs_too(run: Runner, pipeline: str) -> None:
    recipe = ROUND.replace("${scheme}", "W8A16")
    (stage,) = run("--pipeline", pipeline, recipe=recipe)["stages"]
    assert stage["name"] == "all layers" and stage["error"] > 0
    assert (stage["tokens_per_second"] is None) == (pipeline == "data_free")


def test_verbose_logs_phases_and_stages_and_twice_every_module(run: Runner) -> None:
    stages = run("--verbose")["stages"]
    lines = run.err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d INFO ", line) for line in lines)
    assert len(lines) == 4 + len(stages)  # phases
    modules = run("-vv")["modules"]
    assert run.err.count(" DEBUG ") == len(modules)
    assert "model.layers.0.mlp.up_proj: relative error " in run.err


def test_the_library_logs_through_logging(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="compressor"):
        oneshot(run.model, recipe=ROUND, recipe_args={"scheme": "W8A16"}, pipeline="data_free")
    assert [record.levelname for record in caplog.records] == ["INFO"] * 5  # four phases, one stage
    assert "stage 1 of 1" in caplog.text


def test_the_table_names_modules_and_the_checkpoint(run: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table"
    assert main(["oneshot", str(run.model), "--recipe", GPTQ, "--dataset", str(run.tokens), "--output-dir", str(out), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "14 modules compressed, 0 fallbacks" in printed
    assert str(out) in printed


def test_plan_needs_no_weights_and_promises_the_size(run: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((run.model / "config.json").read_bytes())
    assert main(["plan", str(bare), "--recipe", GPTQ, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert len(planned["modules"]) == 14
    assert planned["sequential_targets"] == [module["name"] for module in planned["modules"]]
    assert planned["forwards"] == "one, and one beside in the uncompressed model"
    assert [(module["name"], module["reason"]) for module in planned["skipped"]] == [("lm_head", "ignored by 'lm_head'")]
    with safe_open(run.out / "model.safetensors", framework="pt") as file:
        stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118 (no mapping)
    assert planned["estimate"]["checkpoint_bytes"] == pytest.approx(stored, rel=0.001)
    more = [
        "plan",
        str(bare),
        "--recipe",
        GPTQ,
        "--num-calibration-samples",
        "4096",
        "--max-seq-length",
        "64",
        "--json",
    ]
    assert main(more) == 0
    larger = json.loads(capsys.readouterr().out)
    assert larger["estimate"]["peak_extra_bytes"] > planned["estimate"]["peak_extra_bytes"]
    assert main([*more, "--pipeline", "basic"]) == 0
    basic = json.loads(capsys.readouterr().out)
    assert (basic["pipeline"], basic["sequential_targets"]) == ("basic", [])
    assert basic["estimate"]["peak_extra_bytes"] < larger["estimate"]["peak_extra_bytes"]  # nothing waits between layers


def test_the_plan_for_people(run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run.model), "--recipe", GPTQ, "--sequential-targets", "LlamaMLP"]) == 0
    printed = capsys.readouterr().out
    assert "int4 group 128" in printed
    assert "lm_head: ignored by 'lm_head'" in printed
    assert "layers or modules in sequence: 2" in printed
    assert "forwards per layer: two" in printed


def test_recipe_check_and_schema(run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "check", ROUND, "--recipe-arg", "scheme=W8A8"]) == 0
    assert "scheme: W8A8" in capsys.readouterr().out
    assert main(["recipe", "check", GPTQ, "--model", str(run.model)]) == 0
    assert "Plan: sequential pipeline" in capsys.readouterr().out
    training = "q_stage: {run_type: train, q_modifiers: {MagnitudePruningModifier: {final_sparsity: 0.5, start: 0, end: 4}}}"
    assert main(["recipe", "check", training, "--model", str(run.model)]) == 0
    assert "unstructured, 50% zeros" in capsys.readouterr().out
    assert main(["recipe", "check", GPTQ.replace("scheme", "schem")]) == 1
    assert "scheme" in capsys.readouterr().err
    assert main(["recipe", "check", SMOOTHED, "--json", "--model", str(run.model)]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert [next(iter(one)) for one in checked["stages"][0]["modifiers"]] == ["SmoothQuantModifier", "QuantizationModifier"]  # in order
    assert load_recipe({"q_stage": {"modifiers": checked["stages"][0]["modifiers"]}}).modifiers == load_recipe(SMOOTHED).modifiers
    assert checked["plan"]["estimate"]["checkpoint_bytes"] > 0
    assert main(["recipe", "schema"]) == 0
    assert "GPTQModifier" in capsys.readouterr().out


def test_ids_of_a_foreign_vocabulary_are_refused(run: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({"input_ids": torch.tensor([[1, 2, 300]])}, path)
    assert main(["oneshot", str(run.model), "--recipe", GPTQ, "--dataset", str(path), "--output-dir", str(tmp_path / "o"), "--quiet"]) == 1
    assert "token id 300" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--batch-size", "2", "--batch-size", "4"], ["--recipe", "a.yaml", "--recipe", "b.yaml"]])
def test_an_option_of_one_value_is_refused_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["oneshot", "model", "--output-dir", "out", *words])
    assert ended.value.code == 2
    assert f"{words[0]}: {words[1]} and {words[3]} were given" in capsys.readouterr().err


def _allocator() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _python() -> None:
    raise MemoryError


def _cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nsome hints")


@pytest.mark.parametrize("full", [_allocator, _python, _cuda])
def test_too_little_memory_is_told_in_a_line(
    full: Callable[[], None], run: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("compressor.entrypoints.oneshot"), "load_model", lambda *_, **__: full())
    assert main(["oneshot", str(run.model), "--recipe", GPTQ, "--dataset", str(run.tokens), "--output-dir", str(run.folder / "out")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("compressor oneshot: error: memory: there is too little of it (") and told.count("\n") == 1
    assert "compressor convert" in told and told.endswith("nothing was written\n")


def test_other_errors_are_not_taken_for_a_lack_of_memory(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("another one")

    monkeypatch.setattr(importlib.import_module("compressor.entrypoints.oneshot"), "load_model", lambda *_, **__: fail())
    with pytest.raises(RuntimeError, match="another one"):
        main(["oneshot", str(run.model), "--recipe", GPTQ, "--dataset", str(run.tokens), "--output-dir", str(run.folder / "out")])
