"""What errors print as code is taken out of the message and run: the step that was refused then has the same bits in all three modes."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.nn.utils import prune

from compressor.errors import EscapedTensorError, HostReadError, ReplayError
from compressor.training import Snapshot, Trainer, TrainStep, adamw

MODES = ("eager", "capture", "replay")


class Net(nn.Module):
    """Two layers, with a norm that may be another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.within(torch.relu(self.norm(self.first(x)))))

    def within(self, h: torch.Tensor) -> torch.Tensor:
        return h


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def _code(step: TrainStep, error: type[ReplayError], batches: Any) -> str:
    """Let a step be refused, and take the code out of the message."""
    trainer = Trainer(step, "replay")
    with pytest.raises(error) as caught:
        trainer.fit(batches, 5)
    return textwrap.dedent("\n".join(line for line in str(caught.value).splitlines()[1:]))


def _same_in_all_modes(make: Callable[[str], tuple[list[Trainer], Callable[[int], None]]]) -> dict[str, torch.Tensor]:
    ends = {}
    for mode in MODES:
        torch.manual_seed(3)
        trainers, act = make(mode)
        for number in range(12):
            act(number)
        assert mode != "replay" or all(trainer.plans for trainer in trainers)
        ends[mode] = [Snapshot.take(trainer.step) for trainer in trainers]
    for mode in MODES[1:]:
        assert [one.differences(other) for one, other in zip(ends["eager"], ends[mode], strict=True)] == [[] for _ in ends["eager"]]
    return ends["eager"][0].tensors


def _stepping(step: TrainStep, mode: str, batches: Any) -> tuple[list[Trainer], Callable[[int], None]]:
    trainer = Trainer(step, mode)  # type: ignore[arg-type]
    return [trainer], lambda number: trainer.train_step(batches(number)) and None


def _teacher() -> tuple[nn.Module, nn.Module, Any]:
    student = Net()
    teacher = copy.deepcopy(student)

    def loss_fn(model, batch):
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
            target = teacher(batch["x"])
        return classify(student, batch) + mse_loss(student(batch["x"]), target)

    return student, teacher, loss_fn


@pytest.mark.nightly
def test_a_mean_teacher_becomes_part_of_the_model(batches):
    student, _, loss_fn = _teacher()
    code = _code(TrainStep(student, loss_fn, torch.optim.AdamW(student.parameters())), EscapedTensorError, batches)

    def make(mode):
        student, teacher, loss_fn = _teacher()
        space = {"torch": torch, "TrainStep": TrainStep, "student": student, "teacher": teacher, "loss_fn": loss_fn}
        space["optimizer"] = torch.optim.AdamW(student.parameters())
        exec(code.split("# A second optimizer")[0], space)
        return _stepping(space["step"], mode, batches)

    assert not torch.equal(*(_same_in_all_modes(make)[f"param:{who}.last.weight"] for who in ("student", "teacher")))


def _gan() -> dict[str, Any]:
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def fake():
        return generator(torch.randn(6, 4))

    return {
        "generator": generator,
        "discriminator": discriminator,
        "optimizer_of_discriminator": torch.optim.AdamW(discriminator.parameters()),
        "optimizer_of_generator": torch.optim.AdamW(generator.parameters()),
        "loss_of_discriminator": lambda model, batch: (
            softplus(-discriminator(batch["x"])).mean() + softplus(discriminator(fake().detach())).mean()
        ),
        "loss_of_generator": lambda model, batch: softplus(-discriminator(fake())).mean(),
    }


@pytest.mark.nightly
def test_the_two_optimizers_of_a_gan_become_two_steps(batches):
    given = _gan()

    def at_once(model, batch):
        loss = given["loss_of_discriminator"](model, batch)
        given["optimizer_of_discriminator"].zero_grad(set_to_none=False)
        loss.backward()
        given["optimizer_of_discriminator"].step()
        return given["loss_of_generator"](model, batch)

    given["optimizer_of_discriminator"] = adamw(given["discriminator"].parameters())
    code = _code(TrainStep(given["generator"], at_once, given["optimizer_of_generator"]), EscapedTensorError, batches)

    def make(mode):
        space = {"torch": torch, "TrainStep": TrainStep, "Trainer": Trainer, "mode": mode, **_gan()}
        exec(code.split("each trainer makes its own:")[1], space)
        both = [space["first"], space["second"]]
        return both, lambda number: [trainer.train_step(batches(number)) for trainer in both] and None

    _same_in_all_modes(make)


