"""What torch itself does not do is no deviation of the module that meets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from harness import verify_module
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome

FEATURES = 4


class Applies(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(FEATURES, FEATURES), function

    def forward(self, input: Tensor) -> Any:
        return self.function(self.inner(input))


class Checkpointed(Applies):
    """torch refuses to run its backward to the inputs alone."""

    def forward(self, input: Tensor) -> Any:
        return checkpoint(super().forward, input, use_reentrant=True)


class ForgetsBackwardHooks(Checkpointed):
    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return super().register_full_backward_hook(lambda *seen: None, prepend)


def record_of(name: str, module: nn.Module) -> CheckRecord:
    report = verify_module(module, torch.rand(FEATURES, FEATURES, generator=torch.Generator().manual_seed(0)))
    found = {record.name: record for record in report.records}
    assert all(record.outcome is not Outcome.FAIL for record in report.records if record.name != name), report.to_text()
    return found[name]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_keeps_the_contract_of_backward_hooks_and_its_gradients() -> None:
    module = Checkpointed(torch.relu)
    module.inner.weight.grad = torch.ones(FEATURES, FEATURES)
    assert record_of("module.backward_hooks", module).outcome is Outcome.PASS
    assert torch.equal(module.inner.weight.grad, torch.ones(FEATURES, FEATURES)) and module.inner.bias.grad is None
    assert record_of("module.backward_hooks", ForgetsBackwardHooks(torch.relu)).outcome is Outcome.FAIL


def test_hooks_on_parameters_which_may_be_an_optimizer_do_not_run() -> None:
    module, steps = Applies(torch.relu), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(steps.append)
    assert record_of("module.backward_hooks", module).outcome is Outcome.PASS
    assert not steps


NOT_IN_BFLOAT16: dict[str, Callable[[Tensor], Any]] = {
    "rfft": lambda y: torch.fft.rfft(y).abs(),
    "inv": torch.linalg.inv,
    "cholesky": lambda y: torch.linalg.cholesky(y @ y.T + torch.eye(FEATURES, dtype=y.dtype, device=y.device)),
    "cdist": lambda y: torch.cdist(y, y),
    "view_as_complex": lambda y: torch.view_as_complex(y.reshape(FEATURES, 2, 2)).abs(),
    "numpy": lambda y: y + float(y.detach().cpu().numpy().sum()),
}


@pytest.mark.parametrize("name", NOT_IN_BFLOAT16)
def test_a_function_that_torch_has_not_in_bfloat16_is_skipped_by_its_name(name: str) -> None:
    record = record_of("module.to_dtype", Applies(NOT_IN_BFLOAT16[name]))
    assert record.outcome is Outcome.SKIP
    assert name in record.summary and "does not take torch.bfloat16" in record.summary, record.summary


def falls_back(y: Tensor) -> Tensor:
    try:
        return torch.linalg.inv(y)
    except RuntimeError:
        return torch.linalg.inv(y.to(torch.float32)).to(y.dtype)


def refuses_bfloat16(y: Tensor) -> Tensor:
    if y.dtype == torch.bfloat16:
        raise RuntimeError("no bfloat16 here")
    return y


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (falls_back, Outcome.PASS),
        (refuses_bfloat16, Outcome.FAIL),
        (lambda y: y @ torch.eye(FEATURES, device=y.device), Outcome.FAIL),  # float32, whatever it is given
        (lambda y: y.reshape(FEATURES, -1) @ y.reshape(2 if y.dtype == torch.bfloat16 else FEATURES, -1), Outcome.FAIL),
    ],
    ids=["falls back", "refuses", "float32 beside it", "wrong in every dtype"],
)
def test_what_the_module_does_about_bfloat16_is_its_own(function: Callable[[Tensor], Tensor], outcome: Outcome) -> None:
    assert record_of("module.to_dtype", Applies(function)).outcome is outcome
