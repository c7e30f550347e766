"""Averages of weights: their formula, decays that change, alike in all modes, applied without a trace, kept by a checkpoint"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from compressor.errors import UserInputError
from compressor.lifecycle import Session, State
from compressor.modifiers.pruning.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from compressor.modifiers.quantization import QuantizationModifier
from compressor.training import Snapshot, Trainer, TrainStep, WeightAverages, load_training, save_training, sgd


def averaged(new_trainer, cases, mode, **settings) -> Trainer:
    step = new_trainer(cases["mlp"], mode).step
    averages = WeightAverages(step.model, **settings)
    return Trainer(TrainStep(step.model, step.loss_fn, step.optimizer, averages=averages), mode, audit_every=0)


def test_several_decays_with_warmup_follow_their_formulas(new_trainer, cases, batches):
    trainer = averaged(new_trainer, cases, "replay", decay=(0.9, 0.2), warmup=True)
    weight = trainer.step.model.last.weight
    expected = {decay: weight.detach().double() for decay in (0.9, 0.2)}
    for number in range(12):
        trainer.train_step(batches(number))
        for decay, average in expected.items():
            now = min(decay, (2 + number) / (11 + number))
            expected[decay] = now * average + (1 - now) * weight.detach().double()
    for decay, average in expected.items():
        found = trainer.step.averages.weights(decay)["last.weight"].double()
        torch.testing.assert_close(found, average, rtol=0, atol=1e-6)
    assert not torch.equal(*(trainer.step.averages.weights(decay)["last.weight"] for decay in (0.9, 0.2)))


def test_a_decay_written_between_steps_counts_in_every_mode_without_a_new_plan(new_trainer, cases, batches):
    ends = {}
    for mode in ("eager", "capture", "replay"):
        trainer = averaged(new_trainer, cases, mode, decay=0.5)
        for number in range(10):
            trainer.step.averages.decays[0.5].fill_(0.5 + number / 30)
            trainer.train_step(batches(number))
        ends[mode] = Snapshot.take(trainer.step)
    assert ends["eager"].differences(ends["capture"]) == ends["eager"].differences(ends["replay"]) == []
    assert trainer.last_action == "replay" and len(trainer.plans) == 1
    constant = averaged(new_trainer, cases, "eager", decay=0.5)
    constant.fit(batches, 10)
    assert not torch.equal(ends["eager"].tensors["average:0.5:last.weight"], constant.step.averages.weights()["last.weight"])


def test_averages_are_evaluated_between_replays_and_leave_no_trace(new_trainer, cases, batches):
    plain = averaged(new_trainer, cases, "replay", decay=(0.9, 0.5))
    plain.fit(batches, 12)
    end = Snapshot.take(plain.step)
    trainer = averaged(new_trainer, cases, "replay", decay=(0.9, 0.5))
    seen = []
    for number in range(12):
        trainer.train_step(batches(number))
        before = Snapshot.take(trainer.step)
        with trainer.step.averages.applied(0.5):
            assert torch.equal(trainer.step.model.last.weight, trainer.step.averages.weights(0.5)["last.weight"])
            seen.append(trainer.evaluate([batches(99)]))
        assert before.differences(Snapshot.take(trainer.step)) == []
    assert end.differences(Snapshot.take(trainer.step)) == []
    assert trainer.last_action == "replay" and len(trainer.plans) == 1, "no plan was lost"
    assert len(set(seen)) == 12 and seen[-1] != trainer.evaluate([batches(99)])


def test_weights_come_back_even_where_the_block_fails(new_trainer, cases, batches):
    trainer = averaged(new_trainer, cases, "eager", decay=0.9)
    trainer.fit(batches, 3)
    trainer.step.model.last.weight.data[0, 0] = float("nan")
    before = Snapshot.take(trainer.step)
    with pytest.raises(ZeroDivisionError), trainer.step.averages.applied():
        raise ZeroDivisionError
    assert before.differences(Snapshot.take(trainer.step)) == []


def test_averages_that_stand_in_the_model_are_neither_trained_nor_stored(new_trainer, cases, batches, tmp_path):
    trainer = averaged(new_trainer, cases, "replay", decay=(0.9, 0.5))
    trainer.fit(batches, 6)
    before = Snapshot.take(trainer.step)
    with trainer.step.averages.applied(0.5):
        for wrong in (
            lambda: trainer.train_step(batches(6)),
            lambda: save_training(trainer, tmp_path / "state"),
            lambda: trainer.step.averages.applied(0.9).__enter__(),
        ):
            with pytest.raises(UserInputError, match="averages stand in the place of the weights"):
                wrong()
    assert before.differences(Snapshot.take(trainer.step)) == [] and not (tmp_path / "state").exists()
    trainer.train_step(batches(6))


def test_averages_and_their_decays_are_stored(new_trainer, cases, batches, tmp_path):
    settings = {"decay": (0.9, 0.5), "warmup": True}
    whole = averaged(new_trainer, cases, "replay", **settings)
    whole.step.averages.decays[0.5].fill_(0.7)
    whole.fit(batches, 5)
    path = save_training(whole, tmp_path / "state")
    whole.fit(batches, 12)
    resumed = averaged(new_trainer, cases, "replay", **settings)
    load_training(resumed, path)
    resumed.fit(batches, 12)
    assert Snapshot.take(whole.step).differences(Snapshot.take(resumed.step)) == []
    assert resumed.step.averages.decays[0.5] == 0.7


def test_averages_of_half_precision_weights_do_not_stand_still(batches):
    """In bfloat16, 1 + 0.001 * 0.5 is 1 again: an average kept there would never move."""
    model = nn.Linear(8, 4).bfloat16()
    averages = WeightAverages(model, 0.999)
    first = averages.weights()["weight"].clone()
    model.weight.data.add_(0.5)
    averages.update()
    torch.testing.assert_close(averages.weights()["weight"] - first, torch.full((4, 8), 0.0005), rtol=0.2, atol=0)
    averages.copy_into_model()
    assert torch.equal(model.weight, averages.weights()["weight"].bfloat16())


@pytest.mark.parametrize("decay", [1.0, 0.0, -1, (), (0.9, 0.9), (0.9, 1.5)])
def test_decays_out_of_range_are_refused(decay):
    with pytest.raises(UserInputError, match=r"WeightAverages: decay"):
        WeightAverages(nn.Linear(2, 2), decay)
    with pytest.raises(UserInputError, match=r"no averages of decay 0\.5; choose from 0\.9"):
        WeightAverages(nn.Linear(2, 2), 0.9).weights(0.5)


def test_a_rate_in_a_tensor_gives_the_bits_of_a_rate_that_is_a_number(batches):
    """The kernels of the CPU compute with a rate in double precision; 0.003 rounded to float32 would be another rate."""
    ends = []
    for as_number in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9, fused=True) if as_number else sgd(model.parameters(), 0.003, 0.9)
        )
        for number in range(20):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batches(number)["x"]), batches(number)["y"]).backward()
            optimizer.step()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


def test_an_evaluation_may_weigh_its_batches(new_trainer, cases, batches):
    trainer = new_trainer(cases["mlp"], "eager")
    single = [trainer.evaluate([batches(number)]) for number in (1, 2)]
    assert trainer.evaluate([batches(1), batches(2)], [3, 1]) == pytest.approx((3 * single[0] + single[1]) / 4)
    with pytest.raises(UserInputError, match="1 weights were given for 2 batches"):
        trainer.evaluate([batches(1), batches(2)], [3])


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_averages_stand_under_the_masks_and_global_scales_follow_them(new_trainer, cases, batches, mode):
    plain = new_trainer(cases["mlp"], mode).step
    pruning = MagnitudePruningModifier(targets=["first"], final_sparsity=0.5, start=2, end=6, update=1, leave_enabled=True)
    rounding = QuantizationModifier(targets=["last"], scheme="NVFP4A16", start=2)
    session = Session(State(plain.model), [pruning, rounding])
    session.initialize()
    step = TrainStep(plain.model, plain.loss_fn, plain.optimizer, session, averages=WeightAverages(plain.model, 0.9))
    trainer = Trainer(step, mode, audit_every=0)
    trainer.fit(batches, 12)
    first, last = step.model.first, step.model.last
    before, scale = Snapshot.take(step), rounding.global_scale("last").clone()
    with step.averages.applied():
        assert float((first.weight == 0).float().mean()) == 0.5
        assert torch.equal(rounding.global_scale("last"), 448 * 6 / last.weight.abs().amax().reshape(1))
        assert not torch.equal(rounding.global_scale("last"), scale)
    assert before.differences(Snapshot.take(step)) == [] and torch.equal(rounding.global_scale("last"), scale)
    step.averages.copy_into_model()
    assert float((first.weight == 0).float().mean()) == 0.5


@pytest.mark.parametrize("mode", ["eager", "replay"])
@pytest.mark.parametrize("end", [5.5, 6])
def test_averages_have_the_masks_that_the_last_step_had(new_trainer, cases, batches, mode, end):
    plain = new_trainer(cases["mlp"], mode).step
    pruning = MagnitudePruningModifier(targets=["first"], final_sparsity=0.5, start=0, end=end)
    with torch.no_grad():
        plain.model.last.weight[0] = 0
    keeping = ConstantPruningModifier(targets=["last"], start=0, end=end)
    session = Session(State(plain.model), [pruning, keeping])
    session.initialize()
    averages = WeightAverages(plain.model, 0.9)
    trainer = Trainer(TrainStep(plain.model, plain.loss_fn, plain.optimizer, session, averages=averages), mode, audit_every=0)
    trainer.fit(batches, 6)
    first, last = plain.model.first.weight, plain.model.last.weight
    with averages.applied():
        assert float((first == 0).float().mean()) == 0.5 and not last[0].any()
    trainer.fit(batches, 7)
    assert float((first == 0).float().mean()) < 0.5 and last[0].any()  # free again
    averages.copy_into_model()
    assert float((first == 0).float().mean()) < 0.5 and last[0].any()


@pytest.mark.parametrize("mode", ["eager", "capture", "replay"])
def test_averages_follow_the_parameter_that_stands_under_a_name(batches, mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4))
    averages = WeightAverages(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(TrainStep(model, lambda m, batch: cross_entropy(m(batch["x"]), batch["y"]), optimizer, averages=averages), mode)
    expected = model[0].weight.detach().clone()
    for number in range(8):
        if number == 4:
            model[0].weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, 8))
            trainer.forget_plans()
        trainer.train_step(batches(number))
        expected.lerp_(model[0].weight.detach(), 0.5)
    assert torch.allclose(averages.weights()["0.weight"], expected, atol=1e-6)
    with averages.applied():
        assert torch.equal(model[0].weight, averages.weights()["0.weight"])
    model[0].weight = nn.Parameter(torch.ones(2, 8))
    with pytest.raises(UserInputError, match=r"WeightAverages: 0\.weight is gone or of another shape; make new averages"):
        averages.update()
