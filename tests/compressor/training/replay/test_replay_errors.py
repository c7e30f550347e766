"""Each of the ten named errors is raised by what it is named after, says where and what to do, and leaves the state as it was."""

from __future__ import annotations

import copy
import random
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.errors import (
    BindError,
    DynamicShapeError,
    EscapedTensorError,
    GuardDriftError,
    HostReadError,
    PlanStormError,
    PointerDriftError,
    ProofError,
    ReplayError,
    SignatureDriftError,
    UntrackedRandomnessError,
    UserInputError,
)
from compressor.training import Snapshot, Trainer, TrainStep, adamw, locate, sgd
from compressor.training.engines.select import engine_for
from compressor.training.engines.tape import Kind
from compressor.training.replay.prove import prove


class Hazard(nn.Module):
    """A linear whose forward does something dangerous."""

    def __init__(self, act):
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.act, self.kept = act, []
        self.calls = 0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.act(self, self.inner(x))


def _keep(module, h):
    module.kept = [h]
    return h


def _seed(module, h):
    torch.manual_seed(5)
    return h + torch.rand(4)


def _count(module, h):
    module.calls += 1
    return h


def _replace_buffer(module, h):
    module.scale = module.scale * 0.9
    return h * module.scale


def _replace_outside(module, h):
    module.scale = torch.full((), 0.9) if False else OUTSIDE[int(module.scale is OUTSIDE[0])]
    return h * module.scale


OUTSIDE = [torch.ones(()), torch.ones(())]
_FIRST = torch.zeros(4)
_ENGINE = torch.quasirandom.SobolEngine(4)


def _loop(module, h):
    return h * torch.while_loop(lambda n, v: n < 2, lambda n, v: (n + 1, v * 0.5), (torch.tensor(0), torch.ones(4)))[1]


def _forwards(module, h):
    return h + torch.func.jvp(lambda v: module.inner.weight.sum() * v.sum(), (h.detach(),), (torch.ones_like(h),))[1]


