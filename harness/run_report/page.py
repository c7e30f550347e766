"""The report of a run as one page that needs nothing else: key numbers, plots, layers, modules, time and memory, what made it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.atomic import check_output_dir
from compressor.json_text import to_json
from harness.reporting.pages import render, write_texts
from harness.run_report.plots import plot_errors, plot_inputs, plot_layers, plot_peaks, plot_stages
from harness.run_report.reading import MOVED, OUTLIER, RunReport

__all__ = ["check_output_dir", "write_report"]

_FACTS = ("data", "seed", "pipeline", "source", "versions")


def render_page(report: RunReport) -> str:
    """Return the whole HTML document.

    Args:
        report: what to show.
    Returns:
        A document without any reference outside of itself.
    """
    time, memory = plot_stages(report)
    layers = _layers(report)
    figures = [
        (
            "Errors by kind",
            "relative, as the run measured them: of outputs where a solver saw its inputs, else of weights",
            plot_errors(report.modules),
        ),
        ("Errors by layer", "a dot per module", plot_layers(report)),
        ("Peaks of the weights", "a scale that covers one large weight is coarse for all others", plot_peaks(report.modules)),
        (
            "Loudest inputs",
            "outliers: weights of such a channel count most, and one scale for all inputs is coarse",
            plot_inputs(report.modules),
        ),
        ("Time by stage", "", time),
        ("Memory by stage", "", memory),
    ]
    data = {
        "report": report,
        "name": report.folder.resolve().name,
        "tiles": _tiles(report),
        "figures": [figure for figure in figures if figure[-1]],
        "layers": layers,
        "has_seconds": any(row["seconds"] is not None for row in layers),
        "moved": [row for row in report.modules if row.scheme == MOVED],
        "modules": [row for row in report.modules if row.scheme != MOVED],
        "outlier": OUTLIER,
        "has_loudest": any(row.loudest_input is not None for row in report.modules),
        "has_inputs": any(row.input_peak is not None for row in report.modules),
        "facts": {
            key: _short(report.record[key])
            for key in ("data", "seed", "pipeline", "source", "versions")
            if report.record.get(key) is not None
        },
    }
    return render("run.html.j2", data)


def _short(fact: Any) -> Any:
    """A fact without the marks of a text, thousands of digits that nobody reads."""
    return {key: value for key, value in fact.items() if key != "marks"} if isinstance(fact, Mapping) else fact


def _tiles(report: RunReport) -> list[tuple[str, str, str]]:
    """The key numbers: label, number, note."""
    changed = [row for rows in report.layers.values() for row in rows]
    schemes = sorted({row.scheme for row in changed})
    tiles = [("Modules changed", f"{len(changed):,}", ", ".join(schemes))]
    if changed:
        worst = max(changed, key=lambda row: row.error or 0.0)
        tiles.append(("Largest error", f"{worst.error:.2e}", worst.name))
    for label, key in (("Farthest weight", "peak"), ("Farthest input", "peak_input"), ("Loudest input channel", "loudest_input")):
        known = {row.name: getattr(row, key) for row in changed if getattr(row, key) is not None}
        if known:
            farthest = max(known, key=known.__getitem__)
            tiles.append((label, f"{known[farthest]:.1f} rms", farthest))
    tiles.append(("Tensors on disk", f"{report.num_bytes / 1e6:,.1f} MB", f"{len(report.record.get('fallbacks', []))} fallbacks"))
    if report.phases:
        seconds = sum(lap["seconds"] for lap in report.phases)
        peak = max(lap["host_peak_bytes"] for lap in report.phases)
        tiles.append(("Time", f"{seconds:,.1f} s", f"at most {peak / 1e9:.2f} GB of main memory"))
    return tiles


def _layers(report: RunReport) -> list[Mapping[str, Any]]:
    """A row per layer, the largest error first."""
    rows = [
        {
            "name": name,
            "count": len(members),
            "largest": max(row.error or 0.0 for row in members),
            "worst": max(members, key=lambda row: row.error or 0.0).name.removeprefix(f"{name}."),
            "mean": sum(row.error or 0.0 for row in members) / len(members),
            "peak": max((row.peak for row in members if row.peak is not None), default=None),
            "seconds": report.seconds_of(name),
        }
        for name, members in report.layers.items()
    ]
    return sorted(rows, key=lambda row: -row["largest"])


def write_report(report: RunReport, output_dir: Path) -> Path:
    """Write report.html for people and report.json for programs, whole or not at all.

    Args:
        report: of the run.
        output_dir: folder to write; must not exist, or be empty.
    Returns:
        The path of report.html.
    Raises:
        OutputError: the folder cannot be used.
        CheckpointError: the disk is full or fails; nothing of the report is left.
    """
    target = check_output_dir(output_dir, source=report.folder)
    files = {"report.html": render_page(report), "report.json": to_json(report.to_dict())}
    write_texts(target, files)
    return target / "report.html"
