"""`harness onnx check BEFORE AFTER --contract ...`: does what was exported survive in what was optimized?"""

from __future__ import annotations

import argparse
from typing import Any

from compressor.json_text import to_json
from harness.onnx_graph.contracts.registry import CONTRACTS, contract_from_names
from harness.onnx_graph.skips.supervision import EVIDENCE, NOT_SEEN
from harness.reporting.verdict import EXIT_CODES


class NamesAction(argparse.Action):
    """Names with commas between; those of an option that is given again come behind those of the first."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """Add names to those that were given."""
        before = getattr(namespace, self.dest, self.default)
        given = before is not self.default
        setattr(namespace, self.dest, f"{before},{values}" if given else values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.add_argument("before", metavar="BEFORE", help="the model as it was exported")
    parser.add_argument("after", metavar="AFTER", help="the model as it was optimized")
    add_contract(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_contract(parser: argparse.ArgumentParser) -> None:
    """Declare `--contract`, and say where contracts end.

    Args:
        parser: changed.
    """
    parser.epilog = f"{NOT_SEEN}. numeric-equal: {EVIDENCE}; {parser.epilog}"
    names = "; ".join(f"{name}: {one.text}" for name, one in CONTRACTS.items())
    parser.add_argument(
        "--contract",
        action=NamesAction,
        default="separate-qkv",
        metavar="NAMES",
        help=f"what must hold, with commas between; may be given several times. {names}",
    )


def run(args: argparse.Namespace) -> int:
    """Check.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 if all hold, 1 if one is violated, 2 if one could not be analysed.
    """
    result = contract_from_names(args.contract).check(args.before, args.after)
    if args.json:
        print(to_json(result.to_dict()), end="")
    else:
        print(f"{' & '.join(result.contracts)}: {result.holding.value}")
        if result.message:
            print(result.message)
    return EXIT_CODES[result.holding.verdict]
