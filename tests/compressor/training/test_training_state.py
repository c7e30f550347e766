"""A run that is stored and resumed goes on with the same bits, in every mode; what does not fit is refused before anything changes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from compressor import Session, State
from compressor.errors import CheckpointError, ResumeError, UserInputError
from compressor.training import Snapshot, Trainer, TrainStep, WeightAverages, adamw, load_training, save_training

SETTINGS = {"ema": True, "schedule": True, "clip_norm": 1.0}


@pytest.mark.parametrize("mode", ["eager", "replay"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_resumed_run_continues_bit_for_bit(new_trainer, cases, tmp_path, mode, optimizer):
    case = cases["mlp"]
    whole = new_trainer(case, mode, optimizer, **SETTINGS)
    whole_losses = whole.fit(case.batch_at, 16)
    end, python = Snapshot.take(whole.step), random.random()
    first = new_trainer(case, mode, optimizer, **SETTINGS)
    first.fit(case.batch_at, 9)
    path = save_training(first, tmp_path / "state.safetensors")
    first.fit(case.batch_at, 11)  # the part that a kill takes away
    second = new_trainer(case, mode, optimizer, **SETTINGS)
    torch.manual_seed(99)
    random.seed(99)
    load_training(second, path)
    assert second.num_steps == 9
    assert second.fit(case.batch_at, 16) == whole_losses[9:]
    assert end.differences(Snapshot.take(second.step)) == []
    assert random.random() == python
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("saved_at", [5, 12, 19], ids=["before", "within", "after"])
def test_modifiers_stand_where_they_stood(scaled_trainer, batches, tmp_path, saved_at):
    whole = scaled_trainer("eager").fit(batches, 24)
    first = scaled_trainer("replay")
    first.fit(batches, saved_at)
    path = save_training(first, tmp_path / "state")  # before the next trainer seeds the generators
    second = scaled_trainer("replay")
    load_training(second, path)
    assert second.step.session.step == saved_at
    assert second.step.modifiers[0].flags == first.step.modifiers[0].flags
    assert second.fit(batches, 24) == whole[saved_at:]


def test_a_run_can_go_on_in_another_mode(new_trainer, cases, tmp_path):
    case = cases["llama"]
    whole = new_trainer(case, "eager")
    want = whole.fit(case.batch_at, 12)
    first = new_trainer(case, "eager")
    first.fit(case.batch_at, 5)
    second = new_trainer(case, "replay")
    load_training(second, save_training(first, tmp_path / "s"))
    assert second.fit(case.batch_at, 12) == want[5:] and second.last_action == "replay"


def test_what_does_not_fit_is_refused_and_changes_nothing(new_trainer, cases, tmp_path):
    case = cases["mlp"]
    trainer = new_trainer(case, "eager")
    trainer.fit(case.batch_at, 2)
    path = save_training(trainer, tmp_path / "state")
    with pytest.raises(ResumeError, match="has made 2 steps already"):
        load_training(trainer, path)
    (tmp_path / "torn").write_bytes(path.read_bytes()[:1000])
    for file, settings, match in (
        ("torn", {}, "cannot be read as a training state"),
        ("missing", {}, "cannot be read"),
        ("state", {"optimizer": "sgd"}, "stored with AdamW, not with SGD"),
        ("state", {"ema": True}, "lacks average:"),
    ):
        other = new_trainer(case, "eager", **settings)
        before = Snapshot.take(other.step)
        with pytest.raises(ResumeError, match=match):
            load_training(other, tmp_path / file)
        assert before.differences(Snapshot.take(other.step)) == []
    more = new_trainer(case, "eager")
    more.step.optimizer.param_groups[0]["extra"] = 1
    with pytest.raises(ResumeError, match=r"optimizer settings 0\.extra"):
        load_training(more, path)
    wrong = new_trainer(type(case)(lambda: type(case.make())(20), case.loss_fn, case.batch_at), "eager")
    with pytest.raises(ResumeError, match="in another shape"):
        load_training(wrong, path)


def test_a_damaged_state_is_refused_and_notes_come_back(new_trainer, cases, tmp_path):
    case = cases["mlp"]
    trainer = new_trainer(case, "eager")
    trainer.fit(case.batch_at, 2)
    path = save_training(trainer, tmp_path / "state", notes={"losses": [0.1, 2.0]})
    assert load_training(new_trainer(case, "eager"), path) == {"losses": [0.1, 2.0]}
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # one bit of one weight
    path.write_bytes(content)
    with pytest.raises(ResumeError, match="does not hold what was written"):
        load_training(new_trainer(case, "eager"), path)


def test_a_folder_that_is_not_there_is_to_be_made(new_trainer, cases, tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be written .*; make its folder first"):
        save_training(new_trainer(cases["mlp"], "eager"), tmp_path / "none" / "state")


def test_a_state_goes_to_the_modifiers_that_it_came_from(scaled_trainer, batches, tmp_path):
    trainer = scaled_trainer("replay")
    trainer.fit(batches, 10)
    path = save_training(trainer, tmp_path / "state")
    modifier = type(trainer.step.modifiers[0])
    for modifiers, match in (
        (None, "was stored with ScalingModifier, not with no modifiers"),
        ([modifier(start=8, end=16), modifier(start=9)], "not with ScalingModifier, ScalingModifier"),
        ([modifier(start=8, end=17)], "ScalingModifier was stored with end=16.0, not with 17.0"),
    ):
        step = scaled_trainer("replay").step
        session = None if modifiers is None else Session(State(step.model), modifiers)
        if session is not None:
            session.initialize()
        other = Trainer(TrainStep(step.model, step.loss_fn, step.optimizer, session))
        before = Snapshot.take(other.step)
        with pytest.raises(ResumeError, match=match):
            load_training(other, path)
        assert before.differences(Snapshot.take(other.step)) == []


def test_no_bit_of_a_state_can_be_another_one(new_trainer, batches, mlp_trainer, tmp_path):
    trainer = mlp_trainer(nn.Linear(8, 4), mode="eager")
    trainer.fit(batches, 3)
    path = save_training(trainer, tmp_path / "state", notes={"losses": [0.1]})
    content, other = path.read_bytes(), mlp_trainer(nn.Linear(8, 4), mode="eager")
    size = 8 + int.from_bytes(content[:8], "little")
    dense = content.index(b"python_rng") + 200  # then follow thousands of digits
    places = [*range(dense), *range(dense, size, 211), *range(size, len(content), 61)]
    before, python = Snapshot.take(other.step), random.getstate()
    for place in places:
        (tmp_path / "damaged").write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 7)]) + content[place + 1 :])
        with pytest.raises(ResumeError):
            load_training(other, tmp_path / "damaged")
    assert before.differences(Snapshot.take(other.step)) == [] and random.getstate() == python and other.num_steps == 0
    assert len(places) > 400
    assert load_training(other, path) == {"losses": [0.1]}


@pytest.mark.parametrize("was", [b'num_steps\\": 3', b'0.betas\\": [0.9', b"python_rng", b"host_state", b'losses\\": [0.1'])
def test_a_digit_or_a_key_that_changed_is_damage(mlp_trainer, batches, tmp_path, was):
    trainer = mlp_trainer(mode="eager")
    trainer.fit(batches, 3)
    path = save_training(trainer, tmp_path / "state", notes={"losses": [0.1]})
    content = path.read_bytes()
    assert content.count(was) == 1
    path.write_bytes(content.replace(was, was[:-1] + bytes([was[-1] ^ 1])))
    other = mlp_trainer(mode="eager")
    before = Snapshot.take(other.step)
    with pytest.raises(ResumeError, match="does not hold what was written"):
        load_training(other, path)
    assert before.differences(Snapshot.take(other.step)) == [] and not other.step.optimizer.state


def _batch(number):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": (x.sum(1) > 0).long()}


def _loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class Sharing(nn.Linear):
    """Holds what its weight was, which lies in the memory of the weight until the first step."""

    def __init__(self):
        super().__init__(8, 8)
        self.before = self.weight.data

    def forward(self, x):
        self.before = 0.5 * self.before + 0.5 * self.weight.detach()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("first", [Sharing, lambda: nn.utils.spectral_norm(nn.Linear(8, 8))], ids=["own", "spectral norm"])
def test_what_lies_in_the_memory_of_a_parameter_does_not_write_over_it(first, tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(first(), nn.Tanh(), nn.Linear(8, 2))
        return Trainer(TrainStep(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1)))

    one, other = make(), make()
    one.fit(_batch, 5)
    load_training(other, save_training(one, tmp_path / "s"))
    assert all(torch.equal(a, b) for a, b in zip(one.step.model.parameters(), other.step.model.parameters(), strict=True))
    assert one.fit(_batch, 10) == other.fit(_batch, 10)


class Scaled(nn.Module):
    def __init__(self, p=0.1, eps=1e-5, momentum=0.1, scale=1.0, flag=False):
        super().__init__()
        self.layer, self.norm, self.batch_norm = nn.Linear(8, 8), nn.LayerNorm(8, eps=eps), nn.BatchNorm1d(8, momentum=momentum)
        self.drop, self.scale, self.flag = nn.Dropout(p), scale, flag

    def forward(self, x):
        return self.drop(self.batch_norm(self.norm(self.layer(x)))) * (2 if self.flag else self.scale)


@pytest.mark.parametrize("other", [{"p": 0.5}, {"eps": 0.1}, {"momentum": 0.5}, {"scale": 2.0}, {"flag": True}])
def test_a_model_that_says_other_settings_of_itself_is_refused(other, tmp_path):
    def make(**settings):
        torch.manual_seed(0)
        model = Scaled(**settings)
        return Trainer(TrainStep(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1)))

    path = save_training(make(), tmp_path / "s")
    load_training(make(), path)
    with pytest.raises(ResumeError, match="settings of"):
        load_training(make(**other), path)


OTHERS = {
    "lr": {"lr": 1e-3},
    "betas": {"betas": (0.8, 0.9)},
    "eps": {"eps": 1e-4},
    "weight_decay": {"weight_decay": 0.2},
    "averages": {"warmup": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_trainer_made_with_other_settings_is_refused(name, tmp_path):
    """The state would go on with its own, and nobody would be told that what was asked for is not what runs."""

    def make(warmup=False, lr=0.01, **settings):
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        averages = WeightAverages(model, 0.9, warmup=warmup)
        return Trainer(TrainStep(model, _loss, adamw(model.parameters(), lr=lr, **settings), averages=averages))

    one = make()
    one.fit(_batch, 3)
    one.step.optimizer.param_groups[0]["lr"].mul_(0.5)  # what a run changes on its way is state
    path = save_training(one, tmp_path / "s")
    assert load_training(like := make(), path) == {} and float(like.step.optimizer.param_groups[0]["lr"]) == 0.005
    with pytest.raises(ResumeError, match=f"{name}.* was .* when it was stored"):
        load_training(make(**OTHERS[name]), path)


@pytest.mark.parametrize("name", [".", "/", "folder"])
def test_a_folder_is_no_file_of_a_state(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    model = nn.Linear(8, 2)
    with pytest.raises(CheckpointError, match="is a folder; name a file in it"):
        save_training(Trainer(TrainStep(model, _loss, adamw(model.parameters()))), name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_settings_of_a_group_come_back_as_they_were(tmp_path):
    def make(kept):
        model = nn.Linear(8, 2)
        betas = (torch.tensor(0.8), torch.tensor(0.9))
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), betas=betas)
        optimizer.param_groups[0]["kept"] = kept
        return Trainer(TrainStep(model, _loss, optimizer))

    one = make((1, (2, [3])))
    one.fit(_batch, 2)
    other = make(None)
    load_training(other, save_training(one, tmp_path / "s"))
    group = other.step.optimizer.param_groups[0]
    assert group["kept"] == (1, (2, [3])) and [float(one) for one in group["betas"]] == pytest.approx([0.8, 0.9])


def test_what_a_file_does_not_hold_is_said_in_our_words(tmp_path):
    model = nn.Linear(8, 2)
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    trainer = Trainer(TrainStep(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(ResumeError, match=r"torch\.complex128 is the dtype of a tensor"):
        save_training(trainer, tmp_path / "s")
    with pytest.raises(UserInputError, match="notes: they are no JSON"):
        save_training(trainer, tmp_path / "s", notes={"a": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []
