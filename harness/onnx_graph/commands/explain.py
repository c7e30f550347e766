"""`harness onnx explain MODEL --contract ...`: which passes break a contract, and the smallest set of skips that keeps it."""

from __future__ import annotations

import argparse
from typing import Annotated

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text
from compressor.settings.options import Option, add_options, settings_of
from harness.onnx_graph.commands.check import ContractSettings, end_of_contracts
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.skips.passes import BACKENDS
from harness.reporting.verdict import EXIT_CODES, Verdict


class ExplainSettings(ContractSettings):
    """What is to be explained."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """The model as it was exported, or the folder of a transformers checkpoint."""
    model_class: Annotated[Text | None, Option(metavar="CLASS")] = None
    """Class of transformers, for a folder; by default AutoModelForCausalLM."""
    backend: Annotated[Text, Option(choices=BACKENDS)] = "onnxsim"
    """The optimizer."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the explanation as JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.epilog = "exit codes: 0 it holds, or a set of skips keeps it; 1 no set of skips keeps it; 2 it could not be analysed"
    end_of_contracts(parser)
    add_options(parser, ExplainSettings)


def run(args: argparse.Namespace) -> int:
    """Explain.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 where a set of skips keeps the contract, else what is left with every pass skipped.
    """
    settings = settings_of(args, ExplainSettings)
    from harness.onnx_graph.roundtrip.explain import explain
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip

    trip = onnx_roundtrip(settings.model, model_class=settings.model_class)
    exported = trip.exported(trip.exporters[0])
    explanation = explain(exported.model, contract_from_names(settings.contract), settings.backend, exported.module)
    print(to_json(explanation.to_dict()) if settings.as_json else explanation.text() + "\n", end="")
    return EXIT_CODES[Verdict.PASS if explanation.kept else explanation.default.holding.verdict]
