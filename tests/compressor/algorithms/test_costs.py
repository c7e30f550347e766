"""The formulas of costs say what the allocator sees, within a few percent, for tall, wide and stacked weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compressor.algorithms.costs import FLOAT32_BYTES, gptq_cost, rounding_cost, sparsegpt_cost
from compressor.algorithms.gptq import Solver, quantize_gptq
from compressor.algorithms.hessian import Hessian, panel_bytes
from compressor.algorithms.pruning.sparsegpt import prune_sparsegpt
from compressor.algorithms.rtn import round_to_nearest
from compressor.numerics import preset_scheme, weight_qparams
from compressor.numerics.part_sums import NUM_PARTS

SHAPES = [([768, 768], 256, torch.bfloat16), ([256], 768, torch.bfloat16), ([64], 512, torch.float32), ([1024], 256, torch.float32)]


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that torch's CPU allocator has given out at one time."""
    work()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profile:  # as live_peak.py says
        work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("preset", ["W4A16", "W8A8"])
@pytest.mark.parametrize("solver", ["r_form", "reference"])
@pytest.mark.parametrize(("rows", "columns", "dtype"), SHAPES)
def test_the_cost_of_gptq_is_what_it_takes(preset: str, solver: Solver, rows: list[int], columns: int, dtype: torch.dtype) -> None:
    args = preset_scheme(preset, ["Linear"]).weights
    assert args is not None
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(count, columns, generator=generator).to(dtype) for count in rows]
    inputs = torch.randn(2 * columns, columns, generator=generator)
    search = solver == "r_form"
    hessian = Hessian(columns)
    hessian.add(inputs)
    kept: list[torch.Tensor] = [hessian.matrix("layer")]

    def solve() -> None:
        names = [f"layer{i}" for i in range(len(rows))]
        quantize_gptq(weights, kept[0], args, solver=solver, scale_search=search, names=names)

    element_bytes = weights[0].element_size()
    cost = gptq_cost(rows, columns, element_bytes, args, num_tokens=len(inputs), block_size=128, solver=solver, scale_search=search)
    measured = max(peak_bytes(solve), panel_bytes(columns))
    assert cost.working_bytes == pytest.approx(measured, rel=0.03)

    def accumulate(parts: int) -> None:
        growing = Hessian(columns)
        for part in range(parts):
            growing.add(inputs, part)

    assert cost.statistics_bytes == pytest.approx(peak_bytes(lambda: accumulate(1)), rel=0.01)
    shared = gptq_cost(rows, columns, element_bytes, args, num_tokens=1 << 20, block_size=128, solver=solver, scale_search=search)
    assert shared.statistics_bytes == pytest.approx(peak_bytes(lambda: accumulate(NUM_PARTS)), rel=0.01)
    assert cost.flops > 2.0 * len(inputs) * columns**2 / 2


@pytest.mark.parametrize(("rows", "columns", "dtype"), SHAPES)
def test_the_cost_of_shifted_weights_is_what_it_takes(rows: list[int], columns: int, dtype: torch.dtype) -> None:
    args = preset_scheme("W4A16", ["Linear"]).weights
    assert args is not None
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(count, columns, generator=generator).to(dtype) for count in rows]
    inputs = torch.randn(2 * columns, columns, generator=generator)
    hessian = Hessian(columns)
    hessian.add(inputs)
    hessian.add_shift(inputs + 0.1 * inputs.roll(1, 1), inputs)
    shift, kept = hessian.shift(), hessian.matrix("layer")

    def solve() -> None:
        quantize_gptq(weights, kept, args, shift_CC=shift, names=[f"layer{i}" for i in range(len(rows))])

    element_bytes = weights[0].element_size()
    cost = gptq_cost(
        rows, columns, element_bytes, args, num_tokens=1, block_size=128, solver="r_form", scale_search=True, has_base_stream=True
    )
    assert cost.settled_bytes == 2 * FLOAT32_BYTES * columns**2
    assert cost.working_bytes == pytest.approx(max(peak_bytes(solve), panel_bytes(columns)), rel=0.1)


@pytest.mark.parametrize(("rows", "columns", "dtype"), SHAPES)
def test_the_cost_of_rounding_is_what_it_takes(rows: list[int], columns: int, dtype: torch.dtype) -> None:
    args = preset_scheme("W4A16", ["Linear"]).weights
    assert args is not None
    weight = torch.randn(rows[0], columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    cost = rounding_cost(rows, columns, weight.element_size())
    measured = peak_bytes(lambda: round_to_nearest(weight, weight_qparams(weight, args, "layer"), args))
    assert cost.working_bytes == pytest.approx(measured, rel=0.03)
    assert cost.statistics_bytes == 0


@pytest.mark.parametrize("steps", [0, 8])
@pytest.mark.parametrize(("rows", "columns", "dtype"), SHAPES)
def test_the_cost_of_sparsegpt_is_what_it_takes(rows: list[int], columns: int, dtype: torch.dtype, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(count, columns, generator=generator).to(dtype) for count in rows]
    hessian = Hessian(columns)
    hessian.add(torch.randn(2 * columns, columns, generator=generator))
    kept = hessian.matrix("layer")

    def solve() -> None:
        prune_sparsegpt(weights, kept, 0.5, refining_steps=steps, names=[f"layer{i}" for i in range(len(rows))])

    cost = sparsegpt_cost(rows, columns, weights[0].element_size(), num_tokens=1, block_size=128, refining_steps=steps)
    assert cost.settled_bytes == FLOAT32_BYTES * columns**2
    assert cost.working_bytes == pytest.approx(peak_bytes(solve), rel=0.15)
