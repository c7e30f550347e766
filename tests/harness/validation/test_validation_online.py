"""A checkpoint whose reader has to turn inputs and outputs in every forward: read by our own reader, and held against its record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compressor import QuantizationModifier, QuIPModifier, SpinQuantModifier, oneshot
from harness.bisect import bisect
from harness.reporting.verdict import Outcome
from harness.validation.compare import validate
from tests.harness.validation.conftest import Checkpoint, Workspace
from tests.harness.validation.test_validation_rotations import WEIGHTS, edited, moe

R4 = SpinQuantModifier(rotations=["R1", "R2", "R4"], transform_type="random-hadamard")  # a matrix that is not its own transpose
QUIP = QuIPModifier(rotations=["v", "u"])
DOWN = "model.layers.0.mlp.down_proj"


def judged(base: Path, folder: Path, workspace: Workspace) -> dict[str, Any]:
    return {record.name: record for record in validate(base, folder, load_file(workspace.dataset)["input_ids"][8:]).records}


def failed(records: dict[str, Any]) -> list[str]:
    return [name for name, record in records.items() if record.outcome is Outcome.FAIL]


@pytest.fixture(scope="session")
def rotated(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    made: dict[str, Path] = {}

    def make(modifier: Any) -> Path:
        name = type(modifier).__name__
        if name not in made:
            made[name] = tmp_path_factory.mktemp("rotated") / "out"
            recipe = [modifier.model_copy(deep=True), QuantizationModifier(config_groups=WEIGHTS, ignore=["lm_head"])]
            oneshot(workspace.base, recipe=recipe, output_dir=made[name], device="cpu")
        return made[name]

    return make


@pytest.mark.parametrize("modifier", [R4, QUIP], ids=["R4", "QuIP"])
def test_it_is_read_by_our_reader_and_nothing_fails(modifier: Any, workspace: Workspace, rotated: Any) -> None:
    records = judged(workspace.base, rotated(modifier), workspace)
    assert failed(records) == []
    loads = records["format.loads"]
    assert loads.outcome is Outcome.INCONCLUSIVE and "applies no transform_config" in loads.summary
    assert records["behaviour.kl"].outcome is Outcome.PASS and records["weights.sqnr"].outcome is Outcome.PASS


def test_experts_and_floats_are_held_against_the_record(workspace: Workspace, tmp_path: Path) -> None:
    torch.manual_seed(0)
    moe().eval().save_pretrained(tmp_path / "base")
    for name, modifier in (("r4", SpinQuantModifier(rotations=["R4"])), ("quip", QUIP.model_copy(deep=True))):
        oneshot(tmp_path / "base", recipe=[modifier], output_dir=tmp_path / name, device="cpu")
        assert failed(judged(tmp_path / "base", tmp_path / name, workspace)) == [], name


def test_floats_that_are_turned_twice_are_rounded_twice(workspace: Workspace, tmp_path: Path) -> None:
    oneshot(workspace.base, recipe=[R4.model_copy(deep=True)], output_dir=tmp_path / "out", device="cpu")
    records = judged(workspace.base, tmp_path / "out", workspace)
    assert failed(records) == [] and "2 transforms" in records["behaviour.transforms"].summary


def group(config: dict[str, Any], name: str = "R4") -> Any:
    return config["quantization_config"]["transform_config"]["config_groups"][name]


def forget(record: dict[str, Any]) -> None:
    record["turns"] = [turn for turn in record["turns"] if "online" not in turn]


# What is wrong with config, tensors or record; the check that finds it, and what it says.
FAULTS: dict[str, tuple[Callable[[Checkpoint], Any], str, str]] = {
    "a module is not turned": (
        lambda c: c.edit_config(lambda d: [one["targets"].remove(DOWN) for one in group(d)["apply"]]),
        "format.accepted",
        f"{DOWN}: its weight was turned for an input that transform_config does not turn",
    ),
    "a module is turned for nothing": (
        lambda c: c.edit_config(lambda d: group(d)["apply"][0]["targets"].append("lm_head")),
        "format.accepted",
        "lm_head: transform_config turns its input (R4), and compression.json names no such rotation",
    ),
    "turned the other way": (
        lambda c: c.edit_config(lambda d: group(d)["apply"][0].update(inverse=True)),
        "format.accepted",
        "another matrix than compression.json has for its input",
    ),
    "another matrix": (
        lambda c: c.edit(lambda t: t.update({f"{DOWN}.R4_input.weight": t[f"{DOWN}.R4_input.weight"].flip(0)})),
        "format.accepted",
        "another matrix than compression.json has for its input",
    ),
    "no matrix": (lambda c: c.edit(lambda t: t.pop(f"{DOWN}.R4_input.weight")), "format.loads", "hold no matrix of 96 x 96"),
    "no such group": (
        lambda c: c.edit_config(lambda d: d["quantization_config"].update(transform_config={})),
        "files.tensors",
        f"{DOWN}.R4_input.weight: is unexpected",
    ),
    "a weight is turned for nothing": (
        lambda c: c.edit_config(lambda d: group(d)["apply"][1]["targets"].append("lm_head")),
        "format.accepted",
        "lm_head: transform_config says that R4 is in it (weight_input), and compression.json names no such rotation",
    ),
    "a place in attention": (
        lambda c: c.edit_config(lambda d: group(d)["apply"][0].update(location="k_cache")),
        "format.accepted",
        "transform_config says R4 at k_cache, which is not judged here",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_reader_that_would_not_take_back_what_was_turned_is_found(what: str, workspace: Workspace, rotated: Any, tmp_path: Path) -> None:
    spoil, name, said = FAULTS[what]
    folder = edited(rotated(R4), tmp_path / "edited", lambda one: None)
    spoil(Checkpoint(folder))
    record = judged(workspace.base, folder, workspace)[name]
    assert record.outcome is Outcome.FAIL and said in record.summary + " ".join(record.findings)


@pytest.mark.parametrize("place", ["weight_input", "weight_output"])
def test_a_rotation_that_only_the_config_knows_is_found(place: str, workspace: Workspace, tmp_path: Path) -> None:
    said = {"R1": {"type": "hadamard", "apply": [{"targets": [DOWN], "location": place}]}}
    oneshot(
        workspace.base, recipe=[QuantizationModifier(config_groups=WEIGHTS, ignore=["lm_head"])], output_dir=tmp_path / "out", device="cpu"
    )
    Checkpoint(tmp_path / "out").edit_config(lambda d: d["quantization_config"].update(transform_config={"config_groups": said}))
    for _ in range(2):
        found = judged(workspace.base, tmp_path / "out", workspace)["format.accepted"]
        assert found.outcome is Outcome.FAIL and f"says that R1 is in it ({place})" in " ".join(found.findings), found
        (tmp_path / "out" / "compression.json").unlink(missing_ok=True)  # and without any record
    data = load_file(workspace.dataset)["input_ids"][8:]
    trained = {record.name: record for record in validate(workspace.base, tmp_path / "out", data, trained=True).records}
    assert trained["format.accepted"].outcome is Outcome.PASS  # behaviour alone judges


def test_a_record_without_the_rotation_is_found(workspace: Workspace, rotated: Any, tmp_path: Path) -> None:
    records = judged(workspace.base, edited(rotated(R4), tmp_path / "edited", forget), workspace)
    assert "compression.json names no such rotation" in " ".join(records["format.accepted"].findings)
    assert records["weights.sqnr"].outcome is Outcome.FAIL


def test_bisect_turns_the_base_in_its_forward_too(workspace: Workspace, rotated: Any, tmp_path: Path) -> None:
    folder = edited(rotated(R4), tmp_path / "edited", lambda one: None)
    Checkpoint(folder).edit(lambda t: t["model.layers.1.mlp.up_proj.weight_scale"].mul_(2))
    report = bisect(workspace.base, folder, workspace.dataset, device="cpu")
    assert report.layers[0].modules[0].module == "model.layers.1.mlp.up_proj", report.to_text()
