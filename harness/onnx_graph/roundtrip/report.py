"""The report of a round trip: a page with the matrix and before/after pictures of the blocks, JSON, and JUnit for a test server."""

from __future__ import annotations

import base64
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from compressor.atomic import whole_file
from compressor.errors import CompressorError, OutputError
from compressor.json_text import to_json
from harness.onnx_graph.census.baseline import describe
from harness.onnx_graph.census.block_picture import picture_of, to_svg
from harness.onnx_graph.census.census import Block, Census, census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.graph.view import GraphView
from harness.onnx_graph.roundtrip.matrix import RoundTrip, RoundTripRow
from harness.onnx_graph.skips.passes import effective_passes, installed_backends
from harness.reporting.junit import to_junit
from harness.reporting.pages import render
from harness.reporting.record import CheckRecord

_FILES = ("report.json", "junit.xml", "report.html")
_MAX_BLOCKS = 3
"""Blocks drawn per row: those with findings first."""


def check_report_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than an earlier report of a round trip, before anything runs.

    Args:
        folder: of the report; may be missing.

    Raises:
        OutputError: it is a file, or a folder with other contents.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: it is a file; choose another folder")
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if present and not present >= set(_FILES):
        raise OutputError(
            f"{folder}: it is not empty ({', '.join(sorted(present)[:3])}), and not an earlier report; choose a new or empty folder"
        )


def write_roundtrip_report(trip: RoundTrip, rows: Sequence[RoundTripRow], folder: Path, title: str) -> Path:
    """Write `report.html`, `report.json` and `junit.xml`.

    Args:
        trip: gives the exported graphs.
        rows: of its matrix.
        folder: made if it is missing; files of an earlier report are replaced.
        title: of the page: the model's name.

    Returns:
        The page.

    Raises:
        OutputError: the folder cannot be made.
        CheckpointError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: it cannot be made: {error}; choose another folder") from error
    provenance = _provenance()
    texts = (
        to_json({"title": title, "rows": [row.to_dict() for row in rows], "provenance": provenance}),
        to_junit([_record(row) for row in rows], f"onnx round trip of {title}"),
        _page(trip, rows, title, provenance),
    )
    for name, text in zip(_FILES, texts, strict=True):
        with whole_file(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return folder / "report.html"


def _record(row: RoundTripRow) -> CheckRecord:
    name = ".".join(["onnx", row.exporter, row.optimizer, *([f"skip-{'-'.join(row.skips)}"] if row.skips else [])])
    lines = row.result.message.splitlines()
    summary = lines[0] if lines else "holds"
    return CheckRecord(name, " & ".join(row.result.contracts), row.result.holding.verdict.outcome, summary, findings=tuple(lines))


def _page(trip: RoundTrip, rows: Sequence[RoundTripRow], title: str, provenance: dict[str, Any]) -> str:
    worst = next((one for one in (Holding.VIOLATED, Holding.NOT_ANALYSED) if any(row.result.holding is one for row in rows)), Holding.HOLDS)
    data = {
        "title": title,
        "verdict": worst.value,
        "outcome": worst.verdict.outcome.value,
        "contracts": " & ".join(rows[0].result.contracts) if rows else "",
        "ways": [_way(trip, row) for row in rows],
        "provenance": to_json(provenance),
    }
    return render("roundtrip.html.j2", data)


def _way(trip: RoundTrip, row: RoundTripRow) -> dict[str, Any]:
    return {
        "exporter": row.exporter,
        "optimizer": row.optimizer,
        "skips": row.skips,
        "anchor": "-".join([row.exporter, row.optimizer, *row.skips]),
        "outcome": row.result.holding.verdict.outcome.value,
        "nodes": row.num_nodes,
        "decibels": [f"{row.numbers[name].sqnr_db:.0f}" if name in row.numbers else "–" for name in ("golden", "deploy")],
        "milliseconds": f"{row.seconds * 1e3:.0f}",
        "message": row.result.message,
        "changes": ", ".join(f"{name} {change:+d}" for name, change in row.op_changes.items()) or "none",
        "blocks": _pictures(trip, row),
    }


def _pictures(trip: RoundTrip, row: RoundTripRow) -> list[tuple[int, list[tuple[str, str]]]]:
    """Blocks with findings first: number, and a caption and a picture before and after."""
    if row.optimized is None:
        return []
    sides = [
        (word, GraphView(load_graph(model))) for word, model in (("before", trip.exported(row.exporter).model), ("after", row.optimized))
    ]
    blocks = [(word, view, census(view.model)) for word, view in sides]
    wanted = list(dict.fromkeys([*(found.block for found in row.result.findings if found.block >= 0), 0]))[:_MAX_BLOCKS]
    return [(number, [_figure(word, view, found, number) for word, view, found in blocks]) for number in wanted]


def _figure(word: str, view: GraphView, found: Census, number: int) -> tuple[str, str]:
    block: Block | None = next((one for one in found.blocks if one.index == number), None)
    if block is None:
        return f"{word}: there is no such block", ""
    return f"{word}: {describe(block)}", base64.b64encode(to_svg(picture_of(view, block)).encode()).decode()


def _provenance() -> dict[str, Any]:
    """Versions, and the pass lists with their hashes."""
    passes: dict[str, Any] = {}
    for backend in installed_backends():
        try:
            passes[backend] = effective_passes(backend).to_dict()
        except CompressorError as error:
            passes[backend] = str(error)
    return {"python": platform.python_version(), "onnx": onnx.__version__, "passes": passes}
