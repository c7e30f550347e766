"""`harness onnx export MODEL OUT.onnx`: a checkpoint of transformers as a checked graph."""

from __future__ import annotations

import argparse
from pathlib import Path

from compressor.atomic import check_output_file
from compressor.errors import UserInputError
from harness.reporting.verdict import EXIT_CODES, Verdict


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
        metavar="N",
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

    Raises:
        UserInputError: no checkpoint, a place that cannot be written to, or sizes and an opset that do not exist.
    """
    check_output_file(args.output, ".onnx")
    from harness.onnx_graph.roundtrip.export import (
        DEFAULT_OPSET,
        describe_inputs,
        example_batch,
        export,
        is_quantized,
        load_for_export,
        opset_of,
        write_graph,
    )
    from harness.onnx_graph.roundtrip.export_quantized import OPSET, export_quantized, load_quantized_for_export

    dynamic = parse_dynamic(args.dynamic)
    if is_quantized(args.model):
        asked = OPSET
        if args.opset not in (None, OPSET):
            raise UserInputError(f"--opset: {args.opset} was given for a compressed checkpoint, which goes at {OPSET}; leave it out")
        module = load_quantized_for_export(args.model, args.model_class)
        exported = export_quantized(module, example_batch(module, args.modality), exporter=args.exporter, dynamic=dynamic)
    else:
        asked = DEFAULT_OPSET if args.opset is None else args.opset
        module, inputs = load_for_export(args.model, args.model_class, args.modality)
        exported = export(module, inputs, exporter=args.exporter, opset=asked, dynamic=dynamic)
    write_graph(exported.model, args.output)
    num_codes = sum(
        node.name.startswith("dequantize ") and not node.name.startswith("dequantize input") for node in exported.model.graph.node
    )
    codes = f", {num_codes} weights with the checkpoint's own codes" if num_codes else ""
    sizes = describe_inputs(exported.inputs or {}, dynamic)
    print(f"{args.output}: {len(exported.model.graph.node)} nodes, opset {opset_of(exported.model)}, inputs {sizes}{codes}, checked")
    if opset_of(exported.model) != asked:
        print(f"note: opset {opset_of(exported.model)}, not {asked}: the exporter {args.exporter} does not write this model at {asked}")
    if not dynamic:
        print("note: these sizes are fixed in the graph; --dynamic INPUT:AXIS=NAME lets one change")
    for note in exported.notes:
        print(f"note: {note}")
    return EXIT_CODES[Verdict.PASS]


def parse_dynamic(texts: list[str]) -> dict[str, dict[int, str]]:
    """Read sizes that may change.

    Args:
        texts: each `INPUT:AXIS=NAME`.

    Returns:
        Input to axis to name.

    Raises:
        UserInputError: another form, or an axis that is named twice.
    """
    found: dict[str, dict[int, str]] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        axis, _, size = rest.partition("=")
        if not name or not axis.isdigit() or not size.isidentifier():
            raise UserInputError(f"--dynamic: {text!r} is not INPUT:AXIS=NAME; write it like input_ids:0=batch")
        if int(axis) in found.setdefault(name, {}):
            raise UserInputError(f"--dynamic: axis {axis} of {name} is named twice; name it once")
        found[name][int(axis)] = size
    return found
