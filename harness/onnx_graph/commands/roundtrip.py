"""`harness onnx roundtrip MODEL`: the matrix of exporters and optimizers, as a table, JSON and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from compressor.errors import UserInputError
from compressor.json_text import to_json
from compressor.settings.kinds import FilePath, Flag, Text, Texts, Whole
from compressor.settings.options import Option
from harness.onnx_graph.commands.check import HELD, LIMITS, ContractSettings
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.skips.passes import resolve_skips
from harness.reporting.text import plain_console, plain_table
from harness.reporting.verdict import Verdict, worst
from harness.verbs import Command

if TYPE_CHECKING:
    from harness.onnx_graph.roundtrip.matrix import RoundTripRow


_ALL = ("onnxsim", "onnxslim", "onnxoptimizer", "ort-basic", "ort-extended", "ort-all", "ort-transformers", "onnxscript")


class RoundTripSettings(ContractSettings):
    """Which ways a model goes."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """Folder of a transformers checkpoint (its weights become float32, or stay codes), or an .onnx file."""
    model_class: Annotated[Text | None, Option(metavar="CLASS")] = None
    """Class of transformers; by default AutoModelForCausalLM."""
    exporter: Annotated[Texts | None, Option(choices=("dynamo", "torchscript"), repeats=True)] = None
    """May be given twice; by default both."""
    optimizer: Annotated[
        Texts | None,
        Option(metavar="NAME", repeats=True, help=f"May be given several times: {', '.join(_ALL)}; by default all installed"),
    ] = None
    """Names of optimizers."""
    skip: Annotated[Texts, Option(metavar="PASSES", repeats=True)] = ()
    """A set of passes to leave out, with commas between; each set makes rows beside those without skips."""
    opset: Annotated[Whole | None, Option(metavar="N", read=int)] = None
    """Of the export; by default 18."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the rows as JSON."""
    output_dir: Annotated[FilePath | None, Option(metavar="DIR")] = None
    """Write report.html (with pictures), report.json, junit.xml."""


def run(settings: RoundTripSettings) -> Verdict:
    """Go all ways.

    Args:
        settings: of the verb.

    Returns:
        PASS if the contract holds in every row that was asked for, REGRESSION if one violates it, else INCONCLUSIVE.

    Raises:
        UserInputError: an unknown optimizer, pass or contract, or an export setting for what is a graph already.
        OutputError: the report's folder holds something else.
    """
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip
    from harness.onnx_graph.roundtrip.optimizers import find_optimizer
    from harness.onnx_graph.roundtrip.report import check_report_folder, write_roundtrip_report

    if settings.exporter and Path(settings.model).is_file():
        raise UserInputError(f"--exporter: {settings.model} is a graph already; leave it out, or give the folder of a checkpoint")
    if settings.output_dir is not None:
        check_report_folder(settings.output_dir)
    contract = contract_from_names(settings.contract)
    optimizers = list(dict.fromkeys(settings.optimizer or _installed()))
    for name in optimizers:
        find_optimizer(name)
    skips = [tuple(name.strip() for name in one.split(",") if name.strip()) for one in settings.skip]
    for one in skips:
        _check_skips(one, optimizers)
    exporters = tuple(dict.fromkeys(settings.exporter or ("dynamo", "torchscript")))
    trip = onnx_roundtrip(settings.model, exporters=exporters, opset=settings.opset, model_class=settings.model_class)
    rows = trip.matrix(contract, optimizers=optimizers, skips=[(), *skips], on_row=_show_progress)
    print(to_json([row.to_dict() for row in rows]) if settings.as_json else "", end="")
    if not settings.as_json:
        _print(rows)
    for note in trip.notes():
        print(f"note: {note}", file=sys.stderr)
    if settings.output_dir is not None:
        page = write_roundtrip_report(trip, rows, settings.output_dir, Path(settings.model).name)
        print(f"report: {page}", file=sys.stderr)
    return worst(row.result.holding.verdict for row in rows)


def _check_skips(skips: Sequence[str], optimizers: Sequence[str]) -> None:
    """Refuse a set that no optimizer of the table would take, or a pass that none of them has."""
    from harness.onnx_graph.roundtrip.optimizers import OPTIMIZERS

    resolve_skips(skips)
    backends = list(dict.fromkeys(OPTIMIZERS[name].backend for name in optimizers if OPTIMIZERS[name].backend))
    if not backends:
        raise UserInputError(f"--skip: {', '.join(optimizers)} has no passes that can be left out by name; leave out {', '.join(skips)}")
    resolve_skips(skips, backends)


def _installed() -> list[str]:
    from harness.onnx_graph.roundtrip.optimizers import OPTIMIZERS

    found = [name for name in _ALL if OPTIMIZERS[name].installed]
    if not found:
        raise UserInputError("round trip: no optimizer is installed; install onnxsim, or name what you have with --optimizer")
    return found


def _show_progress(row: RoundTripRow) -> None:
    if sys.stderr.isatty():
        from rich.control import Control
        from rich.segment import ControlType

        from compressor.console import Console

        start, end = Control((ControlType.ERASE_IN_LINE, 0)), Control(ControlType.CARRIAGE_RETURN)
        Console(file=sys.stderr, highlight=False).print(start, f"{row.exporter} {row.optimizer}: {row.result.holding.value}", end, end="")


def _print(rows: Sequence[RoundTripRow]) -> None:
    console = plain_console(160)
    console.print(plain_table(("exporter", "optimizer", "skipped", "verdict", "nodes", "golden dB", "deploy dB", "ms"), map(_cells, rows)))
    for row in rows:
        if not row.result.holds:
            first = row.result.message.splitlines()[0]
            console.print(f"{row.exporter}, {row.optimizer}, {', '.join(row.skips) or 'nothing skipped'}: {first}", soft_wrap=True)


def _cells(row: RoundTripRow) -> tuple[str, ...]:
    decibels = [f"{row.numbers[name].sqnr_db:.0f}" if name in row.numbers else "-" for name in ("golden", "deploy")]
    nodes = f"{row.num_nodes[0]} -> {row.num_nodes[1]}"
    skips = ", ".join(row.skips) or "-"
    return row.exporter, row.optimizer, skips, row.result.holding.value, nodes, *decibels, f"{row.seconds * 1e3:.0f}"


COMMAND = Command(
    "send a model through exporters and optimizers, and hold each result against contracts", RoundTripSettings, run, LIMITS + HELD
)