class Auxiliary(Net):
    """Keeps a loss of its own for whoever trains it."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.losses: list[torch.Tensor] = []

    def within(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept == "one":
            self.auxiliary = h.pow(2).mean()
        else:
            self.losses.append(h.pow(2).mean())
        return h


def _with_auxiliary(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = classify(model, batch)
    (module,) = [one for one in model.modules() if isinstance(one, Auxiliary)]
    return loss + 0.1 * (module.auxiliary if module.kept == "one" else module.losses[-1])


@pytest.mark.parametrize("kept", ["one", "several"])
@pytest.mark.parametrize("wrap", [lambda module: module, nn.Sequential])
def test_an_auxiliary_loss_is_let_go_of(batches, kept, wrap):
    model = wrap(Auxiliary(kept))
    code = _code(TrainStep(model, _with_auxiliary, adamw(model.parameters())), EscapedTensorError, batches)

    def make(mode):
        model = wrap(Auxiliary(kept))
        space: dict[str, Any] = {"loss_fn": _with_auxiliary}
        exec(code, space)
        return _stepping(TrainStep(model, space["loss_without_trace"], adamw(model.parameters())), mode, batches)

    _same_in_all_modes(make)


def _hooked(kind: str) -> nn.Module:
    model = Net()
    if kind == "prune":
        prune.l1_unstructured(model.first, "weight", 0.5)
    else:
        getattr(nn.utils, kind)(model.last)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", ["prune", "weight_norm", "spectral_norm"])
def test_a_hook_that_makes_a_weight_becomes_a_parametrization(batches, kind):
    torch.manual_seed(3)
    model = _hooked(kind)
    code = _code(TrainStep(model, classify, torch.optim.AdamW(model.parameters())), EscapedTensorError, batches)

    def make(mode):
        model = _hooked(kind)
        exec(code, {"torch": torch, "model": model})
        return _stepping(TrainStep(model, classify, torch.optim.AdamW(model.parameters())), mode, batches)

    _same_in_all_modes(make)
    if kind == "prune":  # and with the bits of an ordinary loop
        torch.manual_seed(3)
        plain = _hooked(kind)
        optimizer = torch.optim.AdamW(plain.parameters())
        for number in range(12):
            optimizer.zero_grad()
            classify(plain, batches(number)).backward()
            optimizer.step()
        ((trainer,), act), _ = (torch.manual_seed(3), make("replay"))[1], None
        for number in range(12):
            act(number)
        plain.eval()
        assert torch.equal(plain(batches(99)["x"]), trainer.step.model.eval()(batches(99)["x"]))


def test_a_batch_norm_without_momentum_counts_in_a_tensor(batches):
    def with_norm(norm: nn.Module) -> nn.Module:
        model = Net()
        model.norm = norm
        return model

    model = with_norm(nn.BatchNorm1d(16, momentum=None))
    code = _code(TrainStep(model, classify, adamw(model.parameters())), HostReadError, batches)
    space = {"torch": torch}
    exec(code, space)

    def make(mode):
        model = with_norm(space["CumulativeBatchNorm"](16, momentum=None))
        return _stepping(TrainStep(model, classify, adamw(model.parameters())), mode, batches)

    mine = _same_in_all_modes(make)
    torch.manual_seed(3)
    stock = with_norm(nn.BatchNorm1d(16, momentum=None))
    trainer = Trainer(TrainStep(stock, classify, adamw(stock.parameters())), "eager")
    trainer.fit(batches, 12)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(mine[f"buffer:norm.{name}"], getattr(stock.norm, name))


class Recurrent(nn.Module):
    """Carries its state from step to step in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last, self.h = nn.GRUCell(8, 8), nn.Linear(8, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cell(x, self.h)
        self.h = h.detach()
        return self.last(h)


def test_a_state_that_the_next_step_reads_goes_on(batches) -> None:
    torch.manual_seed(3)
    plain = Recurrent()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for number in range(12):
        optimizer.zero_grad()
        loss = classify(plain, batches(number))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    refused = Recurrent()
    code = _code(TrainStep(refused, classify, torch.optim.SGD(refused.parameters(), lr=0.1)), EscapedTensorError, batches)
    torch.manual_seed(3)
    names = {"torch": torch, "model": Recurrent(), "loss_fn": classify}
    exec(code, names)
    model: Any = names["model"]
    trainer = Trainer(TrainStep(model, names["loss_with_state"], torch.optim.SGD(model.parameters(), lr=0.1)), "replay")
    assert trainer.fit(batches, 12) == expected
