"""The verb `harness onnx`: a table of what it can do, each a module with `add_arguments(parser)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from compressor.errors import CompressorError, UserInputError
from harness.reporting.verdict import EXIT_CODES, EXIT_FAILURE, Verdict

EPILOG = "exit codes: 0 the contracts hold, 1 one is violated, 2 it could not be analysed; never 0 for want of evidence"


@dataclass(frozen=True)
class Action:
    """One thing the verb can do: its line of help, the module that does it, and what an error means."""

    help: str
    module: str
    failed: str = "could not be analysed"


ACTIONS: Mapping[str, Action] = {
    "export": Action(
        "export a checkpoint of transformers as a checked graph", "harness.onnx_graph.commands.export", "nothing was exported"
    ),
    "roundtrip": Action(
        "send a model through exporters and optimizers, and hold each result against contracts", "harness.onnx_graph.commands.roundtrip"
    ),
    "census": Action("list the attention blocks of a graph, and where their Q, K and V come from", "harness.onnx_graph.commands.census"),
    "check": Action("hold an optimized graph against the exported one", "harness.onnx_graph.commands.check"),
    "explain": Action("find the passes that break a contract, and the smallest set of skips", "harness.onnx_graph.commands.explain"),
    "passes": Action("compare the passes in force with those on record, and try new ones", "harness.onnx_graph.commands.passes"),
    "fusing-cost": Action("measure what one scale over fused Q, K and V costs a quantizer", "harness.onnx_graph.commands.fusing_cost"),
    "run": Action(
        "run a command whose code cannot be edited, and keep passes from running in it",
        "harness.onnx_graph.commands.run",
        "nothing was run",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments.

    Args:
        parser: of the verb; changed.
    """
    parser.epilog = f"{EPILOG}; 3 bad input"
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action in ACTIONS.items():
        module = importlib.import_module(action.module)
        own = actions.add_parser(name, help=action.help, description=action.help, epilog=EPILOG)
        module.add_arguments(own)
        own.epilog = f"{own.epilog}; 3 bad input"


def run(args: argparse.Namespace) -> int:
    """Do one of the actions.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0, 1 or 2, as the epilog says; 3 for bad input, with the reason on standard error.
    """
    try:
        code: int = importlib.import_module(ACTIONS[args.action].module).run(args)
    except CompressorError as error:
        print(f"harness onnx {args.action}: {ACTIONS[args.action].failed}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILURE if isinstance(error, UserInputError) else EXIT_CODES[Verdict.INCONCLUSIVE]
    return code
