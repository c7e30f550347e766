"""`harness onnx fusing-cost MODEL`: what one scale over fused Q, K and V costs a quantizer, per role in dB."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from compressor.atomic import check_output_file
from compressor.json_text import to_json
from compressor.settings.kinds import FilePath, Flag, Text, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


class CostSettings(Settings):
    """What is measured."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """An .onnx file as exported, or the folder of a transformers checkpoint."""
    model_class: Annotated[Text | None, Option(metavar="CLASS")] = None
    """Class of transformers, for a folder; by default AutoModelForCausalLM."""
    bits: Annotated[Whole, Option(metavar="N", choices=(2, 3, 4, 5, 6, 7, 8), read=int)] = 8
    """Bits of the codes, 2 to 8."""
    figure: Annotated[FilePath | None, Option(metavar="FILE")] = None
    """Draw the cost of every projection there, as .svg or .png."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print every projection as JSON."""


def run(settings: CostSettings) -> Verdict:
    """Measure.

    Args:
        settings: of the verb.

    Returns:
        PASS.
    """
    if settings.figure is not None:
        check_output_file(settings.figure, ".svg", ".png")
    from harness.onnx_graph.roundtrip.fusing_cost import draw_costs, fusing_cost, summary
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip

    trip = onnx_roundtrip(settings.model, exporters=["torchscript"], model_class=settings.model_class)
    rows = fusing_cost(trip.exported(trip.exporters[0]).model, settings.bits)
    if settings.figure is not None:
        draw_costs(rows, settings.figure, f"{Path(settings.model).name}: int{settings.bits}, one scale over Q, K and V against one each")
    if settings.as_json:
        print(to_json({"rows": [row.to_dict() for row in rows], "summary": summary(rows)}), end="")
        return Verdict.PASS
    print(f"int{settings.bits}, one scale per tensor: own scale - one scale over Q, K and V, {len(rows) // 3} blocks")
    for role, cost in summary(rows).items():
        print(f"  {role.upper()}: {cost['mean_db']:.1f} dB lost on average, {cost['worst_db']:.1f} dB at worst")
    return Verdict.PASS


COMMAND = Command("measure what one scale over fused Q, K and V costs a quantizer", CostSettings, run, exit_codes("measured"))
