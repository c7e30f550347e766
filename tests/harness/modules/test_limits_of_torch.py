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