class _Wrapped(torch.Tensor):
    """Stands for another tensor, on which its operators run."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(one.inner if isinstance(one, cls) else one for one in args), **(kwargs or {}))


AT_CAPTURE = {
    "wrapper": (
        lambda m, h: h + _Wrapped(h.detach()).relu(),
        ReplayError,
        "aten.relu.default works on a _Wrapped at test_replay",
    ),
    "item": (
        lambda m, h: h * h.mean().item(),
        HostReadError,
        r"op \d+ \(forward, root\): aten._local_scalar_dense.*test_replay_errors.py:\d+",
    ),
    "if": (lambda m, h: h if h.sum() > 0 else -h, HostReadError, "reads a tensor on the host"),
    "equal": (lambda m, h: h * float(torch.equal(h, h)), HostReadError, "aten.equal"),
    "repr": (lambda m, h: h * len(repr(h)), HostReadError, r"Tensor.__repr__\(\) in the step reads a tensor of \[\d+, \d+\]"),
    "str": (lambda m, h: h * f"{h}".count("-"), HostReadError, r"Tensor.__(repr|format)__\(\) in the step reads"),
    "nonzero": (lambda m, h: h + h.nonzero().sum(), DynamicShapeError, "aten.nonzero.*test_replay_errors.py"),
    "mask index": (lambda m, h: h + h[h > 0].mean(), DynamicShapeError, "shape depends on data"),
    "seed in the step": (_seed, UntrackedRandomnessError, "manual_seed"),
    "random": (lambda m, h: h * random.random(), UntrackedRandomnessError, "module random,"),
    "numpy": (lambda m, h: h * float(np.random.rand()), UntrackedRandomnessError, "numpy.random"),
    "kept activation": (_keep, EscapedTensorError, r"attribute 'kept' of the model: it keeps a tensor that op \d+ \(forward, inner\)"),
    "replaced buffer": (_replace_buffer, EscapedTensorError, "buffer:scale: the step puts a tensor of its own"),
    "moved buffer": (_replace_outside, PointerDriftError, "buffer:scale: the step gives it another storage"),
    "write outside": (lambda m, h: h + _FIRST.add_(1), EscapedTensorError, r"aten.add_.Tensor writes to a tensor of \[4\]"),
    "counter": (_count, GuardDriftError, "the step changes the host: module model was calls="),
    "deepcopy": (lambda m, h: h + copy.deepcopy(h.detach()), ReplayError, r"test_replay_errors|copy\.py.*not copy\.deepcopy"),
    "loop of torch": (_loop, ReplayError, "while_loop runs functions of its own at test_replay_errors.py"),
    "forward mode": (_forwards, ReplayError, "forward-mode differentiation makes; differentiate backwards"),
    "kept by an object": (lambda m, h: h + _ENGINE.draw(len(h)), EscapedTensorError, "'quasi' of an object.*: it keeps a tensor"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize("name", AT_CAPTURE)
def test_what_cannot_be_captured_is_refused_by_name_and_undone(mlp_trainer, batches, name, mode):
    act, error, match = AT_CAPTURE[name]
    trainer = mlp_trainer(Hazard(lambda module, h: h), mode=mode)
    for number in range(2):
        trainer.train_step(batches(number))
    trainer.step.model.act = act
    before = Snapshot.take(trainer.step)
    with pytest.raises(error, match=match) as caught:
        trainer.train_step(batches(2))
    assert ";" in str(caught.value)
    left = before.differences(Snapshot.take(trainer.step))
    assert not [line for line in left if not line.startswith("buffer:scale")]


def test_every_error_is_a_replay_error():
    ten = (
        BindError, DynamicShapeError, EscapedTensorError, GuardDriftError, HostReadError,
        PlanStormError, PointerDriftError, ProofError, SignatureDriftError, UntrackedRandomnessError,
    )  # fmt: skip
    assert all(issubclass(error, ReplayError) and error.__doc__ for error in ten)


def _replace_parameter(trainer):
    trainer.step.model.last.weight = nn.Parameter(trainer.step.model.last.weight.detach().clone())


def _assign_data(trainer):
    trainer.step.model.last.weight.data = trainer.step.model.last.weight.data.clone()


def _reload_optimizer(trainer):
    trainer.step.optimizer.load_state_dict(trainer.step.optimizer.state_dict())


def _add_hook(trainer):
    trainer.step.model.first.register_forward_hook(lambda module, args, out: out * 2)


def _number(trainer):
    trainer.step.model.drop.p = 0.1


def _betas(trainer):
    trainer.step.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


BETWEEN_STEPS = {
    "replaced parameter": (_replace_parameter, PointerDriftError, "param:last.weight: it lies elsewhere"),
    "assigned data": (_assign_data, PointerDriftError, "param:last.weight"),
    "optimizer state loaded": (_reload_optimizer, PointerDriftError, "opt.exp_avg:first.weight|group0.lr"),
    "hook": (_add_hook, GuardDriftError, r"module first was hooks=\(absent\)"),
    "eval": (lambda trainer: trainer.step.model.drop.eval(), GuardDriftError, "module drop was training=True and is now False"),
    "dropout": (_number, GuardDriftError, "module drop was p=0.3 and is now 0.1"),
    "betas": (_betas, GuardDriftError, "optimizer group 0: betas was.*; put it back, leave fused=True and capturable=True out"),
    "frozen": (lambda trainer: trainer.step.model.first.weight.requires_grad_(False), GuardDriftError, "parameter first.weight"),
    "accumulate": (lambda trainer: setattr(trainer.step, "clip_norm", 1.0), GuardDriftError, "step settings"),
}


@pytest.mark.parametrize("name", BETWEEN_STEPS)
def test_a_change_between_steps_is_seen_by_the_guards_and_taken_over_after_forgetting(mlp_trainer, batches, name):
    change, error, match = BETWEEN_STEPS[name]
    trainer = mlp_trainer()
    for number in range(6):
        trainer.train_step(batches(number))
    before = Snapshot.take(trainer.step)
    change(trainer)
    with pytest.raises(error, match=match):
        trainer.train_step(batches(6))
    assert not [line for line in before.differences(Snapshot.take(trainer.step)) if "differ" in line and not line.startswith("grad")]
    trainer.forget_plans()
    trainer.train_step(batches(6))
    assert trainer.last_action == "warm-up"


def test_check_every_thins_the_guards(mlp_trainer, batches):
    trainer = mlp_trainer(check_every=10)
    for number in range(6):
        trainer.train_step(batches(number))
    trainer.step.model.drop.p = 0.1
    for number in range(6, 10):
        trainer.train_step(batches(number))
    with pytest.raises(GuardDriftError, match=r"p=0\.3"):
        trainer.train_step(batches(10))


class Box:
    """Reached through a weak reference, behind which no guard looks."""

    scale: object = None


def test_a_python_number_that_differs_on_another_batch_is_signature_drift(mlp_trainer, batches):
    box = Box()
    behind = weakref.ref(box)

    def loss_fn(model, batch):
        return cross_entropy(model(batch["x"]), batch["y"]) * behind().scale

    for mode in ("capture", "replay"):
        box.scale = 1
        trainer = mlp_trainer(loss_fn=loss_fn, mode=mode)
        for number in range(3):
            trainer.train_step(batches(number))
        box.scale = 2
        with pytest.raises(SignatureDriftError, match=r"aten.mul.Tensor[\s\S]*only a Python number differs"):
            trainer.train_step(batches(3))


def test_a_tensor_swapped_where_no_guard_looks_is_found_by_the_audit(mlp_trainer, batches):
    box = Box()
    behind = weakref.ref(box)
    box.scale = torch.tensor(1.0)

    def loss_fn(model, batch):
        return cross_entropy(model(batch["x"]), batch["y"]) * behind().scale

    trainer = mlp_trainer(loss_fn=loss_fn, audit_every=8)
    for number in range(6):
        trainer.train_step(batches(number))
    box.scale = torch.tensor(2.0)
    for number in range(6, 11):
        trainer.train_step(batches(number))
    with pytest.raises(SignatureDriftError, match="a tensor that is neither parameter"):
        trainer.train_step(batches(11))


@pytest.mark.parametrize("where", ["variable 'factor'", "variable 'box'", "global 'GLOBAL_FACTOR'"])
def test_a_variable_of_the_loss_function_is_a_fact(mlp_trainer, batches, monkeypatch, where):
    factor, box = 1.0, {"factor": torch.tensor(1.0)}

    def inner():
        return factor * GLOBAL_FACTOR

    def loss_fn(model, batch):
        return cross_entropy(model(batch["x"]), batch["y"]) * box["factor"] * inner()

    trainer = mlp_trainer(loss_fn=loss_fn)
    for number in range(6):
        trainer.train_step(batches(number))
    if where == "variable 'factor'":
        factor = 2.0
    elif where == "variable 'box'":
        box["factor"] = torch.tensor(2.0)
    else:
        monkeypatch.setitem(globals(), "GLOBAL_FACTOR", 2.0)
    with pytest.raises(GuardDriftError, match=where):
        trainer.train_step(batches(6))


GLOBAL_FACTOR = 1.0


def test_a_handler_that_acts_on_every_tenth_step_is_refused_for_its_counter(mlp_trainer, batches):
    steps = [0]

    def loss_fn(model, batch):
        steps[0] += 1
        return cross_entropy(model(batch["x"]), batch["y"]) * (2.0 if steps[0] % 10 == 0 else 1.0)

    trainer = mlp_trainer(loss_fn=loss_fn)
    for number in range(2):
        trainer.train_step(batches(number))
    with pytest.raises(GuardDriftError, match="the step changes the host: variable 'steps' that loss_fn closes over"):
        trainer.train_step(batches(2))


def test_a_list_that_collects_losses_is_an_escape(mlp_trainer, batches):
    losses = []

    def loss_fn(model, batch):
        loss = cross_entropy(model(batch["x"]), batch["y"])
        losses.append(loss.detach())
        return loss

    trainer = mlp_trainer(loss_fn=loss_fn)
    for number in range(2):
        trainer.train_step(batches(number))
    with pytest.raises(EscapedTensorError, match="variable 'losses' that loss_fn closes over: it keeps a tensor"):
        trainer.train_step(batches(2))


def test_keys_that_never_come_again_are_a_plan_storm(mlp_trainer, batches):
    trainer = mlp_trainer(max_plans=3)
    for rows in (3, 4, 5):
        trainer.train_step(batches(0, rows))
    with pytest.raises(PlanStormError, match=r"step 3: .* would be plan key 4, and max_plans=3"):
        trainer.train_step(batches(0, 6))


def test_a_plan_refuses_a_batch_of_another_shape(mlp_trainer, batches):
    trainer = mlp_trainer()
    for number in range(5):
        trainer.train_step(batches(number))
    with pytest.raises(BindError, match=r"batch\['x'\]: float32 \[1, 8\]"):
        trainer.plans[0](batches(0, 1))


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten.silu", Kind.OUT),
        ("aten._scaled_dot_product", Kind.COPY),
        ("aten._fused_adamw_", Kind.MUTATE),
        ("aten._log_softmax.", Kind.OUT),
    ],
)
def test_a_sabotaged_op_is_found_by_the_proof_and_named_by_locate(new_trainer, cases, operator, kind):
    trainer = new_trainer(cases["llama"], "replay")
    for number in range(5):
        trainer.train_step(cases["llama"].batch_at(number))
    plan, batch = trainer.plans[0], cases["llama"].batch_at(9)
    assert locate(plan, batch) is None
    victim = [op for op in plan.captured.ops if str(op.func).startswith(operator)][-1]
    assert victim.kind is kind
    true_run = victim.run
    victim.run = lambda: (true_run(), victim.written()[0].mul_(1.5).add_(0.25))
    plan.captured.relink()
    before = Snapshot.take(trainer.step)
    with pytest.raises(ProofError, match="the replayed step is not the eager one"):
        prove(plan, batch, engine_for(trainer.step.device))
    found = locate(plan, batch)
    assert found is not None and found.index == victim.index and victim.module in str(found)
    assert before.differences(Snapshot.take(trainer.step)) == []


def test_a_skipped_op_is_found_because_storages_are_spoiled_first(new_trainer, cases):
    trainer = new_trainer(cases["mlp"], "replay")
    for number in range(3):
        trainer.train_step(cases["mlp"].batch_at(number))
    plan = trainer.plans[0]
    victim = next(op for op in plan.captured.ops if op.kind is Kind.OUT and op.phase == "forward")
    victim.run = None
    plan.captured.relink()
    with pytest.raises(ProofError, match="differences"):
        trainer.train_step(cases["mlp"].batch_at(3))


@pytest.mark.nightly
def test_every_op_of_a_step_is_missed_when_it_is_left_out(new_trainer, cases):
    trainer = new_trainer(cases["mlp"], "replay")
    for number in range(5):
        trainer.train_step(cases["mlp"].batch_at(number))
    plan, batch = trainer.plans[0], cases["mlp"].batch_at(50)
    for op in [op for op in plan.captured.ops if op.run is not None]:
        true_run, op.run = op.run, None
        plan.captured.relink()
        with pytest.raises(ProofError):
            prove(plan, batch, engine_for(trainer.step.device))
        found = locate(plan, batch)
        assert found is not None and found.index == op.index
        op.run = true_run
    plan.captured.relink()
    assert locate(plan, batch) is None


def test_indices_that_nobody_made_are_a_proof_error(new_trainer, cases):
    trainer = new_trainer(cases["gpt2"], "replay")
    for number in range(5):
        trainer.train_step(cases["gpt2"].batch_at(number))
    plan, batch = trainer.plans[0], cases["gpt2"].batch_at(50)
    victim = next(op for op in plan.captured.ops if "aten.arange" in op.line)
    victim.run = None
    plan.captured.relink()
    with pytest.raises(ProofError, match="fails on spoiled storages"):
        prove(plan, batch, engine_for(trainer.step.device))
    found = locate(plan, batch)
    assert found is not None and found.index == victim.index


def test_backward_ops_carry_the_module_whose_gradient_they_make(new_trainer, cases):
    trainer = new_trainer(cases["llama"], "replay")
    for number in range(3):
        trainer.train_step(cases["llama"].batch_at(number))
    named = {op.module for op in trainer.plans[0].captured.ops if op.phase == "backward"}
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj", "lm_head"} <= named


def test_transformers_question_about_a_mask_is_a_host_read_with_its_line(new_trainer, cases):
    trainer = new_trainer(cases["mask_on_the_host"], "replay")
    for number in range(2):
        trainer.train_step(cases["mask_on_the_host"].batch_at(number))
    with pytest.raises(HostReadError, match=r"\(forward, model\).* at masking_utils.py:\d+"):
        trainer.train_step(cases["mask_on_the_host"].batch_at(2))


def test_a_compiled_module_is_refused(mlp_trainer, batches, cases):
    model = cases["mlp"].make()
    trainer = mlp_trainer(model)
    for number in range(2):
        trainer.train_step(batches(number))
    model.first.compile(backend="eager")
    with pytest.raises(ReplayError, match=r"first: it is compiled by torch.compile"):
        trainer.train_step(batches(2))


def test_sparse_gradients_are_refused_by_name(mlp_trainer):
    model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 2))
    trainer = mlp_trainer(model, lambda m, batch: m[1](nn.functional.embedding(batch["x"], m[0].weight, sparse=True)).square().mean(), sgd)
    batch = {"x": torch.arange(6)}
    for _ in range(2):
        trainer.train_step(batch)
    with pytest.raises(DynamicShapeError, match=r"layout torch\.sparse_coo"):
        trainer.train_step(batch)


def test_an_lstm_is_equal(mlp_trainer, batches):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x):
            return self.head(self.lstm(x[None])[0][0])

    states, losses = [], []
    for mode in ("eager", "replay"):
        torch.manual_seed(1)
        trainer = mlp_trainer(Recurrent(), mode=mode)
        losses.append([trainer.train_step(batches(number)).item() for number in range(10)])
        states.append(Snapshot.take(trainer.step))
    assert losses[0] == losses[1]
    assert states[0].differences(states[1]) == []


def test_a_gradient_that_a_refused_step_made_is_gone(mlp_trainer, batches):
    trainer = mlp_trainer()
    for number in range(2):
        trainer.train_step(batches(number))
    _replace_parameter(trainer)  # the optimizer holds the old one, so nobody allocates a gradient for the new one
    with pytest.raises(ReplayError, match=r"grad:last.weight"):
        trainer.train_step(batches(2))
    assert trainer.step.model.last.weight.grad is None


def test_a_gradient_that_was_none_before_a_refused_step_is_none_behind_it(mlp_trainer, batches):
    trainer = mlp_trainer()
    for number in range(6):
        trainer.train_step(batches(number))
    weight = trainer.step.model.last.weight
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.ones_like(weight)))
    assert weight.grad is None
    with pytest.raises(PointerDriftError, match=r"param:last.weight: it lies elsewhere"):
        trainer.train_step(batches(6))
    assert weight.grad is None


def _decayed(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=torch.tensor(lr), weight_decay=torch.tensor(0.1), fused=True)  # type: ignore[arg-type]


def _normal(model: nn.Module, batch: Any) -> Tensor:
    return -torch.distributions.Normal(model(batch["x"]), 1.0, validate_args=True).log_prob(batch["y"][:, None].float()).mean()


@pytest.mark.parametrize(
    ("loss_fn", "optimizer", "where", "advice"),
    [
        (_normal, torch.optim.SGD, r"at test_replay_errors\.py:\d+", "validate_args=False"),
        (lambda model, batch: model(batch["x"]).square().mean(), _decayed, "at torch/optim/adam.py", "let only lr be a tensor"),
    ],
)
def test_a_read_by_torch_itself_is_named_with_the_switch_that_helps(loss_fn: Any, optimizer: Any, where: str, advice: str) -> None:
    model = nn.Linear(8, 2)
    run = Trainer(TrainStep(model, loss_fn, optimizer(model.parameters(), lr=1e-2)), "replay", warmup=1)
    batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, dtype=torch.long)}
    run.train_step(batch)
    with pytest.raises(HostReadError, match=where) as caught:
        run.train_step(batch)
    assert advice in str(caught.value)


def test_a_lazy_layer_without_parameters_is_refused() -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(UserInputError, match="a lazy layer has no parameters yet"):
        TrainStep(model, lambda model, batch: model(batch).mean(), adamw(model.parameters()))


COUNTED = 0
SEEN_BY_GLOBAL: list[int] = []


class _Tally:
    count = 0
    seen: ClassVar = []


class _Counting(_Tally, nn.Module):
    """Counts in every place that Python has, and then reads on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.history, self.table = nn.Linear(8, 4), 0, [], {"calls": 0}
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        global COUNTED
        COUNTED += 1
        SEEN_BY_GLOBAL.append(COUNTED)
        self.calls += 1
        self.history.append(self.calls)
        self.table["calls"] += 1
        type(self).count += 1
        _Tally.seen.append(1)
        self.kept = h = self.inner(x) * self.scale
        self.scale = self.scale.clone()
        return h


