"""Memory that runs out while a model is traced, at each of its forwards: it is said, and no other engine is tried in its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compressor.tracing import trace
from compressor.tracing.targets.out_of_memory import is_out_of_memory


class Starving(nn.Module):
    """A stack whose layers count their calls; memory runs out at one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def trace_starving(engine: str, fails_at: int) -> int:
    """Trace while call `fails_at` of the first layer fails; return the number of its calls."""
    torch.manual_seed(0)
    model, calls = Starving().eval(), 0

    def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.layers[0].register_forward_pre_hook(count)
    plan = trace(model, [{"x": torch.ones(2, 4)}, {"x": torch.ones(3, 4)}], targets=["Linear"], engine=engine, verify="all")
    assert plan.engine == ("suspend" if engine == "suspend" else "graph")
    return calls


@pytest.mark.parametrize(("engine", "least_calls"), [("auto", 4), ("graph", 4), ("suspend", 1)])
def test_memory_that_runs_out_in_any_forward_of_a_trace_is_what_the_caller_hears(engine: str, least_calls: int) -> None:
    num_calls = trace_starving(engine, fails_at=0)
    assert num_calls >= least_calls
    for number in range(1, num_calls + 1):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            trace_starving(engine, fails_at=number)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_is_told_from_every_other_failure(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
