"""`harness onnx explain MODEL --contract ...`: which passes break a contract, and the smallest set of skips that keeps it."""

from __future__ import annotations

import argparse

from compressor.json_text import to_json
from harness.onnx_graph.commands.check import add_contract
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.skips.passes import BACKENDS
from harness.reporting.verdict import EXIT_CODES, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.epilog = "exit codes: 0 it holds, or a set of skips keeps it; 1 no set of skips keeps it; 2 it could not be analysed"
    parser.add_argument("model", metavar="MODEL", help="the model as it was exported, or the folder of a transformers checkpoint")
    parser.add_argument("--model-class", metavar="CLASS", help="class of transformers, for a folder; by default AutoModelForCausalLM")
    add_contract(parser)
    parser.add_argument("--backend", choices=BACKENDS, default="onnxsim", help="the optimizer; by default onnxsim")
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def run(args: argparse.Namespace) -> int:
    """Explain.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 where a set of skips keeps the contract, else what is left with every pass skipped.
    """
    from harness.onnx_graph.roundtrip.explain import explain
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip

    trip = onnx_roundtrip(args.model, model_class=args.model_class)
    exported = trip.exported(trip.exporters[0])
    explanation = explain(exported.model, contract_from_names(args.contract), args.backend, exported.module)
    print(to_json(explanation.to_dict()) if args.json else explanation.text() + "\n", end="")
    return EXIT_CODES[Verdict.PASS if explanation.kept else explanation.default.holding.verdict]
