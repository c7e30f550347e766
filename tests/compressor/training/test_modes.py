"""A step means the same in eager, capture and replay: all state, every loss and the random generators, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from compressor.errors import BindError, ProofError, UserInputError
from compressor.training import InputBuffers, Snapshot, Trainer, TrainStep, adamw, sgd, warmup_cosine

SETTINGS = {
    "plain": {},
    "sgd": {"optimizer": "sgd"},
    "autocast": {"autocast": torch.bfloat16},
    "everything": {"accumulate": 2, "clip_norm": 0.5, "ema": True, "schedule": True, "trainer": {"audit_every": 7}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("name", ["mlp", "llama", "gpt2", "bert"])
def test_twenty_steps_are_equal_bit_for_bit_in_all_modes(run_mode, cases, name, settings):
    _, eager, losses = run_mode(cases[name], "eager", **settings)
    for mode in ("capture", "replay"):
        trainer, state, others = run_mode(cases[name], mode, **settings)
        assert eager.differences(state) == []
        assert losses == others
        assert trainer.last_action == mode
    assert len(set(losses)) == 20


def test_the_comparison_sees_one_flipped_bit(run_mode, cases):
    _, eager, _ = run_mode(cases["mlp"], "eager", 3)
    trainer, state, _ = run_mode(cases["mlp"], "eager", 3)
    assert eager.differences(state) == []
    state.tensors["opt.exp_avg:first.weight"].view(torch.int32)[0, 0] ^= 1
    assert len(eager.differences(state)) == 1 and "opt.exp_avg:first.weight: 1 of 128" in eager.differences(state)[0]
    trainer.train_step({"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.int64)})


def test_each_shape_gets_a_plan_of_its_own_and_stays_equal(new_trainer, cases, batches):
    rows = [4, 6, 4, 6, 4, 6, 4, 6, 4, 4, 6, 6, 6]
    losses = {}
    for mode in ("eager", "replay"):
        trainer = new_trainer(cases["mlp"], mode)
        losses[mode] = [trainer.train_step(batches(number, count)).item() for number, count in enumerate(rows)]
    assert losses["eager"] == losses["replay"]
    assert len(trainer.plans) == 2


def test_warm_up_capture_proof_and_replay_come_in_this_order(new_trainer, cases, batches):
    trainer = new_trainer(cases["mlp"], "replay", trainer={"warmup": 3, "audit_every": 8})
    actions = []
    for number in range(14):
        trainer.train_step(batches(number))
        actions.append(trainer.last_action)
    assert actions == ["warm-up"] * 3 + ["capture", "prove"] + ["replay"] * 7 + ["audit", "replay"]


def test_a_proof_on_the_captured_batch_is_made_up_for_with_another(new_trainer, cases, batches):
    trainer = new_trainer(cases["mlp"], "replay")
    actions = []
    for number in (0, 0, 0, 0, 0, 1, 2):
        trainer.train_step(batches(number))
        actions.append(trainer.last_action)
    assert actions == ["warm-up", "warm-up", "capture", "prove", "replay", "audit", "replay"]


def test_a_returned_loss_is_not_overwritten_by_the_next_step(new_trainer, cases, batches):
    trainer = new_trainer(cases["mlp"], "replay")
    losses = [trainer.train_step(batches(number)) for number in range(8)]
    kept = [loss.item() for loss in losses]
    trainer.train_step(batches(9))
    assert [loss.item() for loss in losses] == kept and len(set(kept)) == 8


def test_evaluation_between_steps_leaves_no_trace(new_trainer, cases, batches):
    ends = {}
    for evaluates in (False, True):
        trainer = new_trainer(cases["mlp"], "replay")
        for number in range(8):
            trainer.train_step(batches(number))
            if evaluates:
                frozen = trainer.step.model.norm
                frozen.eval()
                assert trainer.evaluate([batches(100), batches(101)]) == trainer.evaluate([batches(100), batches(101)])
                assert not frozen.training and trainer.step.model.training
                frozen.train()
        ends[evaluates] = [p.tolist() for p in trainer.step.model.parameters()], torch.get_rng_state().tolist()
    assert ends[False] == ends[True]
    with pytest.raises(UserInputError, match="no batch was given"):
        trainer.evaluate([])


def test_averages_follow_their_formula_and_can_be_applied(new_trainer, cases, batches):
    trainer = new_trainer(cases["mlp"], "replay", ema=True)
    weight, expected = trainer.step.model.first.weight, trainer.step.model.first.weight.detach().clone()
    for number in range(8):
        trainer.train_step(batches(number))
        expected = expected.lerp(weight.detach(), 1 - 0.9)
    torch.testing.assert_close(trainer.step.averages.weights()["first.weight"], expected, rtol=0, atol=1e-6)
    with trainer.step.averages.applied():
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-6)
    trainer.train_step(batches(8))
    assert trainer.last_action == "replay"


def test_the_schedule_sets_the_rates_in_place(new_trainer, cases, batches):
    trainer = new_trainer(cases["mlp"], "replay", schedule=True)
    rate, seen = trainer.step.optimizer.param_groups[0]["lr"], []
    for number in range(6):
        trainer.train_step(batches(number))
        seen.append(rate.item())
    factor = warmup_cosine(3, 20)
    assert seen == pytest.approx([1e-2 * factor(number) for number in range(6)])
    assert [factor(0), factor(2), factor(20)] == pytest.approx([1 / 3, 1, 0])
    with pytest.raises(UserInputError, match="warmup_steps=5 does not fit"):
        warmup_cosine(5, 5)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -0.5, "0.5", None])
def test_a_schedule_that_gives_no_factor_is_refused_before_the_step(factor, new_trainer, cases, batches):
    step = new_trainer(cases["mlp"], "eager").step
    trainer = Trainer(step, schedule=lambda number: factor if number else 1.0)
    trainer.train_step(batches(0))
    before = Snapshot.take(step)
    with pytest.raises(UserInputError, match=r"schedule\(1\): .*(no factor of a learning rate|was given, where a number)"):
        trainer.train_step(batches(1))
    assert trainer.num_steps == 1 and before.differences(Snapshot.take(step)) == []


def test_accumulation_is_the_mean_of_its_micro_batches(new_trainer, cases, batches):
    one, two = (new_trainer(cases["mlp"], "eager", accumulate=count) for count in (1, 2))
    for trainer in (one, two):
        trainer.step.model.eval()
    parts = [batches(0), batches(1)]
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    torch.testing.assert_close(one.train_step(joined), two.train_step(parts))
    torch.testing.assert_close(one.step.model.first.weight.grad, two.step.model.first.weight.grad)
    with pytest.raises(UserInputError, match="3 micro-batches given for accumulate=2"):
        two.train_step([batches(0)] * 3)


def test_clipping_bounds_the_norm_of_all_gradients(new_trainer, cases, batches):
    trainer = new_trainer(cases["mlp"], "replay", clip_norm=1e-3)
    for number in range(6):
        trainer.train_step(batches(number))
        norm = torch.cat([p.grad.flatten() for p in trainer.step.trained]).norm()
        assert norm <= 1.001e-3


def test_fit_goes_on_where_it_stood_and_shows_what_it_does(new_trainer, cases, batches):
    notes = []

    class Bar:
        def task(self, description, total):
            from contextlib import nullcontext

            notes.append((description, total))
            return nullcontext(self)

        def advance(self, amount=1, note=None):
            notes.append(note)

    trainer = new_trainer(cases["mlp"], "replay", trainer={"progress": Bar()})
    assert len(trainer.fit(batches, 4)) == 4
    seen = []
    assert len(trainer.fit(batches, 7, each=lambda number, loss: seen.append(number))) == 3 and seen == [4, 5, 6]
    assert notes[0] == ("train", 4) and notes[5] == ("train", 7)
    assert all(word in notes[-1] for word in ("loss ", "lr 1.0e-02", "tokens/s", "replay"))


def test_modifiers_act_alike_and_each_transition_gets_a_plan(scaled_trainer, batches):
    ends = {}
    for mode in ("eager", "capture", "replay"):
        trainer = scaled_trainer(mode)
        ends[mode] = [trainer.train_step(batches(number)).item() for number in range(24)]
        trainer.step.session.finalize()
    assert ends["eager"] == ends["capture"] == ends["replay"]
    assert len(trainer.plans) == 3


def test_unused_parameters_have_gradients_of_zero(mlp_trainer, cases, batches):
    module = cases["mlp"].make()
    module.unused = torch.nn.Linear(2, 2)
    trainer = mlp_trainer(module)
    for number in range(6):
        trainer.train_step(batches(number))
    assert torch.equal(module.unused.weight.grad, torch.zeros(2, 2))


def test_constants_made_inside_the_step_start_afresh_in_every_replay(mlp_trainer, batches):
    def loss_fn(model, batch):
        total = torch.tensor(0.25)
        total += model(batch["x"]).square().mean()
        return total

    eager, replay = (mlp_trainer(loss_fn=loss_fn, mode=mode) for mode in ("eager", "replay"))
    torch.manual_seed(3)
    want = [eager.train_step(batches(number)).item() for number in range(8)]
    torch.manual_seed(3)
    assert [replay.train_step(batches(number)).item() for number in range(8)] == want


def test_a_batch_binds_only_with_equal_metadata(batches):
    buffers = InputBuffers({"x": torch.zeros(4, 8), "flag": True})
    buffers.bind({"flag": True, "x": torch.ones(4, 8)})
    assert buffers.batch["x"].sum() == 32
    for batch, match in (
        ({"x": torch.ones(1, 8), "flag": True}, r"batch\['x'\]: float32 \[1, 8\] on cpu was given for .* float32 \[4, 8\]"),
        ({"x": torch.ones(4, 8).double(), "flag": True}, "float64"),
        ({"x": torch.ones(4, 8), "flag": False}, "bool False was given for .* bool True"),
        ({"x": torch.ones(4, 8)}, r"\['flag'\]: nothing was given"),
        ({"x": torch.ones(4, 8), "flag": object()}, "object is neither a tensor nor a constant"),
        ({"x": torch.eye(4).to_sparse(), "flag": True}, "layout torch.sparse_coo"),
    ):
        with pytest.raises(BindError, match=match):
            buffers.bind(batch)
    assert buffers.batch["x"].sum() == 32


LAYOUTS = {
    "a slice of columns": lambda whole, number: whole[number : number + 4, :8],
    "transposed": lambda whole, number: whole[number : number + 8, :4].t(),
    "expanded": lambda whole, number: whole[number, :8].expand(4, 8),
    "another offset": lambda whole, number: whole[number : number + 4, number : number + 8],
    "windows": lambda whole, number: whole[number, :11].unfold(0, 8, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_any_layout_are_equal_in_all_modes(mlp_trainer, layout):
    whole = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    ends = {}
    for mode in ("eager", "capture", "replay"):
        trainer = mlp_trainer(loss_fn=lambda model, batch: (model(batch) * batch.sum()).square().mean(), mode=mode, audit_every=1)
        losses = [trainer.train_step(LAYOUTS[layout](whole, number)).item() for number in range(8)]
        ends[mode] = losses, [parameter.detach().clone() for parameter in trainer.step.model.parameters()]
    for mode in ("capture", "replay"):
        assert ends["eager"][0] == ends[mode][0] and all(map(torch.equal, ends["eager"][1], ends[mode][1]))


def past_its_own(model, batch):
    return model(batch["x"].as_strided((4, 8), (8, 1), 0)).square().mean()


def state_in_the_batch(model, batch):
    model.count.add_(1.0)
    return (model(batch["x"]) * batch["count"]).square().mean()


@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize("loss_fn", [past_its_own, state_in_the_batch])
def test_a_batch_that_a_copy_does_not_stand_for_is_refused_and_left_as_it_was(mlp_trainer, cases, loss_fn, mode):
    module, whole = cases["mlp"].make(), torch.randn(24, 8)
    module.register_buffer("count", torch.zeros(()))
    trainer, before = mlp_trainer(module, loss_fn, mode=mode), whole.clone()
    own = {"count": module.count} if loss_fn is state_in_the_batch else {}
    with pytest.raises((ProofError, BindError), match=r"shares (its )?memory with .*the step writes"):
        for number in range(6):
            trainer.train_step({"x": whole[number : number + 4], **own})
    assert trainer.num_steps == 2 == int(module.count) or loss_fn is past_its_own
    assert torch.equal(whole, before)


def test_sparse_gradients_are_refused_before_the_first_step(cases):
    loss_fn = cases["mlp"].loss_fn
    table = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 2))
    with pytest.raises(UserInputError, match=r"0: Embedding\(sparse=True\) gives sparse gradients"):
        TrainStep(table, loss_fn, adamw(table.parameters()))
    TrainStep(table, loss_fn, adamw(table[1].parameters()))
    with pytest.raises(UserInputError, match="SparseAdam takes sparse gradients"):
        TrainStep(table, loss_fn, torch.optim.SparseAdam(list(table.parameters())))


def test_settings_out_of_range_are_refused(new_trainer, cases):
    step = new_trainer(cases["mlp"], "eager").step
    for settings, match in (
        ({"mode": "fast"}, "mode='fast' does not exist"),
        ({"warmup": 0}, "warmup=0 is below 1"),
        ({"max_plans": 0}, "max_plans=0"),
    ):
        with pytest.raises(UserInputError, match=match):
            Trainer(step, **settings)
    wrong = (
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"autocast": torch.float64}, "autocast=torch.float64 is no dtype of torch.autocast"),
        ({"autocast": "bf16"}, "autocast='bf16' is no dtype"),
    )
    for settings, match in wrong:
        with pytest.raises(UserInputError, match=match):
            TrainStep(step.model, step.loss_fn, step.optimizer, **settings)
    for parts, match in (
        ((None, step.loss_fn, step.optimizer), "model is of NoneType"),
        ((step.model, 1.0, step.optimizer), "loss_fn is of float"),
        ((step.model, step.loss_fn, [step.optimizer]), "optimizer is of list"),
    ):
        with pytest.raises(UserInputError, match=match):
            TrainStep(*parts)
    for batches, num_steps, match in (
        ([cases["mlp"].batch_at(0)], 1, "batch_at: .* a function from the number of a step"),
        (cases["mlp"].batch_at, 2.5, "num_steps: 2.5 was given, where a whole number belongs"),
        (cases["mlp"].batch_at, -1, "num_steps=-1"),
    ):
        with pytest.raises(UserInputError, match=match):
            Trainer(step, "eager").fit(batches, num_steps)
    with pytest.raises(UserInputError, match=r"torch\.complex64 tensor of shape \[\], which is no scalar loss"):
        TrainStep(step.model, lambda model, batch: model(batch).sum() * 1j, step.optimizer)(torch.zeros(4, 8))
    fused = torch.optim.SGD(step.model.parameters(), lr=0.1, fused=True)
    with pytest.raises(UserInputError, match=r"lr=0\.1 is a Python number"):
        Trainer(TrainStep(step.model, step.loss_fn, fused), schedule=lambda number: 1.0)
    with pytest.raises(UserInputError, match="no scalar loss"):
        TrainStep(step.model, lambda model, batch: model(batch), step.optimizer)(torch.zeros(4, 8))
    for make in (adamw, sgd):
        with pytest.raises(UserInputError, match="lr=-1"):
            make(step.model.parameters(), lr=-1)
    assert random.random() >= 0
