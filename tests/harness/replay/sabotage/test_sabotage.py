"""One op of the tape is sabotaged, and `locate` names it: every kind of op, in three models."""

from __future__ import annotations

import json
import re

import pytest
import torch

from compressor.errors import UserInputError
from compressor.training import Snapshot, TrainStep, locate
from compressor.training.capture.operators import Kind
from compressor.training.replay.locate import Difference
from harness.cli import main
from harness.replay.kernels.sources import plan_on_tape
from harness.replay.sabotage import break_ops as module
from harness.replay.sabotage.break_ops import WAYS, Trial, one_of_each, sabotage, score
from tests.bench.replay_cases import Mlp, lstm, mlp, small_llama

CPU = torch.device("cpu")
CASES = {"mlp": mlp(), "lstm": lstm(), "llama": small_llama(16, 1, 1, 4), "foreach": mlp()}
# Nothing that the step leaves depends on it: zeros and copies are the same the second time.
WITHOUT_EFFECT = {("aten._foreach_zero_.default", "twice"), ("aten.copy_.default", "twice")}


def _weighted(model, batch):
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0])  # a constant that Python makes inside the step
    target = torch.zeros(6, 4)
    target.copy_(model(batch["x"]).detach())
    return CASES["mlp"].loss_fn(model, batch) + ((model(batch["x"]) - 0.5 * target) * weights).square().mean()


def _foreach_step():
    """Clipping, momentum and weight decay by foreach ops, a constant, a copy_."""
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True)
    return TrainStep(model, _weighted, optimizer, clip_norm=0.05)


