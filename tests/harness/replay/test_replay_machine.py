"""The twins of the state machine stay equal whatever happens between steps; and the machine sees planted bugs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from compressor.errors import UserInputError
from compressor.lifecycle import EventType, Modifier, Session, State
from compressor.training import Trainer, TrainStep
from harness.profiles import active_profile
from harness.replay import replay_machine
from harness.replay.hazards.building_blocks import Net, classify, default_optimizer, vectors


class Doubling(Modifier):
    """A hook from start to end, and a gradient that follows a tensor."""

    _scale = None
    _model = None

    def on_initialize(self, state, **_):
        self._model, self._scale = state.model, torch.ones(())
        return True

    def training_tensors(self):
        return {"scale": self._scale}

    def plan_key(self):
        return ()

    def on_start(self, state, event):
        self.register_hook(self._model.drop, lambda module, args, out: out * 2, "forward")

    def on_end(self, state, event):
        self.remove_hooks()

    def on_event(self, state, event):
        if event.type == EventType.BATCH_START:
            self._scale.fill_(1 + event.step / 10)
        gradient = self._model.last.weight.grad
        if event.type == EventType.OPTIM_PRE_STEP and gradient is not None:
            gradient.mul_(self._scale)


def plain():
    model = Net()
    return Trainer(TrainStep(model, classify, default_optimizer(model.parameters())), max_plans=30)


def with_modifier():
    model = Net()
    session = Session(State(model), [Doubling(start=4, end=11)])
    session.initialize()
    return Trainer(TrainStep(model, classify, default_optimizer(model.parameters()), session), audit_every=7, max_plans=30)


def spent(share, **changes):
    """Of the profile, at least ten runs; the same ones every time, so that what was seen can be counted."""
    profile = active_profile()
    chosen = profile.machine_settings(max(share, 10 / profile.runs))
    return settings(chosen, stateful_step_count=15, derandomize=True, database=None, **changes)


BATCHES = (vectors, vectors, lambda number: vectors(number, 4), lambda number: vectors(number, 1))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.check(63)
@pytest.mark.parametrize("factory", [plain, with_modifier])
def test_twins_stay_equal_whatever_happens_between_steps(factory):
    before = torch.get_rng_state()
    machine = replay_machine(factory, *BATCHES)
    run_state_machine_as_test(machine, settings=spent(0.025))
    assert machine.seen.actions["replay"] >= 20 and machine.seen.actions["prove"] >= 2
    assert sum(machine.seen.refusals.values()) >= 1 and len(machine.seen.rules) >= 6
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("compressor.training.replay.plan.Plan.guard", lambda plan: None),
        ("compressor.training.replay.plan.Plan.__call__", lambda plan, batch: plan.captured.loss.clone()),
    ],
    ids=["guards off", "replay does nothing"],
)
def test_a_planted_bug_is_seen_by_the_machine(monkeypatch, where, wrong):
    monkeypatch.setattr(where, wrong)
    machine = replay_machine(plain, *BATCHES)
    quick = spent(0.1, phases=[Phase.generate])
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=quick)


def test_what_eager_cannot_do_ends_an_example():
    def factory():
        model = Net()
        model.register_forward_hook(lambda module, args, out: out if len(out) > 4 else out @ out)
        return TrainStep(model, classify, default_optimizer(model.parameters()))

    machine = replay_machine(factory, *BATCHES)
    run_state_machine_as_test(machine, settings=spent(0.02))
    assert machine.seen.rules["eager cannot"] > 0


@pytest.mark.parametrize(("batches", "what"), [((), "nothing"), ((vectors, vectors(0)), "dict")])
def test_batches_that_are_no_functions_are_named_at_once(batches, what):
    with pytest.raises(UserInputError, match=f"replay_machine: {what} was given for batches; give functions"):
        replay_machine(plain, *batches)
