"""A plan as text, for people."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from compressor.lifecycle import PlannedModule
from compressor.planning.conversion import Conversion
from compressor.planning.estimate import Estimate, Fit
from compressor.planning.planner import Plan

# Many modules in few words: names that differ in numbers only, and get the same, stand as one: `layers.0-31.mlp.up_proj`.


def join_alike(modules: Sequence[PlannedModule], what: Callable[[PlannedModule], Hashable]) -> list[tuple[str, list[PlannedModule]]]:
    """Put modules together whose names run through all combinations of some numbers.

    Args:
        modules: of a plan.
        what: what modules must have in common.

    Returns:
        A name with ranges in the place of numbers, and the modules that it stands for; in the order of their first modules. A module that
        fits with none is alone.
    """
    groups: dict[Hashable, list[PlannedModule]] = {}
    for module in modules:
        groups.setdefault((re.sub(r"\d+", "#", module.name), what(module)), []).append(module)
    joined: list[tuple[str, list[PlannedModule]]] = []
    for members in groups.values():
        columns = zip(*(map(int, re.findall(r"\d+", module.name)) for module in members), strict=True)
        ranges = [sorted(set(column)) for column in columns]
        if math.prod(map(len, ranges)) == len(members):
            joined.append((_with_ranges(members[0].name, ranges), members))
        else:
            joined += [(module.name, [module]) for module in members]
    return joined


def _with_ranges(name: str, ranges: Sequence[list[int]]) -> str:
    texts = map(_range_text, ranges)
    return re.sub(r"\d+", lambda number: next(texts), name)


def _range_text(numbers: list[int]) -> str:
    """Write sorted numbers as `0-3,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


_FROM_HERE_IN_GB = 1e10
_WHOLE = 1000  # of what is larger tenths say nothing
_NAME_WIDTH = 14
_SHOWN_STAGES = 12  # first and last ones together; those between are like their neighbours


def show_plan(plan: Plan, console: Console) -> None:
    """Print what each module gets and what the run costs.

    Modules that differ in a number of their name only are one line. No name is cut off: what is too long goes on in the next line.

    Args:
        plan: what to show.
        console: where.
    """
    console.print(f"Plan: {plan.pipeline} pipeline, {len(plan.modules)} modules")
    for table in _modules(plan):
        console.print(table)
    for name, modules in join_alike(plan.skipped, lambda module: module.reason):
        times = f" ({len(modules)} modules)" if len(modules) > 1 else ""
        console.print(f"stays as it is: {name}{times}: {modules[0].reason}")
    if plan.attention is not None:
        console.print(plan.attention)
    if plan.unwritable is not None:
        console.print(f"no checkpoint of this can be written: {plan.unwritable}")
    if plan.untried is not None:
        console.print(f"not all of the recipe was held against the model: {plan.untried}")
    for note in plan.notes:
        console.print(f"note: {note}")
    console.print(_stages(plan.estimate))
    for label, value in estimate_lines(plan):
        console.print(f"{label}: {value}")


def estimate_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return the totals of the estimate as label and text.

    Args:
        plan: with its estimate.

    Returns:
        Lines in the order in which they are shown.
    """
    cost = plan.estimate
    disk = f"{_mb(cost.checkpoint_bytes)} ({cost.checkpoint_bytes / max(1, cost.model_bytes):.0%})"
    by_layers = cost.peak_by_layers_bytes
    peak = f"{_mb(cost.peak_bytes)}, {cost.worst.name} at {cost.worst.phase}"
    speed = f"{cost.flops_per_second / 1e9:,.0f} GFLOP/s, {1e6 * cost.column_seconds:,.0f} us for a column in the solver"
    lines = [
        ("weights in memory", _mb(cost.model_bytes)),
        ("weights on disk", disk),
        ("layers or modules in sequence", str(len(plan.sequential_targets) or "-")),
        ("forwards per layer", plan.forwards),
        ("peak memory of tensors (estimate)", peak),
        *([("with weights of one layer at a time (estimate)", _mb(by_layers))] if by_layers < cost.peak_bytes else []),
        ("memory beyond the model (estimate)", _mb(cost.peak_extra_bytes)),
        ("process before the model is loaded", _mb(cost.process_bytes)),
    ]
    if cost.journal_bytes:
        lines.append(("disk for finished stages until the end (with an output folder)", _mb(cost.journal_bytes)))
    if cost.offload_bytes:
        lines.append(("disk for activations (estimate)", _mb(cost.offload_bytes)))
    modes = [
        (
            f"mode {name} (estimate)",
            f"{_time(other.seconds)}, {_mb(other.peak_extra_bytes)} beyond the model",
        )
        for name, other in plan.modes.items()
    ]
    if plan.alone_seconds is not None:
        gain = f"one process would take {_time(plan.alone_seconds)}, {plan.alone_seconds / max(cost.seconds, 1e-9):.1f} times as long"
        lines.append(("all numbers", f"of each of {plan.ranks} ranks, which share samples and solvers; {gain}"))
    if plan.online:
        flops = sum(plan.online.values()) / 1e6
        beside = f"{flops:,.2f} MFLOP a token in {len(plan.online)} modules, {plan.online_share:.1%} of the products of linear layers"
        lines.append(("rotations in every forward of the result (estimate)", beside))
    if plan.fit is not None:
        lines.append((f"on a GPU of {_mb(plan.fit.device_bytes)} (estimate)", _fit_in_words(plan.fit)))
    if plan.conversion is not None:
        lines.append(("by compressor convert, without a forward (estimate)", _conversion_in_words(plan.conversion)))
    where = "" if plan.fit is None or plan.timed_on != "cpu" else " on the processor here, for how fast that GPU is nobody has said"
    return [*lines, ("time (estimate)", f"{_time(cost.seconds)}, at {speed}{where}"), ("memory of forwards", cost.basis), *modes]


_HOLDS = {
    "everything": "fits as a whole",
    "weights": "fits with its activations in main memory",
    "layer": "fits layer by layer: weights, too, wait in main memory (--sequential-offload-device cpu)",
    "nothing": "does not fit, not even layer by layer",
}
_REMEDIES = {
    "weights_bytes": "name smaller --sequential-targets",
    "statistics_bytes": "name smaller --sequential-targets, so that fewer sums live at a time",
    "temporaries_bytes": "take a smaller --batch-size or --max-seq-length",
}
_SOLVER = "take --mode fast where there are modes, or leave its widest modules out (ignore)"


def _fit_in_words(fit: Fit) -> str:
    stage, at = fit.stage, f"{_label(fit.stage.name)} at {fit.stage.phase}"
    if fit.holds != "nothing":
        return f"{_HOLDS[fit.holds]}; at most {_mb(fit.needed_bytes)}, {at}{_waiting_in_words(fit)}"
    parts = {name: getattr(stage, name) for name in _REMEDIES} | {"weights_bytes": stage.weights_bytes - stage.away_bytes}
    largest = max(parts, key=parts.__getitem__)
    most = f"{_mb(parts[largest])} are {largest.removesuffix('_bytes')}"
    remedy = _SOLVER if stage.phase == "compress" and largest != "weights_bytes" else _REMEDIES[largest]
    return f"{_HOLDS[fit.holds]}: {at} needs {_mb(fit.needed_bytes)}, of which {most}; {remedy}"


def _waiting_in_words(fit: Fit) -> str:
    activations = f"{_mb(fit.waiting_bytes - fit.waiting_weights_bytes)} of activations in main memory"
    if fit.waiting_weights_bytes:
        weights = (
            f"{_mb(fit.waiting_weights_bytes)} of weights, which until they are compressed are pages of files that ranks of a host share"
        )
        return f", beside {activations} and {weights}"
    return f", beside {activations}" if fit.waiting_bytes else ""


def _conversion_in_words(one: Conversion) -> str:
    processes = f"in each of {one.workers} processes (--workers {one.workers})" if one.workers > 1 else "in one process"
    bound = "the disk" if one.disk_seconds >= one.seconds else "rounding"
    parts = f"the disk takes {_time(one.disk_seconds)} as fast as the temporary folder, rounding and hashing {_time(one.work_seconds)}"
    return f"{_time(one.seconds)}, bound by {bound}: {parts} of a processor; {_mb(one.block_bytes)} of tensors {processes}"


def _time(seconds: float) -> str:
    """Seconds, and from an hour on hours beside them."""
    return f"{seconds:,.1f} s" + (f" ({seconds / 3600:,.1f} h)" if seconds >= 3600 else "")


def _unit_of(num_bytes: int) -> tuple[str, float]:
    return ("GB", 1e9) if num_bytes >= _FROM_HERE_IN_GB else ("MB", 1e6)


def _short(number: float) -> str:
    return f"{number:,.1f}" if number < _WHOLE else f"{number:,.0f}"


def _modules(plan: Plan) -> Iterator[Table]:
    """One table for each scheme of each modifier: what they have in common needs no column."""
    kinds = dict.fromkeys((module.modifier, module.scheme or "") for module in plan.modules)
    for modifier, scheme in kinds:
        chosen = [module for module in plan.modules if (module.modifier, module.scheme or "") == (modifier, scheme)]
        unit, factor = _unit_of(plan.estimate.peak_bytes)
        table = _table(
            f"{modifier}: {scheme}" if scheme else modifier, [(unit if name == "MB" else name, side) for name, side in _MODULE_COLUMNS]
        )
        for name, modules in join_alike(chosen, lambda module: tuple(str(module.details[key]) for key in _MODULE_DETAILS)):
            sizes = (sum(float(module.details[key]) for module in modules) for key in _MODULE_DETAILS[1:])
            table.add_row(name, str(len(modules)), str(modules[0].details["shape"]), *(f"{size / factor:,.2f}" for size in sizes))
        yield table


def _stages(estimate: Estimate) -> Table:
    unit, factor = _unit_of(estimate.peak_bytes)
    table = _table(f"Peak memory by stage in {unit} (estimate)", _STAGE_COLUMNS)
    stages = estimate.stages
    half = _SHOWN_STAGES // 2
    for at, stage in enumerate(stages):
        if len(stages) > _SHOWN_STAGES and at == half:
            table.add_row(f"... {len(stages) - 2 * half} more ...")
        if half <= at < len(stages) - half and len(stages) > _SHOWN_STAGES:
            continue
        parts = (stage.weights_bytes, stage.statistics_bytes, stage.activations_bytes, stage.temporaries_bytes, stage.peak_bytes)
        table.add_row(_label(stage.name), stage.phase, *(_short(part / factor) for part in parts), _short(stage.seconds))
    return table


def _label(stage: str) -> str:
    """Name the modules of a stage once: `model.layers.0.mlp: gate_proj, up_proj`."""
    first, *others = stage.split(", ")
    parent, dot, own = first.rpartition(".")
    if not others or not dot or any(other.rpartition(".")[0] != parent for other in others):
        return stage
    return f"{parent}: {', '.join([own, *(other.rpartition('.')[2] for other in others)])}"


def _table(title: str, columns: Sequence[tuple[str, str]]) -> Table:
    """A table without lines: at 80 columns the names need the room; those that are longer are folded, numbers never."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    for number, (column, justify) in enumerate(columns):
        table.add_column(column, justify=justify, overflow="fold", no_wrap=justify == "right", min_width=None if number else _NAME_WIDTH)  # type: ignore[arg-type]
    return table


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= _FROM_HERE_IN_GB else f"{num_bytes / 1e6:,.1f} MB"


_MODULE_DETAILS = ("shape", "bytes_before", "bytes_after")
_MODULE_COLUMNS = (
    ("module", "left"),
    ("no.", "right"),
    ("shape", "right"),
    ("MB", "right"),
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
