"""`harness onnx check BEFORE AFTER --contract ...`: does what was exported survive in what was optimized?"""

from __future__ import annotations

import argparse
from typing import Annotated, Any

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text
from compressor.settings.options import Option, Settings
from harness.onnx_graph.contracts.registry import CONTRACTS, contract_from_names
from harness.onnx_graph.skips.supervision import EVIDENCE, NOT_SEEN
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


class NamesAction(argparse.Action):
    """Names with commas between; those of an option that is given again come behind those of the first."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """Add names to those that were given."""
        before = getattr(namespace, self.dest, self.default)
        given = before is not self.default
        setattr(namespace, self.dest, f"{before},{values}" if given else values)


LIMITS = f"{NOT_SEEN}. numeric-equal: {EVIDENCE}; "
"""What contracts do not see, for the help."""
HELD = exit_codes("the contracts hold", "one is violated", "it could not be analysed; never 0 for want of evidence")
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


def run(settings: CheckSettings) -> Verdict:
    """Check.

    Args:
        settings: of the verb.

    Returns:
        PASS if all hold, REGRESSION if one is violated, INCONCLUSIVE if one could not be analysed.
    """
    result = contract_from_names(settings.contract).check(settings.before, settings.after)
    if settings.as_json:
        print(to_json(result.to_dict()), end="")
    else:
        print(f"{' & '.join(result.contracts)}: {result.holding.value}")
        if result.message:
            print(result.message)
    return result.holding.verdict


COMMAND = Command("hold an optimized graph against the exported one", CheckSettings, run, LIMITS + HELD)
