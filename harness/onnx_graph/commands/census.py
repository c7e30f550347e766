"""`harness onnx census MODEL`: the attention blocks of a graph, and where their Q, K and V come from."""

from __future__ import annotations

import argparse

from compressor.json_text import to_json
from harness.onnx_graph.skips.supervision import NOT_SEEN
from harness.reporting.verdict import EXIT_CODES, worst


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    codes = "exit codes: 0 every block has three projections of its own, 1 one has not, 2 no block, or one that is not clear"
    parser.epilog = f"{NOT_SEEN}; {codes}"
    parser.add_argument("model", metavar="MODEL", help="an .onnx file, or the folder of a transformers checkpoint")
    parser.add_argument("--model-class", metavar="CLASS", help="class of transformers, for a folder; by default AutoModelForCausalLM")
    parser.add_argument("--json", action="store_true", help="print the census as JSON")


def run(args: argparse.Namespace) -> int:
    """Take the census.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 if all blocks are SEPARATE, 1 if one is fused or absorbed, else 2 if there is none or one is not clear.
    """
    from harness.onnx_graph.census.census import census
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip

    trip = onnx_roundtrip(args.model, model_class=args.model_class)
    found = census(trip.exported(trip.exporters[0]).model)
    print(to_json(found.to_dict()) if args.json else found.text() + "\n", end="")
    return EXIT_CODES[worst(block.status.verdict for block in found.blocks)]
