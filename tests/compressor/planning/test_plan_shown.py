"""A plan is read at 80 columns: no name is cut off, no line is longer, and what is alike in every layer stands in one line."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from compressor.console import Console
from compressor.planning import Plan, plan, planner
from compressor.planning.estimate import Speed
from compressor.planning.planner import PlannedModule
from compressor.planning.show import join_alike, show_plan
from tests import tiny

INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
RECIPE = {
    "quant_stage": {
        "quant_modifiers": {
            "GPTQModifier": {"targets": ["re:.*mlp.*_proj"], "config_groups": {"g": {"targets": ["re:.*mlp.*_proj"], "weights": INT4}}},
            "QuantizationModifier": {"targets": ["re:.*self_attn.*_proj"], "ignore": ["re:.*[02].self_attn.o_proj"], "scheme": "FP8"},
        }
    }
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.config(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_experts=12,
        moe_intermediate_size=64,
        mlp_only_layers=[2],
        head_dim=32,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def made(folder: Path) -> Plan:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(planner, "measure_speed", lambda device, dtype: Speed(1e9, 1e9, 1e-6, 1e-9))
        return plan(folder, recipe=RECIPE, num_calibration_samples=8, max_seq_length=32)


def shown(made: Plan, width: int) -> list[str]:
    file = io.StringIO()
    show_plan(made, Console(file=file, width=width))
    return file.getvalue().splitlines()


def test_every_line_fits_and_every_name_is_whole(made: Plan) -> None:
    lines = shown(made, 80)
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    text = "\n".join(lines)
    for row in (
        r"^Plan: sequential pipeline, 165 modules$",
        r"^GPTQModifier: int4 group 32 asymmetric\s*$",
        r"^model.layers.0-1,3-4.mlp.experts.0-11.gate_proj +48 +64x128 +0.79 +",
        r"^model.layers.2.mlp.gate_proj +1 +256x128 +0.07 +",
        r"^model.layers.0-4.self_attn.q_proj +5 +128x128 ",
        r"^model.layers.1,3-4.self_attn.o_proj +3 ",
        r"^stays as it is: model.layers.0,2.self_attn.o_proj \(2 modules\): ignored by",
    ):
        assert re.search(row, text, re.MULTILINE), f"{row}\n{text}"


def test_a_narrow_terminal_folds_names_and_keeps_numbers(made: Plan) -> None:
    lines = shown(made, 50)
    assert not any("…" in line for line in lines)
    begin = next(number for number, line in enumerate(lines) if line.startswith("model.layers.0-1"))
    assert "".join(line.split(" ")[0] for line in lines[begin : begin + 3]).startswith("model.layers.0-1,3-4.mlp.experts.0-11.gate_proj")
    assert lines[begin].split()[1:4] == ["48", "64x128", "0.79"]


def test_lines_add_up_to_the_modules(made: Plan) -> None:
    rows = [re.match(r"\S+ +(\d+) +\d+x\d+ +([\d.]+) +([\d.]+)\s*$", line) for line in shown(made, 120)]
    found = [row for row in rows if row is not None]
    assert sum(int(row.group(1)) for row in found) == len(made.modules)
    assert sum(float(row.group(2)) for row in found) == pytest.approx(
        sum(float(module.details["bytes_before"]) for module in made.modules) / 1e6, abs=0.005 * len(found)
    )


def test_large_plans_are_in_gigabytes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "measure_speed", lambda device, dtype: Speed(1e9, 1e9, 1e-6, 1e-9))
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 50_000_000}))
    lines = shown(plan(tmp_path, recipe=RECIPE, num_calibration_samples=8, max_seq_length=32), 80)
    assert any(line.startswith("Peak memory by stage in GB") for line in lines) and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.0", "a.1", "a.2"], ["a.0-2"]),
        (["a.0", "a.2", "a.3"], ["a.0,2-3"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.0-1.b.0-1"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ["a.0.b.0", "a.0.b.1", "a.1.b.0"]),
        (["a.10", "a.9"], ["a.9-10"]),
        (["a", "b"], ["a", "b"]),
        (["q4.0", "q8.0"], ["q4,8.0"]),
    ],
)
def test_names_that_differ_in_numbers_stand_as_one(names: list[str], expected: list[str]) -> None:
    modules = [PlannedModule(name, "m", None, "", {}) for name in names]
    joined = join_alike(modules, lambda module: None)
    assert [name for name, _ in joined] == expected
    assert sorted(module.name for _, members in joined for module in members) == sorted(names)


def test_only_what_is_alike_stands_as_one() -> None:
    modules = [PlannedModule(f"a.{number}", "m", None, "", {"shape": shape}) for number, shape in enumerate("xxyy")]
    assert [name for name, _ in join_alike(modules, lambda module: str(module.details["shape"]))] == ["a.0-1", "a.2-3"]
