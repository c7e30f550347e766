"""What a forward does beside its output is told by what it did, in whichever mode the module was handed over; and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import verify_module
from harness.modules import contract, surroundings
from harness.reporting.verdict import Outcome

FEATURES = 4


def inputs_of() -> Tensor:
    return torch.rand(2, FEATURES, generator=torch.Generator().manual_seed(0))


class Acts(nn.Module):
    """A layer that does something beside."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        super().__init__()
        self.inner, self.drop, self.act, self.count = nn.Linear(FEATURES, FEATURES), nn.Dropout(), act, 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, input: Tensor) -> Any:
        self.act(self)
        return self.inner(input) * (1 + self.count)


def counts(layer: Acts) -> None:
    layer.count += 1


TOLD: dict[str, tuple[Callable[[Any], object], str]] = {
    "train": (lambda layer: layer.train(), "training changed: False -> True"),
    "eval": (lambda layer: layer.eval(), "training changed: True -> False"),
    "eval of a part": (lambda layer: layer.drop.eval(), "drop: training changed: True -> False"),
    "weights": (lambda layer: layer.inner.weight.data.mul_(1.0001), "changed the values of parameters: inner.weight"),
    "gradients": (lambda layer: layer.zero_grad(), "grad changed"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TOLD)
def test_it_is_told_in_either_mode(name: str, training: bool) -> None:
    act, says = TOLD[name]
    layer = Acts(act).train(training)
    layer.inner.weight.grad = torch.ones(FEATURES, FEATURES)
    report = verify_module(layer, inputs_of())
    told = {record.name: record for record in report.records if record.outcome is Outcome.FAIL}
    assert says in "; ".join(told["module.surroundings"].findings), report.to_text()
    assert all("computes with the tensors of the original" not in str(record.findings) for record in told.values())
    assert layer.training is training and torch.equal(layer.inner.weight.grad, torch.ones(FEATURES, FEATURES))


SETTINGS: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "changed default dtype: torch changed: torch.float32 -> torch.float64"),
    "device": (lambda: torch.set_default_device("meta"), "changed default device: torch changed: 'cpu' -> 'meta'"),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), "changed float32 precision"),
    "seed": (lambda: torch.manual_seed(3), "seeds torch's generator"),
}


@pytest.mark.parametrize("given_training", [True, False])
@pytest.mark.parametrize(("training", "gradients"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_told_that_stays_in_one_mode_alone(name: str, training: bool, gradients: bool, given_training: bool) -> None:
    act, says = SETTINGS[name]
    layer = Acts(lambda layer: act() if (layer.training, torch.is_grad_enabled()) == (training, gradients) else None)
    report = verify_module(layer.train(given_training), inputs_of())
    told = {record.name: record.findings for record in report.records if record.outcome is Outcome.FAIL}
    where = f"a forward {'with' if gradients else 'without'} gradients{'' if training is given_training else f' in training={training}'} "
    assert any(line.startswith(where + says) for line in told.get("module.surroundings", ())), report.to_text()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("allow_tf32", False, "changed float32 precision"), ("benchmark_limit", 3, "changed torch.backends.cudnn.benchmark_limit")],
)
def test_a_setting_of_cudnn_is_told_and_can_be_read_as_before(name: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "CHECKS", surroundings.CHECKS)
    settings = torch.backends.cudnn
    before = getattr(settings, name)
    report = verify_module(Acts(lambda layer: setattr(settings, name, value)), inputs_of())
    assert getattr(settings, name) == before  # torch refuses to tell an older setting that does not agree with the newer ones
    assert report.failed == ("module.surroundings",) and says in report.to_text(), report.to_text()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_gradient_that_is_written_in_one_mode_alone_is_told_whatever_it_is(value: float) -> None:
    def write(layer: Any) -> None:
        if not layer.training:
            layer.inner.weight.grad = torch.full_like(layer.inner.weight, value)

    report = verify_module(Acts(write).train(), inputs_of())
    assert report.failed == ("module.surroundings",) and "inner.weight: grad changed" in report.to_text(), report.to_text()


def test_an_output_that_follows_the_number_of_calls_is_called_so() -> None:
    report = verify_module(Acts(counts), inputs_of())
    assert report.passed, report.to_text()
    notes = {record.name for record in report.records if "a second call on the same inputs gives another one" in record.summary}
    assert notes == {"module.deepcopy", "module.state_dict_round_trip"}


def refuses_to_train(layer: Acts) -> None:
    if layer.training:
        raise RuntimeError("for inference only")


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (Acts(lambda layer: layer.seen.add_(1)).eval(), inputs_of()),
        (Acts(refuses_to_train).eval(), inputs_of()),
        (nn.ReLU(inplace=True), inputs_of()),
        (nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(FEATURES, 2)), inputs_of()),
        (nn.Embedding(FEATURES, 3, max_norm=0.1), torch.arange(FEATURES)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 2)), inputs_of()),
    ],
    ids=["a buffer", "inference only", "in place", "in place in a part", "norms that are cut", "spectral norm"],
)
def test_what_layers_may_do_passes(module: nn.Module, x: Tensor) -> None:
    report = verify_module(module, x)
    assert report.passed, report.to_text()


class Caches(nn.Module):
    """A layer that keeps its last output in a buffer, or drops what was there."""

    def __init__(self, cache: Tensor | None, keep: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.inner, self.keep = nn.Linear(FEATURES, FEATURES), keep
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.inner(input)
        self.cache = self.keep(output)
        return output


@pytest.mark.parametrize("cache", [None, torch.zeros(1)], ids=["none before", "one before"])
def test_a_buffer_may_come_and_go_and_one_that_keeps_a_graph_is_told(cache: Tensor | None) -> None:
    for keep in (Tensor.detach, lambda output: None):
        report = verify_module(Caches(cache, keep), inputs_of())
        assert report.passed, report.to_text()
    report = verify_module(Caches(cache, lambda output: output), inputs_of())
    assert report.failed == ("module.surroundings",) and "cache: requires_grad" in report.to_text(), report.to_text()