def test_counters_of_python_are_put_back_when_a_capture_is_refused(mlp_trainer, batches):
    calls = 0

    def loss_fn(model, batch):
        nonlocal calls
        calls += 1
        return cross_entropy(model(batch["x"]), batch["y"])

    trainer = mlp_trainer(_Counting(), loss_fn)
    model = trainer.step.model

    def state():
        plain = (model.calls, [*model.history], dict(model.table), model.count, len(_Tally.seen), COUNTED, [*SEEN_BY_GLOBAL], calls)
        return plain, id(model.kept), id(model.scale)

    for number in range(2):
        trainer.train_step(batches(number))
    before = state()
    for _ in range(2):
        with pytest.raises(EscapedTensorError):
            trainer.train_step(batches(2))
        assert state() == before and before[0][-1] == 2
    trainer.mode = "eager"
    trainer.train_step(batches(2))
    assert calls == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("is_refused", [True, False])
def test_functions_of_torch_compile_are_compiled_as_before(mlp_trainer, batches, is_refused):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False)
    def first(h):
        return torch.relu(h) * 2

    @torch.compile(backend=backend, dynamic=False)
    def later(h):
        return torch.relu(h) * 3

    where = {"later": False}

    def loss_fn(model, batch):
        logits = first(model(batch["x"]))
        if where["later"]:
            logits = later(logits)  # met for the first time while it is watched
            logits = logits * logits.sum().item() if is_refused else logits
        return cross_entropy(logits, batch["y"])

    trainer = mlp_trainer(loss_fn=loss_fn)
    for number in range(2):
        trainer.train_step(batches(number))
    where["later"] = True
    if is_refused:
        with pytest.raises(HostReadError):
            trainer.train_step(batches(2))
    else:
        trainer.train_step(batches(2))
    for function in (first, later):
        for rows in (3, 7):
            known = len(compiled)
            function(torch.ones(rows, 5))
            assert len(compiled) == known + 1, "torch.compile has given the function up"


