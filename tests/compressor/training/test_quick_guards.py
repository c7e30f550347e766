"""The quick half of the guards lets unchanged steps pass by itself, and stops at whatever was exchanged, however its parts are taken."""

from __future__ import annotations

import gc

import pytest
import torch

import compressor.training.guards.host_facts as identities
import compressor.training.replay.plan as plan_module
from compressor.errors import GuardDriftError, PointerDriftError, ProofError, ReplayError, SignatureDriftError
from compressor.training import Trainer, TrainStep


class _ForeignTraversal:
    """A garbage collector that shows nothing of what a table holds."""

    @staticmethod
    def get_referents(*tables):
        return []


@pytest.fixture(params=["traversal of this interpreter", "another traversal"])
def traversal(request, monkeypatch):
    """Run with the traversal of this interpreter, and with one that says nothing, as another interpreter's might."""
    if request.param == "another traversal":
        monkeypatch.setattr(identities, "gc", _ForeignTraversal)
    return request.param


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_an_unchanged_step_never_needs_the_slow_half(new_trainer, cases, monkeypatch, traversal, name):
    trainer = new_trainer(cases[name], "replay", ema=True, schedule=True, clip_norm=1.0)
    for number in range(5):
        trainer.train_step(cases[name].batch_at(number))
    quick = trainer.plans[0]._identities
    assert bool(quick._traversed) is (traversal == "traversal of this interpreter")
    monkeypatch.setattr(plan_module, "host_facts", lambda step: pytest.fail("the slow half ran"))
    for number in range(5, 10):
        trainer.train_step(cases[name].batch_at(number))
        assert trainer.last_action == "replay"


def _other_average(trainer):
    averages = trainer.step.averages.weights()
    averages["first.weight"] = averages["first.weight"].clone()


def _state_elsewhere(trainer):
    state = trainer.step.optimizer.state[trainer.step.model.first.weight]
    state["exp_avg"].data = state["exp_avg"].data.clone()


def _state_as_number(trainer):
    trainer.step.optimizer.state[trainer.step.model.first.weight]["step"] = 5.0


def _gradient_elsewhere(trainer):
    gradient = trainer.step.model.first.weight.grad
    gradient.data = gradient.data.clone()


def _equal_rate(trainer):
    group = trainer.step.optimizer.param_groups[0]
    group["lr"] = group["lr"].clone()


def _attribute(trainer):
    trainer.step.model.first.note = 3


def _another_layer(trainer):
    trainer.step.model.another = torch.nn.Linear(2, 2)


def _reversed(table):
    content = dict(reversed(table.items()))
    table.clear()
    table.update(content)


def _gradient_of_a_buffer(trainer):
    trainer.step.model.centre.grad = torch.ones(2)


def _other_data(tensor, data):
    tensor.data = data


def _threads(trainer):
    torch.set_num_threads(torch.get_num_threads() + 1)


