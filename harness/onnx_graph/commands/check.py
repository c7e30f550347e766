"""`harness onnx check BEFORE AFTER --contract ...`: does what was exported survive in what was optimized?"""

from __future__ import annotations

import argparse
from typing import Annotated, Any

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text
from compressor.settings.options import Option, Settings, add_options, settings_of
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


_NAMES = "; ".join(f"{name}: {one.text}" for name, one in CONTRACTS.items())


class ContractSettings(Settings):
    """What must hold."""

    contract: Annotated[
        Text,
        Option(
            metavar="NAMES",
            action=NamesAction,
            help=f"What must hold, with commas between; may be given several times. {_NAMES}",
        ),
    ] = "separate-qkv"
    """Names of contracts, with commas between."""


class CheckSettings(ContractSettings):
    """Which graphs are compared."""

    before: Annotated[Text, Option(positional=True, metavar="BEFORE")]
    """The model as it was exported."""
    after: Annotated[Text, Option(positional=True, metavar="AFTER")]
    """The model as it was optimized."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the result as JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    end_of_contracts(parser)
    add_options(parser, CheckSettings)


def end_of_contracts(parser: argparse.ArgumentParser) -> None:
    """Say in the help where contracts end.

    Args:
        parser: changed.
    """
    parser.epilog = f"{NOT_SEEN}. numeric-equal: {EVIDENCE}; {parser.epilog}"


def run(args: argparse.Namespace) -> int:
    """Check.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 if all hold, 1 if one is violated, 2 if one could not be analysed.
    """
    settings = settings_of(args, CheckSettings)
    result = contract_from_names(settings.contract).check(settings.before, settings.after)
    if settings.as_json:
        print(to_json(result.to_dict()), end="")
    else:
        print(f"{' & '.join(result.contracts)}: {result.holding.value}")
        if result.message:
            print(result.message)
    return EXIT_CODES[result.holding.verdict]
