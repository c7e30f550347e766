"""`harness onnx passes`: the passes in force, against those on record; a new list is tried before it is trusted."""

from __future__ import annotations

import argparse
from pathlib import Path

from compressor.json_text import to_json
from harness.onnx_graph.commands.check import NamesAction, add_contract
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.skips.passes import BACKENDS
from harness.reporting.verdict import EXIT_CODES, Verdict

DEFAULT_SKIPS = "fuse_qkv,fuse_attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.epilog = (
        "exit codes: 0 every list is known, or accepted and harmless; 1 a new list breaks the contract; 2 a new list that does not"
    )
    parser.add_argument(
        "--backend", action="append", choices=BACKENDS, help="may be given several times; by default all that are installed"
    )
    parser.add_argument("--golden", type=Path, metavar="FILE", help="the record; by default golden/onnx_passes.json")
    text = f"the skips that are relied on, with commas between; may be given several times; by default {DEFAULT_SKIPS}"
    parser.add_argument("--skip", action=NamesAction, default=DEFAULT_SKIPS, metavar="PASSES", help=text)
    add_contract(parser)
    parser.add_argument("--accept", action="store_true", help="put the lists in force on record, if none of them breaks the contract")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare, try what is new, and put it on record if asked.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 where everything is known or was accepted, 1 where a new list breaks the contract, 2 where a new list waits to be accepted.

    Raises:
        UserInputError: an unknown pass or contract, an optimizer that is not installed, a damaged record.
    """
    from harness.onnx_graph.roundtrip.pass_list_check import DEFAULT_PATH, accept, check_passes, read_records
    from harness.onnx_graph.skips.passes import installed_backends, resolve_skips

    path = args.golden or DEFAULT_PATH
    skips = [name.strip() for name in args.skip.split(",") if name.strip()]
    resolve_skips(skips)
    contract, records = contract_from_names(args.contract), read_records(path)
    alarms = [check_passes(records, backend, contract, skips) for backend in args.backend or installed_backends()]
    if args.json:
        print(to_json([alarm.to_dict() for alarm in alarms]), end="")
    else:
        print("\n".join(alarm.text() for alarm in alarms))
    if any(alarm.breaks for alarm in alarms):
        return EXIT_CODES[Verdict.REGRESSION]
    unknown = [alarm for alarm in alarms if alarm.state != "known"]
    if unknown and args.accept:
        accept(path, unknown)
        return EXIT_CODES[Verdict.PASS]
    return EXIT_CODES[Verdict.INCONCLUSIVE if unknown else Verdict.PASS]
