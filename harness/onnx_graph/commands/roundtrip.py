"""`harness onnx roundtrip MODEL`: the matrix of exporters and optimizers, as a table, JSON and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import UserInputError
from compressor.json_text import to_json
from harness.onnx_graph.commands.check import add_contract
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.skips.passes import resolve_skips
from harness.reporting.verdict import EXIT_CODES, worst

if TYPE_CHECKING:
    from harness.onnx_graph.roundtrip.matrix import RoundTripRow


_ALL = ("onnxsim", "onnxslim", "onnxoptimizer", "ort-basic", "ort-extended", "ort-all", "ort-transformers", "onnxscript")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.add_argument("model", metavar="MODEL", help="folder of a transformers checkpoint, or an .onnx file")
    parser.add_argument("--model-class", metavar="CLASS", help="class of transformers; by default AutoModelForCausalLM")
    parser.add_argument("--exporter", action="append", choices=("dynamo", "torchscript"), help="may be given twice; by default both")
    parser.add_argument(
        "--optimizer", action="append", metavar="NAME", help=f"may be given several times: {', '.join(_ALL)}; by default all installed"
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PASSES",
        help="a set of passes to leave out, with commas between; each set makes rows beside those without skips",
    )
    add_contract(parser)
    parser.add_argument("--opset", type=int, metavar="N", help="of the export; by default 18")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="write report.html (with pictures), report.json, junit.xml")


def run(args: argparse.Namespace) -> int:
    """Go all ways.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 if the contract holds in every row that was asked for, 1 if one violates it, 2 if one could not be analysed.

    Raises:
        UserInputError: an unknown optimizer, pass or contract, or an export setting for what is a graph already.
        OutputError: the report's folder holds something else.
    """
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip
    from harness.onnx_graph.roundtrip.optimizers import find_optimizer
    from harness.onnx_graph.roundtrip.report import check_report_folder, write_roundtrip_report

    if args.exporter and Path(args.model).is_file():
        raise UserInputError(f"--exporter: {args.model} is a graph already; leave it out, or give the folder of a checkpoint")
    if args.output_dir is not None:
        check_report_folder(args.output_dir)
    contract = contract_from_names(args.contract)
    optimizers = list(dict.fromkeys(args.optimizer or _installed()))
    for name in optimizers:
        find_optimizer(name)
    skips = [tuple(name.strip() for name in one.split(",") if name.strip()) for one in args.skip]
    for one in skips:
        _check_skips(one, optimizers)
    exporters = tuple(dict.fromkeys(args.exporter or ("dynamo", "torchscript")))
    trip = onnx_roundtrip(args.model, exporters=exporters, opset=args.opset, model_class=args.model_class)
    rows = trip.matrix(contract, optimizers=optimizers, skips=[(), *skips], on_row=_show_progress)
    print(to_json([row.to_dict() for row in rows]) if args.json else "", end="")
    if not args.json:
        _print(rows)
    for note in trip.notes():
        print(f"note: {note}", file=sys.stderr)
    if args.output_dir is not None:
        page = write_roundtrip_report(trip, rows, args.output_dir, Path(args.model).name)
        print(f"report: {page}", file=sys.stderr)
    return EXIT_CODES[worst(row.result.holding.verdict for row in rows)]


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
        print(f"\x1b[K{row.exporter} {row.optimizer}: {row.result.holding.value}\r", file=sys.stderr, end="")


def _print(rows: Sequence[RoundTripRow]) -> None:
    from rich.table import Table

    from compressor.console import Console

    table = Table("exporter", "optimizer", "skipped", "verdict", "nodes", "golden dB", "deploy dB", "ms", box=None, pad_edge=False)
    for row in rows:
        decibels = [f"{row.numbers[name].sqnr_db:.0f}" if name in row.numbers else "-" for name in ("golden", "deploy")]
        nodes = f"{row.num_nodes[0]} -> {row.num_nodes[1]}"
        verdict = row.result.holding.value
        table.add_row(row.exporter, row.optimizer, ", ".join(row.skips) or "-", verdict, nodes, *decibels, f"{row.seconds * 1e3:.0f}")
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(table)
    for row in rows:
        if not row.result.holds:
            first = row.result.message.splitlines()[0]
            console.print(f"{row.exporter}, {row.optimizer}, {', '.join(row.skips) or 'nothing skipped'}: {first}", soft_wrap=True)
