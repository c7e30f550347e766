"""`harness replay MODEL`, and the fixture `assert_step_equivalent` in somebody else's project."""

from __future__ import annotations

import json

import pytest

from harness.cli import main

SMALL = ["--steps", "7", "--batch-size", "1", "--seq-length", "6"]


@pytest.mark.nightly
def test_an_architecture_of_the_zoo_is_equal_and_the_exit_code_says_so(capsys):
    assert main(["replay", "llama", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "replay   7 steps (2 warm-up, 1 capture, 1 prove, 3 replay)" in out and "as fast as eager" in out
    assert "verdict: pass" in out


def test_what_the_options_say_is_done(capsys):
    assert (
        main(["replay", "equivalence", "gpt2", *SMALL, "--modes", "replay", "--every", "3", "--seed", "5", "--device", "cpu", "--json"])
        == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert [mode["mode"] for mode in data["modes"]] == ["eager", "replay"] and data["verdict"] == "pass"
    assert next(r for r in data["records"] if r["name"] == "replay.replay")["summary"].startswith("3 states of 7 steps")
    assert main(["replay", "gpt2", *SMALL, "--modes", "replay", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modes"][0]["first_loss"] != data["modes"][0]["first_loss"]


def test_too_few_steps_say_nothing(capsys):
    assert main(["replay", "llama", "--steps", "3", "--modes", "replay"]) == 2
    assert "nothing was replayed in 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("start", "code", "said"),
    [(1, 0, "began at step 0 came and went"), (5, 2, "began at step 5 ("), (7, 3, "start=7 is not reached in a run of 7 steps")],
)
def test_a_recipe_whose_step_is_not_replayed_says_nothing(capsys, tmp_path, start, code, said):
    recipe = tmp_path / "late.yaml"
    recipe.write_text(f"QuantizationModifier:\n  targets: [Linear]\n  ignore: [lm_head]\n  scheme: W8A8\n  start: {start}\n")
    assert main(["replay", "llama", *SMALL, "--modes", "replay", "--recipe", str(recipe)]) == code
    told = capsys.readouterr()
    assert said in told.out + told.err


@pytest.mark.parametrize("setting", ["end", "disable_quantization_observer_epoch"])
def test_what_of_a_recipe_lies_behind_the_run_is_said(capsys, tmp_path, setting):
    recipe = tmp_path / "long.yaml"
    recipe.write_text(f"QuantizationModifier:\n  {{targets: [Linear], ignore: [lm_head], scheme: W8A8, start: 0, {setting}: 50}}\n")
    assert main(["replay", "llama", *SMALL, "--modes", "replay", "--recipe", str(recipe), "--json"]) == 0
    told = capsys.readouterr()
    assert f"{setting}=50 lies behind the run of 7 steps" in told.err and json.loads(told.out)["verdict"] == "pass"


def test_a_step_that_is_refused_is_a_verdict(capsys):
    assert main(["replay", "mistral", "--steps", "4", "--modes", "capture"]) in (0, 1)
    assert "verdict:" in capsys.readouterr().out


def test_a_recipe_takes_part(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "prune_stage:\n  prune_modifiers:\n    MagnitudePruningModifier:\n"
        "      {targets: [Linear], start: 1, end: 8, update: 2, init_sparsity: 0.1, final_sparsity: 0.5, leave_enabled: true}\n"
    )
    assert main(["replay", "llama", "--steps", "16", "--seq-length", "6", "--modes", "replay", "--recipe", str(recipe), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["modes"][1]["num_replays"] >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "is neither a folder nor an architecture"),
        (["llama", "--batch-size", "0"], "give at least 1 row of 2 tokens"),
        (["llama", "--steps", "0"], "must be at least 1"),
        (["llama", "--recipe", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_input_has_its_own_exit_code(capsys, arguments, message):
    assert main(["replay", *arguments]) == 3
    assert message in capsys.readouterr().err


TESTS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from compressor.training import TrainStep, adamw

def batch(number):
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(4, 8, generator=generator), "y": torch.randint(0, 3, (4,), generator=generator)}

class Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.mean().item()

def step(model):
    return TrainStep(model, lambda m, b: cross_entropy(m(b["x"]), b["y"]), adamw(model.parameters()))

def test_equal(assert_step_equivalent):
    found = assert_step_equivalent(lambda: step(nn.Linear(8, 3)), batch, steps=8)
    assert found.runs["replay"].num_replays == 4

def test_refused(assert_step_equivalent):
    assert_step_equivalent(lambda: step(Reads(8, 3)), batch, steps=8)

def test_vacuous(assert_step_equivalent):
    assert_step_equivalent(lambda: step(nn.Linear(8, 3)), [batch(0), batch(1)])
"""


def test_the_fixture_fails_with_the_report_where_a_step_is_not_the_same(pytester):
    pytester.makepyfile(test_it=TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*refused at step 2: HostReadError*reads a tensor on the host*", "*nothing was replayed in 2 steps*"])
