"""Pruning follows its schedule exactly, in eager, capture and replay alike; a run resumed in the midst of it goes on bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compressor.algorithms.pruning.magnitude import num_zeros
from compressor.errors import LifecycleError, RecipeError, SchemeError, TargetError
from compressor.lifecycle import EventType, Modifier, Session, State
from compressor.modifiers.pruning.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from compressor.modifiers.pruning.sparsegpt import SparseGPTModifier
from compressor.recipe import load_recipe
from compressor.training import Snapshot, Trainer, TrainStep, load_training, save_training

NUM_STEPS, START, END, UPDATE = 60, 12, 40, 7
TIMES = {"start": START, "end": END, "update": UPDATE}
GLOBAL = "polynomial_decay, global"
# Recording every step takes long, so not every pruner is recorded.
CAPTURED = (("mlp", "linear"), ("mlp", "2:4"), ("mlp", GLOBAL), ("llama", "2:4"))
PRUNERS: dict[str, dict[str, Any]] = {
    "linear": {"update_scheduler": "linear", "final_sparsity": 0.7},
    "cubic": {"init_sparsity": 0.1, "final_sparsity": 0.8},
    "cubic, left on": {"final_sparsity": 0.8, "leave_enabled": True},
    "polynomial": {"update_scheduler": "polynomial", "scheduler_args": {"exponent": 3}, "final_sparsity": 0.6},
    GLOBAL: {"update_scheduler": "polynomial_decay", "final_sparsity": 0.6, "apply_globally": True},
    "2:4": {"mask_structure": "2:4", "final_sparsity": 0.5, "leave_enabled": True},
    "1:4, linear": {"mask_structure": "1:4", "final_sparsity": 0.75, "update_scheduler": "linear"},
    "3:8": {"mask_structure": "3:8", "final_sparsity": 0.625},
}


def make(cases, new_trainer, name: str, mode: str, modifiers: list[Modifier], **settings: Any) -> Trainer:
    """A fresh trainer with a session of modifiers."""
    plain = new_trainer(cases[name], mode, trainer={"max_plans": 16}).step
    session = Session(State(plain.model), modifiers)
    session.initialize()
    return Trainer(TrainStep(plain.model, plain.loss_fn, plain.optimizer, session, **settings), mode, max_plans=16, audit_every=0)


def run(cases, new_trainer, name: str, mode: str, modifiers: list[Modifier], num_steps: int = NUM_STEPS) -> tuple[Trainer, list[Any]]:
    """Train, and take down what every step did."""
    trainer, seen = make(cases, new_trainer, name, mode, modifiers), []
    for step in range(num_steps):
        loss = trainer.train_step(cases[name].batch_at(step))
        seen.append((loss.item(), trainer.last_action))
    return trainer, seen


def zeros(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: module.weight == 0 for name, module in trainer.step.model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "pruner"),
    [*(("mlp", pruner) for pruner in PRUNERS), ("llama", "linear"), ("llama", "2:4"), ("llama", GLOBAL)],
)
def test_sixty_steps_are_equal_in_all_modes(cases, new_trainer, name, pruner):
    settings = PRUNERS[pruner]
    modes = ("eager", "capture", "replay") if (name, pruner) in CAPTURED else ("eager", "replay")
    ends, losses = {}, {}
    for mode in modes:
        trainer, seen = run(cases, new_trainer, name, mode, [MagnitudePruningModifier(**settings, **TIMES)])
        ends[mode], losses[mode] = Snapshot.take(trainer.step), [loss for loss, _ in seen]
    assert all(losses["eager"] == losses[mode] and ends["eager"].differences(ends[mode]) == [] for mode in modes)
    captured = [step for step, (_, action) in enumerate(seen) if action == "capture"]
    assert captured == [2, START + 2, END + 2]  # start and end are STRUCTURE, the updates between are DATA
    assert seen[-1][1] == "replay" and len(trainer.plans) == 3


@pytest.mark.parametrize("settings", PRUNERS.values(), ids=PRUNERS.keys())
def test_every_update_has_the_sparsity_of_the_formula(cases, new_trainer, settings):
    modifier = MagnitudePruningModifier(**settings, **TIMES)
    trainer = make(cases, new_trainer, "mlp", "replay", [modifier])
    shape = {"linear": lambda x: x, "polynomial": lambda x: x**3, "polynomial_decay": lambda x: 1 - (1 - x) ** 2}
    formula = shape.get(modifier.update_scheduler, lambda x: 1 - (1 - x) ** 3)
    low, high = modifier.init_sparsity, modifier.final_sparsity
    for step in range(NUM_STEPS):
        trainer.train_step(cases["mlp"].batch_at(step))
        now = zeros(trainer)
        total = sum(mask.numel() for mask in now.values())
        if step < START:
            assert not any(bool(mask.any()) for mask in now.values())
            continue
        if step >= END and not modifier.leave_enabled:
            continue
        updated = START + (step - START) // UPDATE * UPDATE
        wanted = low + (high - low) * formula((updated - START) / (END - START)) if step < END - 1 else high
        if modifier.apply_globally:
            assert sum(int(mask.sum()) for mask in now.values()) == num_zeros(wanted, total)
        else:
            assert {name: int(mask.sum()) for name, mask in now.items()} == {n: num_zeros(wanted, m.numel()) for n, m in now.items()}
        if modifier.mask_structure != "unstructured":
            keep, of = map(int, modifier.mask_structure.split(":"))
            runs = [mask.unflatten(1, (-1, of)).sum(-1) for mask in now.values()]
            assert all(int(counts.max()) <= of - keep for counts in runs)
            assert step < END - 1 or all(bool((counts == of - keep).all()) for counts in runs)
    assert modifier.sparsity == high
    if not modifier.leave_enabled:
        assert sum(int(mask.sum()) for mask in zeros(trainer).values()) < num_zeros(high, total)  # they grow again
    trainer.step.session.finalize()
    report = trainer.step.session.state.report
    assert set(report.modules) == {"first", "last"}
    assert report.modules["first"].details["sparsity"] == int(now["first"].sum()) / now["first"].numel()
    assert bool(report.notes) is not modifier.leave_enabled and all("set leave_enabled" in note for note in report.notes)


def test_epochs_as_fractions_drive_the_schedule(cases, new_trainer):
    plain = new_trainer(cases["mlp"], "eager").step
    modifier = MagnitudePruningModifier(final_sparsity=0.8, update_scheduler="linear", start=0.5, end=1.5, update=0.25, leave_enabled=True)
    session = Session(State(plain.model), [modifier], steps_per_epoch=10)
    session.initialize()
    trainer, seen = Trainer(TrainStep(plain.model, plain.loss_fn, plain.optimizer, session), "eager"), []
    for step in range(20):
        trainer.train_step(cases["mlp"].batch_at(step))
        seen.append(round(modifier.sparsity, 9))
    # updates at 0.5, 0.8 (the first batch from 0.75 on), 1.0 and 1.3; then the end
    assert seen == [0.0] * 8 + [0.24] * 2 + [0.4] * 3 + [0.64] * 1 + [0.8] * 6


def test_zeros_are_plus_zero_and_their_gradients_and_moments_die(cases, new_trainer):
    modifier = MagnitudePruningModifier(final_sparsity=0.5, start=0, end=1, leave_enabled=True)
    trainer, _ = run(cases, new_trainer, "mlp", "replay", [modifier], 30)
    weight = trainer.step.model.first.weight
    mask = modifier.training_tensors()["first.pruned"]
    assert int(mask.sum()) == weight.numel() // 2
    assert weight[mask].abs().view(torch.int32).tolist() == weight[mask].detach().view(torch.int32).tolist() == [0] * int(mask.sum())
    assert not weight.grad[mask].any() and weight.grad[~mask].any()
    assert float(trainer.step.optimizer.state[weight]["exp_avg"][mask].abs().max()) < 1e-2


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_gradients_of_pruned_weights_are_no_part_of_the_norm_that_is_clipped(cases, new_trainer, mode):
    modifier = MagnitudePruningModifier(final_sparsity=0.9, start=0, end=1, leave_enabled=True)
    trainer = make(cases, new_trainer, "mlp", mode, [modifier], clip_norm=0.01)
    trainer.fit(cases["mlp"].batch_at, 8)
    norm = torch.stack([parameter.grad.square().sum() for parameter in trainer.step.model.parameters()]).sum().sqrt()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_only_zeros_are_kept_and_the_smallest_other_weight_trains(cases, new_trainer):
    plain = new_trainer(cases["mlp"], "eager").step
    with torch.no_grad():
        plain.model.last.weight[:, :2] = torch.tensor([0.0, 1e-30])
    session = Session(State(plain.model), [ConstantPruningModifier(start=0)])
    session.initialize()
    Trainer(TrainStep(plain.model, plain.loss_fn, plain.optimizer, session), "eager").fit(cases["mlp"].batch_at, 5)
    assert not plain.model.last.weight[:, 0].any() and plain.model.last.weight[:, 1].abs().min() > 1e-6


def test_odd_sizes_bring_no_note_about_zeros_that_cannot_be():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    session = Session(State(model), [MagnitudePruningModifier(final_sparsity=0.5)])
    session.initialize()
    session.send(EventType.CALIBRATION_START)
    session.send(EventType.CALIBRATION_END)
    session.finalize()
    assert [int((layer.weight == 0).sum()) for layer in model] == [4, 4, 1] and session.state.report.notes == []


@pytest.mark.parametrize(("name", "mode"), [("mlp", "capture"), ("mlp", "replay"), ("llama", "replay")])
def test_zeros_of_a_sparse_model_stay_while_it_trains(cases, new_trainer, name, mode):
    pruned = MagnitudePruningModifier(final_sparsity=0.5, start=3, end=10, update=2)
    kept = ConstantPruningModifier(start=10, end=50)
    trainer = make(cases, new_trainer, name, mode, [pruned, kept])
    found = None
    for step in range(NUM_STEPS):
        trainer.train_step(cases[name].batch_at(step))
        if step in (9, 49):
            found, before = zeros(trainer), found
            assert before is None or all(torch.equal(before[name], mask) for name, mask in found.items())
    assert any(not torch.equal(found[name], mask) for name, mask in zeros(trainer).items())  # free again after its end
    if mode == "replay":
        assert len(trainer.plans) == 4
    eager, _ = run(cases, new_trainer, name, "eager", [modifier.model_copy(deep=True) for modifier in _fresh(pruned, kept)])
    assert Snapshot.take(eager.step).differences(Snapshot.take(trainer.step)) == []


def _fresh(*modifiers: Modifier) -> list[Modifier]:
    return [type(modifier)(**modifier.model_dump(exclude={"index"})) for modifier in modifiers]


@pytest.mark.parametrize("saved_at", [START, 26, 33, 45])
@pytest.mark.parametrize("name", ["2:4", GLOBAL, "cubic"])
def test_a_resumed_run_goes_on_bit_for_bit(cases, new_trainer, tmp_path, name, saved_at):
    def trainer(mode: str) -> Trainer:
        return make(cases, new_trainer, "mlp", mode, [MagnitudePruningModifier(**PRUNERS[name], **TIMES)])

    whole = trainer("eager")
    losses = whole.fit(cases["mlp"].batch_at, NUM_STEPS)
    end = Snapshot.take(whole.step)
    first = trainer("replay")
    first.fit(cases["mlp"].batch_at, saved_at)
    path = save_training(first, tmp_path / "state")
    second = trainer("replay")
    load_training(second, path)
    assert second.fit(cases["mlp"].batch_at, NUM_STEPS) == losses[saved_at:]
    assert end.differences(Snapshot.take(second.step)) == []


def test_a_mask_that_the_step_forgets_to_apply_is_seen(cases, new_trainer, monkeypatch):
    monkeypatch.setattr(MagnitudePruningModifier, "on_event", lambda self, state, event: None)
    modifier = MagnitudePruningModifier(final_sparsity=0.5, start=0, end=20)
    trainer, _ = run(cases, new_trainer, "mlp", "eager", [modifier], 10)
    assert sum(int(mask.sum()) for mask in zeros(trainer).values()) < num_zeros(modifier.sparsity, 16 * 8 + 4 * 16)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {}, "the whole run and the whole run"),
        (TIMES, {"start": 20, "end": 30}, "20 to 30 and 12 to 40"),
        ({**TIMES, "leave_enabled": True}, {"start": 40, "end": 50}, "40 to 50 and from 12 on"),
        ({"start": 40, "end": 50, "leave_enabled": True}, TIMES, None),
        ({"targets": ["first"]}, {"targets": ["last"]}, None),
    ],
)
def test_two_pruners_share_no_weight_at_one_time(cases, new_trainer, first, second, said):
    modifiers = [MagnitudePruningModifier(final_sparsity=share, **times) for share, times in ((0.5, first), (0.25, second))]
    if said is None:
        make(cases, new_trainer, "mlp", "eager", modifiers)
        return
    with pytest.raises(TargetError, match=rf"MagnitudePruningModifier.*: first, one of 2, .*{said}.*begin where the other is over"):
        make(cases, new_trainer, "mlp", "eager", modifiers)


def test_one_pruner_takes_up_where_another_is_over(cases, new_trainer):
    later = MagnitudePruningModifier(init_sparsity=0.25, final_sparsity=0.5, start=10, end=20, leave_enabled=True)
    trainer = make(cases, new_trainer, "mlp", "replay", [MagnitudePruningModifier(final_sparsity=0.25, start=2, end=10), later])
    shares = []
    for step in range(25):
        trainer.train_step(cases["mlp"].batch_at(step))
        shares.append(float(zeros(trainer)["first"].float().mean()))
    assert shares[8:11] == [pytest.approx(0.25, abs=0.01)] * 3 and shares[-1] == 0.5
    trainer.step.session.finalize()
    assert trainer.step.session.state.report.modules["first"].scheme == "unstructured, 25% zeros, unstructured, 50% zeros"


def test_a_pruned_weight_under_two_names_is_one_weight():
    tied = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    session = Session(State(tied), [MagnitudePruningModifier(final_sparsity=0.5, targets=["0", "1"]) for _ in range(2)])
    with pytest.raises(TargetError, match="is set to zero by"):
        session.initialize()
    assert session.state.phases == {}


@pytest.mark.parametrize(("targets", "ignore"), [(["1"], []), (["Linear", "Embedding"], ["0"])])
def test_a_weight_that_a_module_outside_of_the_targets_shares_is_not_pruned(targets, ignore):
    tied = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    modifier = MagnitudePruningModifier(final_sparsity=0.5, targets=targets, ignore=ignore)
    with pytest.raises(TargetError, match=r"^1: its weight is tied to 0\.weight, which is no target"):
        Session(State(tied), [modifier]).initialize()
    shared = nn.Sequential(tied[1], nn.ReLU(), tied[1])  # one module under two names is one target
    assert list(MagnitudePruningModifier(final_sparsity=0.5).prunable(shared)) == ["0"]


@pytest.mark.parametrize("kind", [MagnitudePruningModifier, ConstantPruningModifier, SparseGPTModifier])
@pytest.mark.parametrize("name", ["the whole of it", "rows of both", "a buffer", "of the model itself"])
def test_a_weight_whose_memory_a_module_outside_of_the_targets_shares_is_not_pruned(name, kind):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    rows = torch.randn(6, 4)
    model[0].weight = nn.Parameter(rows[:4])
    if name == "a buffer":
        model[1].register_buffer("table", rows[0])
    elif name == "of the model itself":
        model.table = nn.Parameter(rows)
    else:
        model[1].weight = nn.Parameter(rows[:4] if name == "the whole of it" else rows[2:])
    settings = {MagnitudePruningModifier: {"final_sparsity": 0.5}, SparseGPTModifier: {"sparsity": 0.5}}.get(kind, {})
    with pytest.raises(TargetError, match=r"^0: its weight is tied to (1\.weight|1\.table|table), which is no target") as refused:
        Session(State(model), [kind(targets=["0"], **settings)]).initialize()
    assert ("add '1' to targets" in str(refused.value)) == ("1.weight" in str(refused.value)) and "''" not in str(refused.value)


def _bias_in_the_weight(model):
    rows = torch.randn(5, 4)
    model[0].weight, model[0].bias = nn.Parameter(rows[1:]), nn.Parameter(rows[1])


def _bias_across_the_weight(model):
    rows = torch.randn(4, 4)
    model[0].weight, model[0].bias = nn.Parameter(rows), nn.Parameter(rows[:, 2])


def _one_row(model):
    model[0].weight = nn.Parameter(torch.randn(1, 4).expand(4, 4))


def _windows(model):
    model[0].weight = nn.Parameter(torch.randn(7).unfold(0, 4, 1))


def _transposed(model):
    model[0].weight = nn.Parameter(model[1].weight.detach().t())


def _rows_of_both(model):
    rows = torch.randn(6, 4)
    model[0].weight, model[1].weight = nn.Parameter(rows[:4]), nn.Parameter(rows[2:])


def _another_parameter(model):
    model[0].weight = nn.Parameter(model[1].weight.detach())


@pytest.mark.parametrize("kind", [MagnitudePruningModifier, SparseGPTModifier])
@pytest.mark.parametrize(
    ("share", "told"),
    [
        (_bias_in_the_weight, r"^0: its weight lies in the memory of 0\.bias, and more would"),
        (_bias_across_the_weight, r"^0: its weight lies in the memory of 0\.bias, and more would"),
        (_one_row, r"^0: some values of its weight lie in one place"),
        (_windows, r"^0: some values of its weight lie in one place"),
        (_transposed, r"^1: its weight lies in the memory of 0\.weight"),
        (_rows_of_both, r"^1: its weight lies in the memory of 0\.weight"),
        (_another_parameter, r"^1: its weight lies in the memory of 0\.weight"),
    ],
)
def test_weights_of_targets_that_share_memory_would_lose_more_than_was_asked(share, told, kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    share(model)
    settings = {"sparsity": 0.5} if kind is SparseGPTModifier else {"final_sparsity": 0.5}
    with pytest.raises(TargetError, match=told):
        kind(**settings).prunable(model)


def test_a_transposed_weight_of_its_own_is_pruned():
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    model[0].weight = nn.Parameter(torch.randn(8, 12)[1:5, ::2].t())
    assert list(MagnitudePruningModifier(final_sparsity=0.5).prunable(model)) == ["0"]


@pytest.mark.parametrize("dim", [0, 1])
def test_halves_of_one_weight_side_by_side_are_two_weights(dim):
    halves = torch.randn(8, 8).chunk(2, dim)
    model = nn.Sequential(*(nn.Linear(*half.shape[::-1], bias=False) for half in halves))
    for layer, half in zip(model, halves, strict=True):
        layer.weight = nn.Parameter(half)
    assert list(MagnitudePruningModifier(final_sparsity=0.5, targets=["0"]).prunable(model)) == ["0"]


def test_before_the_first_batch_and_after_an_abort_nothing_of_the_model_has_changed(cases, new_trainer):
    trainer = make(cases, new_trainer, "mlp", "eager", [MagnitudePruningModifier(final_sparsity=0.5, start=0, end=9)])
    assert not any(bool(mask.any()) for mask in zeros(trainer).values())
    names = list(trainer.step.model.state_dict())
    trainer.train_step(cases["mlp"].batch_at(0))
    trainer.step.session.abort()
    assert list(trainer.step.model.state_dict()) == names
    assert not any(module._forward_hooks or "forward" in vars(module) for module in trainer.step.model.modules())


def test_a_recipe_in_yaml_trains(cases, new_trainer):
    recipe = load_recipe(
        """
