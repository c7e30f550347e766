"""assert_equivalent: equal steps pass, a difference is named down to the operator, and a comparison of nothing is no pass."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from compressor.errors import HostReadError, UserInputError
from compressor.lifecycle import Session, State
from compressor.modifiers.pruning.magnitude import MagnitudePruningModifier
from compressor.training import Trainer, TrainStep, WeightAverages, adamw, sgd
from harness.errors import ContractViolation
from harness.replay import Subject, assert_equivalent, compare_modes
from harness.replay.equivalence.first_difference import spell_distance
from harness.replay.equivalence.training_state import differing_names, state_of
from harness.replay.hazards.building_blocks import Net, classify, net, vectors
from harness.reporting.verdict import Outcome, Verdict


def _step(middle=None, **settings):
    model = net(middle)
    return TrainStep(model, classify, adamw(model.parameters(), lr=1e-2), **settings)


def _by_name(found):
    return {record.name: record for record in found.records}


def test_a_step_is_equal_in_all_modes_however_the_factory_gives_it():
    def as_tuple():
        model = Net()
        return model, classify, sgd(model.parameters(), momentum=0.9)

    for factory in (_step, as_tuple, lambda: Trainer(_step(), audit_every=6), lambda: Subject(_step())):
        found = assert_equivalent(factory, vectors, steps=9)
        assert found.passed and found.verdict is Verdict.PASS
        assert found.runs["replay"].num_replays >= 4 and found.runs["replay"].num_plans == 1
        assert found.runs["capture"].actions.count("capture") == 7
        assert found.runs["eager"].losses == found.runs["replay"].losses
    assert "audit" not in found.runs["replay"].actions
    assert "verdict: pass" in found.to_text() and "replays of 1 plan, 4 parameters moved" in found.to_text()
    assert json.loads(found.to_json())["verdict"] == "pass"


def test_batches_may_be_a_list_that_comes_again_and_are_never_changed():
    batches = [vectors(number) for number in range(3)]
    kept = [batch["x"].clone() for batch in batches]
    found = assert_equivalent(_step, batches, ("replay",), steps=10)
    assert len(found.runs["replay"].actions) == 10 and "capture" not in found.runs
    assert all(torch.equal(batch["x"], old) for batch, old in zip(batches, kept, strict=True))


class _Stream(IterableDataset):
    def __iter__(self):
        return (vectors(number) for number in itertools.count())


LOADERS = {
    "a generator": (lambda: (vectors(number) for number in range(7)), 7),
    "without end": (lambda: (vectors(number) for number in itertools.count()), 7),
    "shuffled": (lambda: DataLoader([vectors(number) for number in range(7)], batch_size=None, shuffle=True), None),
    "a stream": (lambda: DataLoader(_Stream(), batch_size=None), 7),
    "a dict's": (lambda: {number: vectors(number) for number in range(7)}.values(), None),
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_that_come_once_are_kept_for_every_mode(name):
    make, steps = LOADERS[name]
    found = assert_equivalent(_step, make(), steps=steps)
    assert all(len(run.actions) == 7 for run in found.runs.values())
    with pytest.raises(UserInputError, match=r"batches: a \w+ (was given, which is no row of batches|has no length; give steps)"):
        compare_modes(_step, next(iter(make())) if steps is None else make())


def test_a_number_too_long_to_be_written_out_is_part_of_the_state():
    def with_mask(mask):
        step = _step()
        step.model.mask = mask
        return step

    assert_equivalent(lambda: with_mask(1 << 20000), vectors, steps=6)
    assert differing_names(state_of(with_mask(1 << 20000)).host, state_of(with_mask((1 << 20000) + 1)).host) == ["attribute:mask"]


def test_the_callers_random_numbers_and_settings_are_as_before():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()

    def unsettle(number, trainer):
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        random.random()
        np.random.rand()

    compare_modes(_step, [vectors(number) for number in range(3)], ("capture",), before_step=unsettle)
    assert torch.get_default_dtype() is torch.float32
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_a_refused_step_fails_with_the_named_error_as_its_cause():
    def factory():
        return _step(lambda module, h: h * h.mean().item())

    with pytest.raises(ContractViolation, match="refused at step 2: HostReadError") as caught:
        assert_equivalent(factory, vectors, steps=8)
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value.__cause__, HostReadError)
    found = compare_modes(factory, vectors, steps=8)
    assert found.verdict is Verdict.REGRESSION and found.runs["replay"].refusal.number == 2
    assert _by_name(found)["replay.not_vacuous"].outcome is Outcome.SKIP


def test_a_step_that_does_not_repeat_itself_is_not_blamed_on_replay():
    shared = []

    def factory():
        shared.append(None)
        return _step(lambda module, h: h * len(shared))

    found = compare_modes(factory, vectors, steps=8)
    record = _by_name(found)["replay.repeats"]
    assert found.verdict is Verdict.INCONCLUSIVE and record.outcome is Outcome.INCONCLUSIVE
    assert "step 0: loss" in record.summary and "this is not about replay" in record.summary
    assert {_by_name(found)[f"replay.{mode}"].outcome for mode in ("capture", "replay")} == {Outcome.SKIP}


def _frozen():
    model = Net()
    return TrainStep(model, classify, torch.optim.SGD(model.parameters(), lr=0.0))


def _nan():
    return _step(lambda module, h: h * float("nan"))


def _first_rows(batch, rows):
    return {name: value[:rows] for name, value in batch.items()}


def _constant():
    model = Net()
    return TrainStep(model, lambda module, batch: sum(p.sum() for p in module.parameters()) * 0 + batch["x"].sum(), sgd(model.parameters()))


@pytest.mark.parametrize(
    ("factory", "batches", "steps", "reason"),
    [
        (_step, vectors, 4, "nothing was replayed in 4 steps (warm-up, capture, prove)"),
        (_step, vectors, 2, "nothing was recorded in 2 steps"),
        (_step, lambda number: vectors(0), 9, "no plan ever met another batch"),
        (_frozen, vectors, 9, "no parameter ever changed"),
        (_nan, vectors, 9, "every loss is NaN"),
        (_constant, vectors, 9, "no gradient ever changed"),
        (lambda: Trainer(_step(), warmup=20), vectors, 9, "nothing was replayed"),
        (
            _step,
            lambda number: _first_rows(vectors(number), 2 if number >= 8 else None),
            12,
            "the kind of step that began at step 8 (another batch",
        ),
    ],
    ids=["short", "shorter", "one batch", "rate 0", "nan", "no gradient", "warm-up", "another shape"],
)
def test_a_comparison_of_nothing_is_no_pass(factory, batches, steps, reason):
    found = compare_modes(factory, batches, steps=steps)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert reason in _by_name(found)["replay.not_vacuous"].summary
    with pytest.raises(ContractViolation, match=r"replay\.not_vacuous"):
        assert_equivalent(factory, batches, steps=steps)


def test_a_kind_of_step_that_comes_and_goes_is_named():
    found = compare_modes(_step, lambda number: _first_rows(vectors(number), 2 if number == 6 else None), steps=12)
    assert found.passed and "began at step 6 came and went without a replay" in _by_name(found)["replay.not_vacuous"].summary


def test_a_modifier_that_the_run_never_starts_is_no_pass():
    def factory():
        model = Net()
        session = Session(State(model), [MagnitudePruningModifier(targets=["Linear"], start=20, end=30, final_sparsity=0.5)])
        session.initialize()
        return TrainStep(model, classify, adamw(model.parameters()), session)

    found = compare_modes(factory, vectors, steps=9)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "MagnitudePruningModifier was not started in 9 steps" in _by_name(found)["replay.not_vacuous"].summary


def test_a_trainer_that_only_says_that_it_replays_is_seen(monkeypatch):
    monkeypatch.setattr("compressor.training.replay.plan.Plan.__call__", lambda plan, batch: plan.step(batch).clone())
    found = compare_modes(_step, vectors, ("replay",), steps=9)
    assert found.runs["replay"].actions[-1] == "replay" and found.runs["replay"].num_replays == 0
    assert found.verdict is Verdict.INCONCLUSIVE


def _last_bit(monkeypatch, name):
    """From step 6 on, a replay flips the last bit of one tensor."""
    from compressor.training.replay.plan import Plan

    true_call = Plan.__call__

    def call(plan, batch):
        loss = true_call(plan, batch)
        call.count += 1
        target = loss if name == "loss" else state_of(plan.step).tensors[name]
        if call.count % 100 > 2:
            target.view(-1).view(torch.uint8)[0] ^= 1
        return loss

    call.count = 0
    monkeypatch.setattr(Plan, "__call__", call)
    return call


@pytest.mark.parametrize(
    "name",
    ["loss", "param:last.weight", "grad:first.bias", "opt.exp_avg:first.weight", "group0.lr", "average:0.999:last.bias", "buffer:scale"],
)
def test_one_bit_of_any_part_of_the_state_is_seen_and_named(monkeypatch, name):
    def factory():
        model = net(prepare=lambda module: module.register_buffer("scale", torch.ones(())))
        return TrainStep(model, classify, adamw(model.parameters(), lr=1e-2), averages=WeightAverages(model))

    call = _last_bit(monkeypatch, name)

    def restart(number, trainer):
        call.count = 0 if number == 0 else call.count

    found = compare_modes(factory, vectors, ("replay",), steps=9, before_step=restart)
    difference = found.differences["replay"]
    assert found.verdict is Verdict.REGRESSION
    assert (difference.step, difference.action, difference.names[0]) == (6, "replay", name)
    assert "1 of " in difference.detail and "1 ULP" in difference.detail
    assert "no operator of the tape differs" in difference.operator


def test_generators_are_part_of_the_state(monkeypatch):
    from compressor.training.replay.plan import Plan

    true_call = Plan.__call__
    for draw, name in ((lambda: torch.rand(1), "rng:torch"), (random.random, "rng:random"), (np.random.rand, "rng:numpy")):
        monkeypatch.setattr(Plan, "__call__", lambda plan, batch, draw=draw: (true_call(plan, batch), draw())[0])
        found = compare_modes(lambda: _step(lambda module, h: h), vectors, ("replay",), steps=6)
        assert name in found.differences["replay"].names


def test_a_wrong_operator_that_the_proof_let_through_is_located(monkeypatch):
    from compressor.training.replay.plan import Plan

    true_init = Plan.__init__

    def init(plan, *given):
        true_init(plan, *given)
        victim = next(op for op in plan.captured.ops if "aten.relu" in str(op.func))
        true_run = victim.run
        victim.run = lambda: (true_run(), victim.outs[0].mul_(1.25))
        plan.captured.relink()

    monkeypatch.setattr(Plan, "__init__", init)
    found = compare_modes(_step, vectors, ("replay",), steps=8)
    assert "aten.relu.default is the first that differs" in _by_name(found)["replay.replay"].summary
    monkeypatch.setattr("compressor.training.trainer.prove", lambda plan, batch, engine: plan(batch))
    found = compare_modes(_step, vectors, ("replay",), steps=8)
    text = _by_name(found)["replay.replay"].summary
    assert "step 3 (replay: prove): loss" in text and "aten.relu.default is the first that differs" in text


def test_every_n_steps_are_compared_and_the_last():
    found = compare_modes(_step, vectors, ("replay",), steps=12, every=5)
    assert list(found.runs["eager"].digests) == [0, 5, 10, 11] and found.passed


def test_nan_payloads_and_signs_of_zero_are_bits():
    model = Net()
    step = TrainStep(model, classify, sgd(model.parameters()))
    first = state_of(step).digests()
    with torch.no_grad():
        model.last.bias.zero_()
        zero = state_of(step).digests()
        model.last.bias.neg_()
    assert differing_names(zero, state_of(step).digests()) == ["param:last.bias"] and zero != first
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert "other bits of equal values" in spell_distance(quiet[:1], quiet[1:])
    assert "NaN or infinity on one side" in spell_distance(torch.tensor([float("nan")]), torch.tensor([1.0]))


def test_what_python_holds_is_state_too():
    model = net(prepare=lambda module: setattr(module, "calls", 1))
    step = TrainStep(model, classify, sgd(model.parameters()))
    before = state_of(step).digests()
    model.calls = 2
    step.optimizer.param_groups[0]["weight_decay"] = 0.5
    model.first.weight.requires_grad_(False)
    assert differing_names(before, state_of(step).digests()) == ["requires_grad:first.weight", "attribute:calls", "group0.weight_decay"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"modes": ("eager",)}, "give capture, replay or both"),
        ({"modes": ("capture", "warp")}, "give capture, replay or both"),
        ({"steps": 0}, "steps=0"),
        ({"every": 0}, "every=0"),
        ({"batches": []}, "there is none"),
        ({"batches": iter([])}, "there is none"),
        ({"batches": None}, "batches: a NoneType was given, which is no row of batches"),
        ({"batches": "ab"}, "batches: a str was given"),
        ({"seed": -1}, "seed: -1 is none that every generator takes; give 0 to 4294967295"),
        ({"seed": 1 << 32}, "seed: 4294967296 is none"),
        ({"batches": torch.ones(())}, "batches: a Tensor was given"),
        ({"steps": 6.5}, "steps: 6.5 was given, where a whole number belongs"),
        ({"before_step": 3}, "before_step: 3 was given, where a function belongs"),
        ({"batches": vectors, "steps": None}, "a function has no length"),
        ({"factory": _step()}, "factory: a TrainStep was given"),
        ({"factory": nn.Linear(2, 2)}, "factory: a Linear was given"),
        ({"factory": lambda: nn.Linear(2, 2)}, "it returned Linear"),
        ({"factory": lambda: (nn.Linear(2, 2), classify)}, "it returned tuple of 2; return a fresh TrainStep"),
        ({"factory": lambda: _step(lambda module, h: h / "one")}, "the eager step itself fails at step 0: TypeError"),
    ],
)
def test_bad_input_is_refused(arguments, match):
    given = {"factory": _step, "batches": vectors, "steps": 6} | arguments
    with pytest.raises(UserInputError, match=match):
        compare_modes(given.pop("factory"), given.pop("batches"), **given)


def test_a_used_trainer_and_a_batch_of_a_graph_are_refused():
    used = Trainer(_step())
    used.train_step(vectors(0))
    with pytest.raises(UserInputError, match="has made 1 steps"):
        compare_modes(lambda: used, vectors, steps=3)
    part = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(UserInputError, match="give tensors that belong to no graph"):
        compare_modes(_step, [{"x": part, "y": cross_entropy}], steps=3)


def test_a_compiled_model_is_refused_by_name_and_not_said_to_differ_in_eager():
    def factory():
        model = torch.compile(torch.nn.Linear(8, 2), backend="eager")
        return model, lambda model, batch: model(batch).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)

    found = compare_modes(factory, lambda number: torch.full((4, 8), float(number)), steps=5)
    assert found.records[0].outcome.value == "pass"
    assert "compiled by torch.compile" in str(found.refusal)