_SIZES = torch.library.Library("sizes_of_tests", "DEF")
for _name, _kind in (("longest", "SymInt"), ("counted", "int")):
    _SIZES.define(f"{_name}(Tensor x) -> (Tensor, {_kind})")
    _SIZES.impl(_name, lambda x: (x * 2, x.shape[0]), "CPU")
_LONGEST, _COUNTED = torch.ops.sizes_of_tests.longest.default, torch.ops.sizes_of_tests.counted.default


def test_sizes_that_an_operator_returns_beside_its_tensors_are_no_values_of_the_host(mlp_trainer, batches):
    """As attention on a GPU does; other integers that come to the host are refused all the same."""
    losses = {}
    for mode in ("eager", "capture", "replay"):
        torch.manual_seed(0)
        trainer = mlp_trainer(Hazard(lambda module, h: h + _LONGEST(h.detach())[0]), mode=mode)
        losses[mode] = [trainer.train_step(batches(number)).item() for number in range(6)]
    assert losses["eager"] == losses["capture"] == losses["replay"]
    trainer = mlp_trainer(Hazard(lambda module, h: h + _COUNTED(h.detach())[0]))
    with pytest.raises(HostReadError, match=r"counted\.default returned values to the host"):
        for number in range(4):
            trainer.train_step(batches(number))