sparse_stage:
  pruning_modifiers:
    MagnitudePruningModifier: {targets: Linear, ignore: [last], init_sparsity: 0.0, final_sparsity: 0.5, start: 2, end: 8, update: 2,
                               mask_structure: '2:4', update_scheduler: cubic, leave_enabled: true}
    ConstantPruningModifier: {targets: 're:.*first', start: 8}
"""
    )
    trainer = make(cases, new_trainer, "mlp", "replay", list(recipe.modifiers))
    trainer.fit(cases["mlp"].batch_at, 20)
    trainer.step.session.finalize()
    assert trainer.step.session.state.report.modules["first"].details["sparsity"] == 0.5
    assert bool((trainer.step.model.first.weight.unflatten(1, (-1, 4)) != 0).sum(-1).eq(2).all())
    assert "last" not in trainer.step.session.state.report.modules


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"final_sparsity": 1.5}, "less than 1"),
        ({"final_sparsity": 0.2, "init_sparsity": 0.5}, "is above final_sparsity"),
        ({"final_sparsity": 0.5, "update_scheduler": "qubic"}, "did you mean 'cubic'"),
        ({"final_sparsity": 0.5, "update_scheduler": "calc(0.5)"}, "does not exist"),
        ({"final_sparsity": 0.5, "scheduler_args": {"exponant": 2}}, "did you mean 'exponent'"),
        ({"final_sparsity": 0.5, "scheduler_args": {"exponent": 0}}, "not positive"),
        ({"final_sparsity": 0.5, "scheduler_args": {"exponent": 3}}, "is for training, which needs a start"),
        ({"final_sparsity": 0.5, "scheduler_args": {"exponent": 2}}, "takes no exponent=2.0; give polynomial_decay"),
        ({"final_sparsity": 0.5, "mask_structure": 124}, "in quotes"),
        ({"final_sparsity": 0.5, "mask_structure": "4:4"}, "all weights or none"),
        ({"final_sparsity": 0.5, "mask_structure": "block_4"}, "does not say two sizes"),
        ({"final_sparsity": 0.5, "mask_structure": "block_0,4"}, "does not say two sizes"),
        ({"final_sparsity": 0.5, "mask_structure": "channels"}, "does not exist"),
        ({"final_sparsity": 0.5, "mask_structure": "filter", "apply_globally": True}, "leave one of the two out"),
        ({"final_sparsity": 0.5, "mask_structure": "1:4"}, "give final_sparsity=0.75"),
        ({"final_sparsity": 0.5, "start": 3}, "give both for training"),
        ({"final_sparsity": 0.5, "start": 5, "end": 5}, "is not before end"),
        ({"final_sparsity": 0.5, "start": -1, "end": 5}, "start=-1 lies before the first step"),
        ({"final_sparsity": 0.5, "start": 0, "end": 5, "update": 0}, "update=0 is no interval"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_do(settings, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe({"a_stage": {"a_modifiers": {"MagnitudePruningModifier": settings}}})


@pytest.mark.parametrize(("structure", "high", "wide"), [("channel", 1, None), ("filter", None, 1), ("block_4,2", 4, 2)])
def test_what_goes_as_a_whole_follows_the_schedule_alike_in_all_modes(cases, new_trainer, structure, high, wide):
    ends = {}
    for mode in ("eager", "replay"):
        modifier = MagnitudePruningModifier(mask_structure=structure, final_sparsity=0.6, leave_enabled=True, **TIMES)
        trainer, seen = run(cases, new_trainer, "mlp", mode, [modifier])
        ends[mode] = Snapshot.take(trainer.step)
    assert ends["eager"].differences(ends["replay"]) == [] and seen[-1][1] == "replay"
    for mask in zeros(trainer).values():
        whole = (
            mask.unfold(0, high or mask.shape[0], high or mask.shape[0])
            .unfold(1, wide or mask.shape[1], wide or mask.shape[1])
            .all(-1)
            .all(-1)
        )
        assert int(whole.sum()) == num_zeros(0.6, whole.numel()) and int(mask.sum()) == int(whole.sum()) * (mask.numel() // whole.numel())
    trainer.step.session.finalize()
    report = trainer.step.session.state.report
    assert not report.notes and all(record.scheme == f"{structure}, 60% zeros" for record in report.modules.values())


def test_what_does_not_fit_the_model_is_refused_before_anything_changes(cases, new_trainer):
    with pytest.raises(SchemeError, match=r"first \[16, 8\].*runs of 3"):
        make(cases, new_trainer, "mlp", "eager", [MagnitudePruningModifier(final_sparsity=1 / 3, mask_structure="2:3")])
    with pytest.raises(SchemeError, match=r"first \[16, 8\].*do not divide into block_3,3"):
        make(cases, new_trainer, "mlp", "eager", [MagnitudePruningModifier(final_sparsity=0.5, mask_structure="block_3,3")])
    with pytest.raises(TargetError, match="no float weight of two dimensions"):
        make(cases, new_trainer, "mlp", "eager", [MagnitudePruningModifier(final_sparsity=0.5, targets=["BatchNorm1d"])])
    tied = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert list(MagnitudePruningModifier(final_sparsity=0.5, targets=["Embedding", "Linear"]).prunable(tied)) == ["0"]
    trainer = make(cases, new_trainer, "mlp", "eager", [MagnitudePruningModifier(final_sparsity=0.5, start=50, end=60)])
    trainer.fit(cases["mlp"].batch_at, 2)
    with pytest.raises(ExceptionGroup) as raised:
        trainer.step.session.finalize()
    assert raised.group_contains(LifecycleError, match="start=50.0 was not reached")
