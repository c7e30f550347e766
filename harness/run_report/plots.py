"""The plots of a run: errors by kind of module and by layer, the peaks of weights, time and memory of its stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, NullFormatter

from harness.reporting.plots import ACCENT, GRID, INK, MUTED, inline_plot
from harness.run_report.reading import MOVED, OUTLIER, ModuleRow, RunReport

_MAX_KINDS = 14
_WIDTH = 4.8  # inches; narrow, so that its letters can be read on a phone, too


def plot_errors(modules: Sequence[ModuleRow]) -> str:
    """Plot the relative error of every module, a row per kind of module.

    Args:
        modules: of the run.
    Returns:
        An SVG element; empty where nothing has an error.
    """
    rows = _by_kind({row.name: row.error for row in modules if row.error and row.scheme != MOVED})
    return _plot_kinds("errors", rows, "relative error; a dot per module, a bar at the median of its kind", is_log=True) if rows else ""


def plot_peaks(modules: Sequence[ModuleRow]) -> str:
    """Plot how far the largest weight of every module stands out, a row per kind.

    Args:
        modules: of the run.
    Returns:
        An SVG element; empty where no weight was read.
    """
    rows = _by_kind({row.name: row.peak for row in modules if row.peak and row.scheme != MOVED})
    return _plot_kinds("peaks", rows, f"largest weight, in rms of its module; outliers lie beyond {OUTLIER:g}") if rows else ""


def plot_inputs(modules: Sequence[ModuleRow]) -> str:
    """Plot how far the loudest input channel of every module stands out, a row per kind.

    Args:
        modules: of the run.
    Returns:
        An SVG element; empty where no run has measured it.
    """
    rows = _by_kind({row.name: row.loudest_input for row in modules if row.loudest_input})
    return _plot_kinds("inputs", rows, "rms of the loudest input channel, in rms of all channels") if rows else ""


def plot_layers(report: RunReport) -> str:
    """Plot the errors of the modules of every layer, in the order of the model.

    Args:
        report: of the run.
    Returns:
        An SVG element; empty where there are fewer than two layers.
    """
    layers = [[row.error for row in rows if row.error] for rows in report.layers.values()]
    layers = [errors for errors in layers if errors]
    if len(layers) < 2:
        return ""

    def paint(axes: Axes) -> None:
        for place, errors in enumerate(layers):
            axes.plot([place] * len(errors), errors, "o", color=ACCENT, alpha=0.55, markersize=5, markeredgewidth=0)
        axes.plot(range(len(layers)), [max(errors) for errors in layers], color=INK, linewidth=1.2)
        axes.set_yscale("log")
        _label_log(axes.yaxis, [error for errors in layers for error in errors])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _dress(axes, "layer, in the order of the model; the line joins the largest errors", "y")

    worst = max(range(len(layers)), key=lambda place: max(layers[place]))
    return inline_plot("layers", f"Relative errors of {len(layers)} layers; the largest in layer {worst}", (_WIDTH, 2.9), paint)


def plot_stages(report: RunReport) -> tuple[str, str]:
    """Plot seconds and memory of the stages.

    Args:
        report: of the run.
    Returns:
        An SVG element each; empty where they were not measured, and where all was one stage.
    """
    stages = report.stages or ()
    if len(stages) < 2:
        return "", ""
    memory = [stage.get("host_bytes") for stage in stages]
    seconds = [stage["seconds"] for stage in stages]

    def paint_time(axes: Axes) -> None:
        axes.bar(range(len(seconds)), seconds, color=ACCENT, width=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _dress(axes, "stage, in the order of the run; seconds", "y")

    def paint_memory(axes: Axes) -> None:
        known = [np.nan if value is None else value / 1e9 for value in memory]
        axes.step(range(len(known)), known, color=ACCENT, linewidth=1.6, where="mid")
        axes.set_ylim(0, float(np.nanmax(known)) * 1.15)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _dress(axes, "stage, in the order of the run; GB of main memory at its end", "y")

    time = inline_plot("seconds", f"{len(seconds)} stages, {sum(seconds):.1f} s", (_WIDTH, 2.5), paint_time)
    is_known = any(value is not None for value in memory)
    return time, inline_plot("memory", f"Main memory of {len(memory)} stages", (_WIDTH, 2.5), paint_memory) if is_known else ""


def _by_kind(values: dict[str, float | None]) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}
    for name, value in values.items():
        if value is not None:
            rows.setdefault(name.rpartition(".")[2], []).append(value)
    return {kind: rows[kind] for kind in sorted(rows, key=lambda kind: -max(rows[kind]))[:_MAX_KINDS]}


def _plot_kinds(name: str, rows: dict[str, list[float]], label: str, *, is_log: bool = False) -> str:
    def paint(axes: Axes) -> None:
        for height, values in enumerate(reversed(rows.values())):
            axes.plot(values, [height] * len(values), "o", color=ACCENT, alpha=0.55, markersize=5.5, markeredgewidth=0)
            axes.plot([float(np.median(values))], [height], "|", color=INK, markersize=11, markeredgewidth=1.4)
        axes.set_yticks(range(len(rows)), list(reversed(rows)))
        axes.set_ylim(-0.6, len(rows) - 0.4)
        if is_log:
            axes.set_xscale("log")
            _label_log(axes.xaxis, [value for values in rows.values() for value in values])
        _dress(axes, label, "x")

    largest = ", ".join(f"{kind} {max(values):.3g}" for kind, values in rows.items())
    return inline_plot(name, f"{label}. Largest by kind: {largest}", (_WIDTH, 1.1 + 0.32 * len(rows)), paint)


def _label_log(axis: Axis, values: Sequence[float]) -> None:
    """Label so many places of a logarithmic axis that their numbers stay apart: of few decades 1, 2 and 5, else powers of ten."""
    is_short = max(values) < 200 * min(values)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_short else (1.0,), numticks=8))
    axis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(np.inf, np.inf)))
    axis.set_minor_formatter(NullFormatter())


def _dress(axes: Axes, label: str, grid: str) -> None:
    axes.grid(axis=grid, color=GRID, linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.set_xlabel(label, color=MUTED)
