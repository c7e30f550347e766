"""`harness onnx export MODEL OUT.onnx`: a checkpoint of transformers as a checked graph."""

from __future__ import annotations

import argparse
from pathlib import Path

from compressor.errors import UserInputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.epilog = "exit codes: 0 written, 2 it could not be exported"
    parser.add_argument("model", metavar="MODEL", help="folder of a transformers checkpoint")
    parser.add_argument("output", metavar="OUT.onnx", type=Path, help="where the graph goes; data above 2 GB goes into a file beside it")
    parser.add_argument("--model-class", metavar="CLASS", help="class of transformers; by default AutoModelForCausalLM")
    parser.add_argument(
        "--modality", choices=("text", "vision", "audio"), help="of the example inputs; by default what the model reads first"
    )
    parser.add_argument("--exporter", choices=("dynamo", "torchscript"), default="dynamo", help="by default dynamo")
    parser.add_argument(
        "--opset",
        type=int,
        default=18,
        help="version of the standard operators; by default 18; a compressed checkpoint is exported at 21, the first with 4-bit types",
    )
    parser.add_argument(
        "--dynamic", action="append", default=[], metavar="INPUT:AXIS=NAME", help="a size that may change: input_ids:0=batch"
    )


def run(args: argparse.Namespace) -> int:
    """Export.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0.
    """
    from harness.onnx_graph.export import example_batch, export, is_quantized, load_for_export
    from harness.onnx_graph.quant_export import export_quantized, load_quantized_for_export
    from harness.onnx_graph.writing import write_graph

    dynamic = parse_dynamic(args.dynamic)
    if is_quantized(args.model):
        module = load_quantized_for_export(args.model, args.model_class)
        exported = export_quantized(module, example_batch(module, args.modality), exporter=args.exporter, dynamic=dynamic)
    else:
        module, inputs = load_for_export(args.model, args.model_class, args.modality)
        exported = export(module, inputs, exporter=args.exporter, opset=args.opset, dynamic=dynamic)
    write_graph(exported.model, args.output)
    num_codes = sum(
        node.name.startswith("dequantize ") and not node.name.startswith("dequantize input") for node in exported.model.graph.node
    )
    codes = f", {num_codes} weights with the checkpoint's own codes" if num_codes else ""
    opset = next(one.version for one in exported.model.opset_import if one.domain in ("", "ai.onnx"))
    print(
        f"{args.output}: {len(exported.model.graph.node)} nodes, opset {opset}, inputs {', '.join(exported.inputs or ())}{codes}, checked"
    )
    return 0


def parse_dynamic(texts: list[str]) -> dict[str, dict[int, str]]:
    """Read sizes that may change.

    Args:
        texts: each `INPUT:AXIS=NAME`.

    Returns:
        Input to axis to name.

    Raises:
        UserInputError: another form.
    """
    found: dict[str, dict[int, str]] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        axis, _, size = rest.partition("=")
        if not name or not axis.isdigit() or not size.isidentifier():
            raise UserInputError(f"--dynamic: {text!r} is not INPUT:AXIS=NAME; write it like input_ids:0=batch")
        found.setdefault(name, {})[int(axis)] = size
    return found
