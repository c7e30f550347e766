"""`harness onnx export MODEL OUT.onnx`: a checkpoint of transformers as a checked graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from compressor.atomic import check_output_file
from compressor.errors import UserInputError
from compressor.settings.kinds import FilePath, Text, Texts, Whole
from compressor.settings.options import Option, Settings
from compressor.settings.verbs import Modality
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


class ExportSettings(Settings):
    """What is exported, and how."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """Folder of a transformers checkpoint; its weights become float32, or stay codes."""
    output: Annotated[FilePath, Option(positional=True, metavar="OUT.onnx")]
    """Where the graph goes; data above 2 GB goes into a file beside it."""
    model_class: Annotated[Text | None, Option(metavar="CLASS")] = None
    """Class of transformers; by default AutoModelForCausalLM."""
    modality: Annotated[Modality | None, Option()] = None
    """Of the example inputs; by default what the model reads first."""
    exporter: Annotated[Text, Option(choices=("dynamo", "torchscript"))] = "dynamo"
    """Which of torch's exporters."""
    opset: Annotated[Whole | None, Option(metavar="N", read=int)] = None
    """Version of the standard operators; by default 18; a compressed checkpoint is exported at 21, the first with 4-bit types."""
    dynamic: Annotated[Texts, Option(metavar="INPUT:AXIS=NAME", repeats=True)] = ()
    """A size that may change: input_ids:0=batch."""


def run(settings: ExportSettings) -> Verdict:
    """Export.

    Args:
        settings: of the verb.

    Returns:
        PASS.

    Raises:
        UserInputError: no checkpoint, a place that cannot be written to, or sizes and an opset that do not exist.
    """
    check_output_file(settings.output, ".onnx")
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

    dynamic = parse_dynamic(settings.dynamic)
    if is_quantized(settings.model):
        asked = OPSET
        if settings.opset not in (None, OPSET):
            raise UserInputError(f"--opset: {settings.opset} was given for a compressed checkpoint, which goes at {OPSET}; leave it out")
        module = load_quantized_for_export(settings.model, settings.model_class)
        exported = export_quantized(module, example_batch(module, settings.modality), exporter=settings.exporter, dynamic=dynamic)
    else:
        asked = DEFAULT_OPSET if settings.opset is None else settings.opset
        module, inputs = load_for_export(settings.model, settings.model_class, settings.modality)
        exported = export(module, inputs, exporter=settings.exporter, opset=asked, dynamic=dynamic)
    write_graph(exported.model, settings.output)
    num_codes = sum(
        node.name.startswith("dequantize ") and not node.name.startswith("dequantize input") for node in exported.model.graph.node
    )
    codes = f", {num_codes} weights with the checkpoint's own codes" if num_codes else ""
    sizes = describe_inputs(exported.inputs or {}, dynamic)
    print(f"{settings.output}: {len(exported.model.graph.node)} nodes, opset {opset_of(exported.model)}, inputs {sizes}{codes}, checked")
    if opset_of(exported.model) != asked:
        print(f"note: opset {opset_of(exported.model)}, not {asked}: the exporter {settings.exporter} does not write this model at {asked}")
    if not dynamic:
        print("note: these sizes are fixed in the graph; --dynamic INPUT:AXIS=NAME lets one change")
    for note in exported.notes:
        print(f"note: {note}")
    return Verdict.PASS


def parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, str]]:
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


COMMAND = Command("export a checkpoint of transformers as a checked graph", ExportSettings, run, exit_codes("written"))