@pytest.fixture(scope="module")
def plans():
    steps = {name: case.step(CPU) for name, case in CASES.items() if name != "foreach"} | {"foreach": _foreach_step()}
    return {name: plan_on_tape(step, CASES[name].batch_at) for name, step in steps.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_op_is_named_when_it_is_sabotaged(plans, name):
    plan = plans[name]
    before = Snapshot.take(plan.step)
    ops = one_of_each(plan.captured.ops)
    ways = tuple(WAYS) if name in ("mlp", "lstm") else ("left out", "one bit", "twice")
    if name == "mlp":
        ops = plan.captured.ops  # all of them
    trials = sabotage(plan, CASES[name].batch_at(9), ops, ways)
    wrong = [trial for trial in trials if trial.outcome in ("missed", "another named")]
    assert not wrong, wrong
    no_effect = {(trial.place.split(": ")[1], trial.way) for trial in trials if trial.outcome == "no effect"}
    assert {one for one in no_effect if one[1] in ("left out", "one bit", "twice", "draws")} <= WITHOUT_EFFECT
    assert score(trials)["named"] >= len(ops) and {trial.way for trial in trials} == set(ways)
    assert before.differences(Snapshot.take(plan.step)) == [] and locate(plan, CASES[name].batch_at(9)) is None


def test_the_models_have_every_kind_of_op(plans):
    ops = [op for plan in plans.values() for op in plan.captured.ops]
    assert {op.kind for op in ops if op.run is not None} >= {Kind.OUT, Kind.COPY, Kind.MUTATE}
    names = " ".join(str(op.func) for op in ops)
    inner = ("native_batch_norm", "bernoulli_", "mkldnn_rnn_layer", "silu_backward", "lift_fresh", "copy_")
    for part in (*inner, "_foreach_zero_", "_fused_adamw_", "_foreach_mul_", "_foreach_norm"):
        assert f"aten.{part}." in names, part
    assert {op.phase for op in ops if op.run is not None} == {"zero_grad", "forward", "backward", "optimizer"}


def test_a_locate_that_errs_is_found_out(plans, monkeypatch):
    plan, batch = plans["mlp"], CASES["mlp"].batch_at(9)
    ops = one_of_each(plan.captured.ops)[:3]
    monkeypatch.setattr(module, "locate", lambda plan, batch: None)
    assert "missed" in {trial.outcome for trial in sabotage(plan, batch, ops, ["left out"])}
    calls = iter(range(100))
    other = Difference(ops[-1].index + 5, "op", "", "", 1, 50)
    monkeypatch.setattr(module, "locate", lambda plan, batch: None if next(calls) == 0 else other)
    assert {trial.outcome for trial in sabotage(plan, batch, ops, ["one bit"])} == {"another named"}


def test_a_plan_that_fails_already_is_refused(plans):
    plan, batch = plans["lstm"], CASES["lstm"].batch_at(9)
    op = next(op for op in plan.captured.ops if op.kind is Kind.OUT)
    with module.swapped(plan.captured, {op.index: lambda: None}), pytest.raises(UserInputError, match=rf"fails as it is: op {op.index} "):
        sabotage(plan, batch, [op])
    with pytest.raises(UserInputError, match="way 'gently' does not exist; give some of left out, one bit, twice, elsewhere"):
        sabotage(plan, batch, [op], ["gently"])


def test_outcomes_are_told_apart():
    def outcome(named, has_effect):
        return Trial(3, "op 3", "out", "one bit", named, has_effect).outcome

    assert [outcome(3, True), outcome(4, True), outcome(None, True), outcome(None, False)] == [
        "named",
        "another named",
        "missed",
        "no effect",
    ]


def run_command(*argv: str) -> int:
    return main(["replay", "sabotage", "llama", "--batch-size", "1", "--seq-length", "4", "--seed", "1", *argv])


@pytest.mark.nightly
def test_the_command_counts_what_was_named(capsys, monkeypatch):
    assert run_command("--op", "aten.silu", "--ways", "one bit", "left out") == 0
    assert "2 ops sabotaged one at a time, 4 trials: 4 named, 0 another named, 0 missed, 0 no effect" in capsys.readouterr().out
    assert run_command("--op", "aten._foreach_zero_", "--ways", "twice", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["score"]["no effect"] == 1 and found["trials"][0]["way"] == "twice"
    chosen = {}
    monkeypatch.setattr(module, "sabotage", lambda plan, batch, ops, ways, each: chosen.update({len(ops): plan}) or [])
    assert run_command() == run_command("--all") == 2, "no trial is no pass"
    each, everything = chosen
    assert each < everything == len(chosen[everything].captured.ops)


def test_the_command_fails_where_an_op_was_missed(capsys, monkeypatch):
    monkeypatch.setattr(
        module,
        "sabotage",
        lambda *args, **kwargs: [Trial(3, "op 3", "out", "one bit", None, True), Trial(4, "op 4", "out", "one bit", 9, True)],
    )
    assert run_command() == 1
    out = capsys.readouterr().out
    assert "op 3, one bit: missed" in out and "op 4, one bit: locate named op 9" in out


def test_an_op_that_goes_astray_is_named_with_who_gets_what_it_spoils(plans):
    plan, batch = plans["mlp"], CASES["mlp"].batch_at(9)
    relu = next(op for op in plan.captured.ops if str(op.func) == "aten.relu.default")
    bias, loss = plan.step.model.last.bias.detach(), plan.captured.loss
    for victim, reader in (
        (bias, r"op \d+ \(forward, last\): aten.addmm.default"),
        (plan.step.model.norm.running_mean, "what the step leaves"),
    ):
        with module.swapped(plan.captured, {relu.index: lambda run=relu.run, victim=victim: (run(), victim.add_(1))}):
            found = locate(plan, batch)
        assert found is not None and found.index == relu.index
        assert re.search(
            rf"aten.relu.default is the first that differs \(it changes what it does not own, which {reader} gets\)", str(found)
        )
    last = plan.captured.ops[-1]
    with module.swapped(plan.captured, {last.index: lambda: loss.add_(1)}):  # nobody reads it, but it is what the step returns
        found = locate(plan, batch)
    assert found is not None and found.index == last.index and locate(plan, batch) is None