CHANGES = {
    "an average is another tensor": (_other_average, PointerDriftError),
    "optimizer state is a number": (_state_as_number, PointerDriftError),
    "a gradient lies elsewhere": (_gradient_elsewhere, PointerDriftError),
    "an equal rate in another tensor": (_equal_rate, PointerDriftError),
    "a parameter is turned where it lies": (lambda t: _other_data(t.step.model.square, t.step.model.square.data.t()), PointerDriftError),
    "a buffer is turned in place": (lambda t: t.step.model.turned.t_(), PointerDriftError),
    "a buffer has another sign": (lambda t: setattr(t.step.model, "scale", torch._neg_view(t.step.model.scale)), PointerDriftError),
    "a loose tensor is turned in place": (lambda t: t.step.model.loose.t_(), GuardDriftError),
    "a loose tensor has other data": (lambda t: _other_data(t.step.model.loose, torch.ones(2, 3)), GuardDriftError),
    "a new attribute": (_attribute, GuardDriftError),
    "a new layer": (_another_layer, ReplayError),
    "another order of layers": (lambda t: _reversed(t.step.model._modules), GuardDriftError),
    "another order of parameters": (lambda t: _reversed(t.step.model.first._parameters), GuardDriftError),
    "a new attribute of a parameter": (lambda t: setattr(t.step.model.first.weight, "scale", 2.0), GuardDriftError),
    "a number of threads": (_threads, GuardDriftError),
    "a hook of a parameter": (lambda t: t.step.model.first.weight.register_hook(lambda grad: grad), GuardDriftError),
    "a buffer that needs a gradient": (lambda t: t.step.model.centre.requires_grad_(), GuardDriftError),
    "a gradient of a buffer": (_gradient_of_a_buffer, PointerDriftError),
    "a hook of a buffer": (lambda t: t.step.model.scale.register_hook(lambda grad: grad), GuardDriftError),
    "a hook after accumulation": (lambda t: t.step.model.last.bias.register_post_accumulate_grad_hook(print), GuardDriftError),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_exchanged_stops_the_next_step(new_trainer, cases, traversal, name):
    change, error = CHANGES[name]
    trainer = new_trainer(cases["mlp"], "replay", ema=True)
    trainer.step.model.register_buffer("centre", torch.zeros(2))
    trainer.step.model.register_buffer("scale", torch.ones(2, requires_grad=True))
    trainer.step.model.register_buffer("turned", torch.ones(2, 3))
    trainer.step.model.square, trainer.step.model.loose = torch.nn.Parameter(torch.ones(3, 3), requires_grad=False), torch.ones(2, 3)
    threads = torch.get_num_threads()
    for number in range(5):
        trainer.train_step(cases["mlp"].batch_at(number))
    gc.collect()
    change(trainer)
    try:
        with pytest.raises(error):
            trainer.train_step(cases["mlp"].batch_at(5))
    finally:
        torch.set_num_threads(threads)


def test_another_list_of_parameters_is_seen_where_the_update_runs_in_python(cases):
    torch.manual_seed(0)
    model = cases["mlp"].make()
    step = TrainStep(model, cases["mlp"].loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), clip_norm=0.1)
    trainer = Trainer(step, "replay", audit_every=0)
    for number in range(5):
        trainer.train_step(cases["mlp"].batch_at(number))
    group = step.optimizer.param_groups[0]
    group["params"] = group["params"][1:]  # the norm of the capture would count the first one's gradient
    with pytest.raises(GuardDriftError, match="optimizer group 0: parameters was"):
        trainer.train_step(cases["mlp"].batch_at(5))


class _ClearsItself(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()


@pytest.mark.parametrize("reads", [True, False])
def test_the_rate_of_an_update_in_python_is_guarded_where_the_loss_reads_it(cases, reads):
    torch.manual_seed(0)
    model, held = cases["mlp"].make(), {}
    held["optimizer"] = _ClearsItself(model.parameters(), lr=0.01)

    def penalized(model, batch):
        return cases["mlp"].loss_fn(model, batch) * (1 + held["optimizer"].param_groups[0]["lr"])

    trainer = Trainer(TrainStep(model, penalized if reads else cases["mlp"].loss_fn, held["optimizer"]), "replay", audit_every=0)
    for number in range(5):
        trainer.train_step(cases["mlp"].batch_at(number))
    held["optimizer"].param_groups[0]["lr"] = 0.5
    if reads:
        with pytest.raises(GuardDriftError, match=r"optimizer group 0: lr was 0\.01 and is now 0\.5"):
            trainer.train_step(cases["mlp"].batch_at(5))
    else:
        trainer.train_step(cases["mlp"].batch_at(5))
        assert trainer.last_action == "replay"


def test_what_is_not_worth_a_guard_is_found_by_the_audit(new_trainer, cases):
    trainer = _with_square(new_trainer, cases)
    trainer.audit_every = None
    for number in range(6):
        trainer.train_step(cases["mlp"].batch_at(number))
    _state_elsewhere(trainer)
    trainer.train_step(cases["mlp"].batch_at(6))
    with pytest.raises((SignatureDriftError, ProofError), match="found by the audit"):
        trainer.train_step(cases["mlp"].batch_at(7))


def _with_square(new_trainer, cases):
    from dataclasses import replace

    class Square(cases["mlp"].make):
        def __init__(self):
            super().__init__()
            self.square = torch.nn.Linear(8, 8)

        def forward(self, x):
            return super().forward(self.square(x))

    return new_trainer(replace(cases["mlp"], make=Square), "replay")
