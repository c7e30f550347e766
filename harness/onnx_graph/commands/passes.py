"""`harness onnx passes`: the passes in force, against those on record; a new list is tried before it is trusted."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

from compressor.json_text import to_json
from compressor.settings.kinds import FilePath, Flag, Text, Texts
from compressor.settings.options import Option, add_options, settings_of
from harness.onnx_graph.commands.check import ContractSettings, NamesAction, end_of_contracts
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.skips.passes import BACKENDS
from harness.reporting.verdict import EXIT_CODES, Verdict

DEFAULT_SKIPS = "fuse_qkv,fuse_attention"


class PassesSettings(ContractSettings):
    """Which lists of passes are compared."""

    backend: Annotated[Texts | None, Option(choices=BACKENDS, repeats=True)] = None
    """May be given several times; by default all that are installed."""
    golden: Annotated[FilePath | None, Option(metavar="FILE", read=Path)] = None
    """The record; by default golden/onnx_passes.json."""
    skip: Annotated[Text, Option(metavar="PASSES", action=NamesAction)] = DEFAULT_SKIPS
    """The skips that are relied on, with commas between; may be given several times."""
    accept: Annotated[Flag, Option()] = False
    """Put the lists in force on record, if none of them breaks the contract."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print what was found as JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.epilog = (
        "exit codes: 0 every list is known, or accepted and harmless; 1 a new list breaks the contract; 2 a new list that does not"
    )
    end_of_contracts(parser)
    add_options(parser, PassesSettings)


def run(args: argparse.Namespace) -> int:
    """Compare, try what is new, and put it on record if asked.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 where everything is known or was accepted, 1 where a new list breaks the contract, 2 where a new list waits to be accepted.

    Raises:
        UserInputError: an unknown pass or contract, an optimizer that is not installed, a damaged record.
    """
    settings = settings_of(args, PassesSettings)
    from harness.onnx_graph.roundtrip.pass_list_check import DEFAULT_PATH, accept, check_passes, read_records
    from harness.onnx_graph.skips.passes import installed_backends, resolve_skips

    path = settings.golden or DEFAULT_PATH
    skips = [name.strip() for name in settings.skip.split(",") if name.strip()]
    resolve_skips(skips)
    contract, records = contract_from_names(settings.contract), read_records(path)
    alarms = [check_passes(records, backend, contract, skips) for backend in settings.backend or installed_backends()]
    if settings.as_json:
        print(to_json([alarm.to_dict() for alarm in alarms]), end="")
    else:
        print("\n".join(alarm.text() for alarm in alarms))
    if any(alarm.breaks for alarm in alarms):
        return EXIT_CODES[Verdict.REGRESSION]
    unknown = [alarm for alarm in alarms if alarm.state != "known"]
    if unknown and settings.accept:
        accept(path, unknown)
        return EXIT_CODES[Verdict.PASS]
    return EXIT_CODES[Verdict.INCONCLUSIVE if unknown else Verdict.PASS]