def _of_dtypes(x: Tensor) -> Tensor:
    wide = torch.promote_types(torch.result_type(x, 1.0), torch.float32)
    return x.to(wide) if torch.can_cast(torch.float32, wide) else x


def test_dtypes_that_torch_makes_of_dtypes_are_no_values_of_the_host(mlp_trainer, batches):
    """As observers ask for, which fake quantization calls in every step."""
    losses = {}
    for mode in ("eager", "capture", "replay"):
        torch.manual_seed(0)
        trainer = mlp_trainer(Hazard(lambda module, h: h + _of_dtypes(h.detach())), mode=mode)
        losses[mode] = [trainer.train_step(batches(number)).item() for number in range(6)]
    assert losses["eager"] == losses["capture"] == losses["replay"]


_SIZES.define("counter(int start) -> int")
_SIZES.impl("counter", lambda start: start + 1, "CompositeExplicitAutograd")


def test_a_value_that_an_operator_makes_without_a_tensor_is_one_of_the_host(mlp_trainer, batches):
    """It may come from anywhere, and would be frozen."""
    trainer = mlp_trainer(Hazard(lambda module, h: h * torch.ops.sizes_of_tests.counter(1)))
    with pytest.raises(HostReadError, match=r"counter\.default returned values to the host"):
        for number in range(4):
            trainer.train_step(batches(number))
