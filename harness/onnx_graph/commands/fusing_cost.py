"""`harness onnx fusing-cost MODEL`: what one scale over fused Q, K and V costs a quantizer, per role in dB."""

from __future__ import annotations

import argparse
from pathlib import Path

from compressor.atomic import check_output_file
from compressor.json_text import to_json
from harness.reporting.verdict import EXIT_CODES, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.epilog = "exit codes: 0 measured, 2 there is nothing to measure"
    parser.add_argument("model", metavar="MODEL", help="an .onnx file as exported, or the folder of a transformers checkpoint")
    parser.add_argument("--model-class", metavar="CLASS", help="class of transformers, for a folder; by default AutoModelForCausalLM")
    parser.add_argument("--bits", type=int, default=8, choices=range(2, 9), metavar="N", help="bits of the codes, 2 to 8; by default 8")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the cost of every projection there, as .svg or .png")
    parser.add_argument("--json", action="store_true", help="print every projection as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0.
    """
    if args.figure is not None:
        check_output_file(args.figure, ".svg", ".png")
    from harness.onnx_graph.roundtrip.fusing_cost import draw_costs, fusing_cost, summary
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip

    trip = onnx_roundtrip(args.model, exporters=["torchscript"], model_class=args.model_class)
    rows = fusing_cost(trip.exported(trip.exporters[0]).model, args.bits)
    if args.figure is not None:
        draw_costs(rows, args.figure, f"{Path(args.model).name}: int{args.bits}, one scale over Q, K and V against one each")
    if args.json:
        print(to_json({"rows": [row.to_dict() for row in rows], "summary": summary(rows)}), end="")
        return EXIT_CODES[Verdict.PASS]
    print(f"int{args.bits}, one scale per tensor: own scale - one scale over Q, K and V, {len(rows) // 3} blocks")
    for role, cost in summary(rows).items():
        print(f"  {role.upper()}: {cost['mean_db']:.1f} dB lost on average, {cost['worst_db']:.1f} dB at worst")
    return EXIT_CODES[Verdict.PASS]
