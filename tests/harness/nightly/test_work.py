"""What a check of ours measures: ratios, sizes, values by sequence; run here in this process."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from compressor import oneshot
from harness.nightly.config import Data
from harness.nightly.work import Pace, main


def work(project: Path, check: str, **changes: object) -> dict:
    data = {name: str(project / f"{name}.safetensors") for name in ("calibration", "held_out")}
    data |= {"num_calibration_samples": 8, "num_held_out": 24, "max_seq_length": 16}
    job = {"check": check, "model": str(project / "tiny"), "recipe": str(project / "recipe.yaml"), "device": "cpu", "repetitions": 2}
    job |= {"compressed": str(project / "compressed"), "data": data} | changes
    (project / "job.json").write_text(json.dumps(job))
    main(str(project / "job.json"), str(project / "result.json"))
    return json.loads((project / "result.json").read_text())


def test_compress_validate_and_speed_measure_what_they_say(project: Path) -> None:
    made = work(project, "compress")
    phases = {name: values for name, (values, *_) in made["metrics"].items() if name.startswith("time.")}
    assert made["outcome"] == "pass" and set(phases) == {"time.load", "time.data", "time.compress", "time.save"}
    assert made["metrics"]["time"][0] == pytest.approx([sum(of) for of in zip(*phases.values(), strict=True)])
    assert made["metrics"]["bytes"][0] == [sum(file.stat().st_size for file in (project / "compressed").glob("*.safetensors"))]
    held = work(project, "validate")
    assert held["outcome"] in ("pass", "inconclusive") and "checks" in held["summary"]  # 24 sequences of a random model tell little
    for name in ("kl", "loss"):
        values, better, kind = held["metrics"][name]
        assert (len(values), better, kind) == (24, "lower", "paired") and all(value >= 0 for value in values) and sum(values) > 0
    assert sum(held["metrics"]["loss"][0]) / 24 == pytest.approx(math.log(128), rel=0.2)  # a random model
    turns = work(project, "speed")
    assert all(len(turns["metrics"][name][0]) == 2 and min(turns["metrics"][name][0]) > 0.05 for name in ("prefill", "decode"))


def test_a_model_of_few_positions_is_judged_without_a_length_and_one_that_is_only_pruned_is_timed(project: Path, tmp_path: Path) -> None:
    sources = {name: str(project / f"{name}.safetensors") for name in ("calibration", "held_out")}
    recipe = "s_stage: {m_modifiers: {WandaPruningModifier: {sparsity: 0.1, targets: [Linear]}}}"
    oneshot(project / "tiny", recipe=recipe, dataset=sources["calibration"], output_dir=tmp_path / "pruned")
    changes = {"compressed": str(tmp_path / "pruned"), "data": Data(**sources, num_held_out=24).model_dump()}
    held = work(project, "validate", **changes)
    assert held["outcome"] in ("pass", "inconclusive", "regression") and len(held["metrics"]["kl"][0]) == 24, held["summary"]
    assert len(work(project, "speed", **changes)["metrics"]["prefill"][0]) == 2


def test_a_model_without_room_for_a_prompt_is_not_timed(project: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(project / "tiny")
    model.config.max_position_embeddings = 16
    model.save_pretrained(tmp_path / "short")
    found = work(project, "speed", model=str(tmp_path / "short"), compressed=str(tmp_path / "short"))
    assert found["outcome"] == "error" and "takes 16 positions, and speed decodes 16 behind a prompt" in found["summary"]


def test_an_error_of_ours_is_a_result(project: Path) -> None:
    found = work(project, "compress", recipe=str(project / "none.yaml"))
    assert found["outcome"] == "error" and "none.yaml" in found["summary"] and found["metrics"] == {}


def test_times_are_held_against_a_piece_that_takes_a_fifth_of_a_second() -> None:
    pace = Pace("cpu")
    assert 0.1 < min(pace.seconds() for _ in range(3)) < 10
    ratio = pace.around(lambda: {"work": pace.seconds()})["work"]
    assert 0.2 < ratio < 5
