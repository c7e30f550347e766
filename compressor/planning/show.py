"""A plan as text, for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from compressor.planning.estimate import Estimate
from compressor.planning.planner import Plan

_SHOWN_STAGES = 12  # first and last ones together; those between are like their neighbours


def show_plan(plan: Plan, console: Console) -> None:
    """Print what each module gets and what the run costs.

    Args:
        plan: what to show.
        console: where.
    """
    console.print(_modules(plan))
    for module in plan.skipped:
        console.print(f"stays as it is: {module.name}: {module.reason}", soft_wrap=True)
    console.print(_stages(plan.estimate))
    for label, value in estimate_lines(plan):
        console.print(f"{label}: {value}", soft_wrap=True)


def estimate_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return the totals of the estimate as label and text.

    Args:
        plan: with its estimate.

    Returns:
        Lines in the order in which they are shown.
    """
    cost = plan.estimate
    disk = f"{_mb(cost.checkpoint_bytes)} ({cost.checkpoint_bytes / max(1, cost.model_bytes):.0%})"
    peak = f"{_mb(cost.peak_bytes)}, while {cost.worst.name} is at {cost.worst.phase}"
    speed = f"{cost.flops_per_second / 1e9:,.0f} GFLOP/s, {1e6 * cost.column_seconds:,.0f} us for a column in the solver"
    lines = [
        ("weights in memory", _mb(cost.model_bytes)),
        ("weights on disk", disk),
        ("layers in sequence", str(len(plan.sequential_targets) or "-")),
        ("peak memory of tensors (estimate)", peak),
        ("memory beyond the model (estimate)", _mb(cost.peak_extra_bytes)),
        ("process before the model is loaded", _mb(cost.process_bytes)),
    ]
    if cost.journal_bytes:
        lines.append(("disk for finished stages until the end (with an output folder)", _mb(cost.journal_bytes)))
    if cost.offload_bytes:
        lines.append(("disk for activations (estimate)", _mb(cost.offload_bytes)))
    return [*lines, ("time (estimate)", f"{cost.seconds:,.1f} s, at {speed}"), ("memory of forwards", cost.basis)]


def _modules(plan: Plan) -> Table:
    table = Table(title=f"Plan: {plan.pipeline} pipeline")
    for column, justify in _MODULE_COLUMNS:
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for module in plan.modules:
        before, after = (f"{float(module.details[key]) / 1e6:.2f}" for key in ("bytes_before", "bytes_after"))
        table.add_row(module.name, str(module.details["shape"]), module.modifier, module.scheme or "", before, after)
    return table


def _stages(estimate: Estimate) -> Table:
    table = Table(title="Peak memory by stage in MB (estimate)")
    for column, justify in _STAGE_COLUMNS:
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    stages = estimate.stages
    half = _SHOWN_STAGES // 2
    for at, stage in enumerate(stages):
        if len(stages) > _SHOWN_STAGES and at == half:
            table.add_row(f"... {len(stages) - 2 * half} more ...")
        if half <= at < len(stages) - half and len(stages) > _SHOWN_STAGES:
            continue
        parts = (stage.weights_bytes, stage.statistics_bytes, stage.activations_bytes, stage.temporaries_bytes, stage.peak_bytes)
        table.add_row(stage.name, stage.phase, *(f"{part / 1e6:,.1f}" for part in parts), f"{stage.seconds:,.1f}")
    return table


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


_MODULE_COLUMNS = (
    ("module", "left"),
    ("shape", "left"),
    ("modifier", "left"),
    ("scheme", "left"),
    ("MB before", "right"),
    ("after", "right"),
)
_STAGE_COLUMNS = (
    ("stage", "left"),
    ("worst at", "left"),
    ("weights", "right"),
    ("stats", "right"),
    ("live", "right"),
    ("temps", "right"),
    ("peak", "right"),
    ("sec", "right"),
)
