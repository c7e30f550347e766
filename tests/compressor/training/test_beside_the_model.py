"""What a step works on beside its model: parameters of the optimizer's own, frozen teachers, losses of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr
from torch import Tensor, nn
from torch.nn import functional as F

from compressor.errors import EscapedTensorError, GuardDriftError, PointerDriftError
from compressor.training import Trainer, TrainStep, adamw, load_training, save_training


def features(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(6, 8, generator=generator), "y": torch.rand(6, 4, generator=generator)}


def run(make: Callable[[], TrainStep], mode: Any, num_steps: int = 12) -> tuple[list[float], Trainer]:
    torch.manual_seed(0)
    trainer = Trainer(make(), mode, audit_every=0)
    return trainer.fit(features, num_steps), trainer


def assert_equal(make: Callable[[], TrainStep]) -> None:
    (eager, first), (replay, second) = (run(make, mode) for mode in ("eager", "replay"))
    assert eager == replay and second.last_action == "replay"
    ours, theirs = first.step.tensors(), second.step.tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def with_temperature() -> TrainStep:
    """A learned temperature that no module holds."""
    model, temperature = nn.Linear(8, 4), nn.Parameter(torch.ones(4))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]) * temperature, batch["y"])

    return TrainStep(model, loss_fn, adamw([*model.parameters(), temperature], lr=1e-2))


def test_a_parameter_outside_of_the_model_is_trained_and_stored_like_any_other(tmp_path) -> None:
    assert_equal(with_temperature)
    _, trainer = run(with_temperature, "replay")
    assert "param:group0[2]" in trainer.step.tensors() and not torch.equal(trainer.step.tensors()["param:group0[2]"], torch.ones(4))
    save_training(trainer, tmp_path / "state.safetensors")
    rest = trainer.fit(features, 16)
    torch.manual_seed(1)
    resumed = Trainer(with_temperature(), "replay")
    load_training(resumed, tmp_path / "state.safetensors")
    assert resumed.fit(features, 16) == rest


@pytest.mark.parametrize("start", [None, 0.0, 1.0])
@pytest.mark.parametrize("mode", ["capture", "replay"])
def test_a_refused_step_leaves_no_gradient_on_a_parameter_that_it_does_not_train(mode: Any, start: float | None) -> None:
    """That of a discriminator, or of a second optimizer: run again, the step would count twice."""
    torch.manual_seed(0)
    model, other = nn.Linear(8, 4), nn.Parameter(torch.ones(4))
    other.grad = None if start is None else torch.full((4,), start)
    step = TrainStep(model, lambda model, batch: F.mse_loss(model(batch["x"]) * other, batch["y"]), adamw(model.parameters(), lr=1e-2))
    trainer = Trainer(step, mode)
    for number in range(2):
        trainer.train_step(features(number))
    if start is None:
        other.grad = None
    held = other.grad
    before = None if held is None else held.clone()
    with pytest.raises(EscapedTensorError):
        trainer.train_step(features(2))
    assert other.grad is held
    assert held is None or (before is not None and torch.equal(held, before))


def test_a_parameter_outside_of_the_model_that_is_moved_is_named() -> None:
    _, trainer = run(with_temperature, "replay")
    temperature = trainer.step.parameters()["group0[2]"]
    temperature.data = temperature.data.clone()
    with pytest.raises(PointerDriftError, match=r"param:group0\[2\]"):
        trainer.train_step(features(99))


def test_a_teacher_in_eval_mode_keeps_its_statistics_and_may_have_batch_norms() -> None:
    def make() -> TrainStep:
        student = nn.Linear(8, 4)
        teacher = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval().requires_grad_(False)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return F.mse_loss(model(batch["x"]), teacher(batch["x"]))

        return TrainStep(student, loss_fn, adamw(student.parameters(), lr=1e-2))

    assert_equal(make)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "soft margin": lambda x, y, **how: F.soft_margin_loss(x, y.round() * 2 - 1, **how),
    "binary cross entropy": lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y, **how),
    "with logits": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_writes_nothing_beside_its_own_place(name: str, reduction: str) -> None:
    """Some of torch's losses work in what they are given to write into, which is larger than their result: other operators' bytes."""

    def make() -> TrainStep:
        model = nn.Linear(8, 4)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return LOSSES[name](model(batch["x"]), batch["y"], reduction=reduction).mean()

        return TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2))

    assert_equal(make)
    _, trainer = run(make, "replay")
    captured: Any = trainer.plans[0].captured
    outs = [out for op in captured.ops for out in op.outs]
    before = [(out.shape, out.stride(), out.data_ptr(), out.untyped_storage().nbytes()) for out in outs]
    trainer.fit(features, 14)
    after = [(out.shape, out.stride(), out.data_ptr(), out.untyped_storage().nbytes()) for out in outs]
    assert before == after


class _Settings(BaseModel):
    model_config = ConfigDict(extra="allow")
    _factor: float = PrivateAttr(1.0)


class _Stopped(Exception):
    pass


_SETTINGS, _STOPPED = _Settings(scale=1.0), _Stopped(1.0)  # type: ignore[call-arg]  # an extra field
_HELD: list[object] = [_SETTINGS, _STOPPED]
_BESIDE_FIELDS: dict[str, tuple[Callable[[], float], Callable[[float], object]]] = {
    "a private attribute": (lambda: _SETTINGS._factor, lambda value: setattr(_SETTINGS, "_factor", value)),
    "an extra field": (lambda: _SETTINGS.scale, lambda value: setattr(_SETTINGS, "scale", value)),  # type: ignore[attr-defined]
    "in a list": (lambda: _HELD[0]._factor, lambda value: setattr(_HELD[0], "_factor", value)),  # type: ignore[attr-defined]
    "an exception": (lambda: _STOPPED.args[0], lambda value: setattr(_STOPPED, "args", (value,))),
}


@pytest.mark.parametrize("name", _BESIDE_FIELDS)
def test_what_an_object_keeps_beside_its_fields_is_guarded(name: str) -> None:
    read, write = _BESIDE_FIELDS[name]
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().mean() * read()

    trainer = Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2)), "replay", warmup=1, audit_every=0)
    for _ in range(4):
        trainer.train_step({"x": torch.ones(2, 4)})
    assert trainer.last_action == "replay"
    write(2.0)
    try:
        with pytest.raises(GuardDriftError, match="since the capture"):
            trainer.train_step({"x": torch.ones(2, 4)})
    finally:
        write(1.0)
