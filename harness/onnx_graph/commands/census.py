"""`harness onnx census MODEL`: the attention blocks of a graph, and where their Q, K and V come from."""

from __future__ import annotations

from typing import Annotated

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text
from compressor.settings.options import Option, Settings
from harness.onnx_graph.skips.supervision import NOT_SEEN
from harness.reporting.verdict import Verdict, exit_codes, worst
from harness.verbs import Command


class CensusSettings(Settings):
    """Which graph is looked at."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """An .onnx file, or the folder of a transformers checkpoint."""
    model_class: Annotated[Text | None, Option(metavar="CLASS")] = None
    """Class of transformers, for a folder; by default AutoModelForCausalLM."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the census as JSON."""


def run(settings: CensusSettings) -> Verdict:
    """Take the census.

    Args:
        settings: of the verb.

    Returns:
        PASS if all blocks are SEPARATE, REGRESSION if one is fused or absorbed, else INCONCLUSIVE.
    """
    from harness.onnx_graph.census.census import census
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip

    trip = onnx_roundtrip(settings.model, model_class=settings.model_class)
    found = census(trip.exported(trip.exporters[0]).model)
    print(to_json(found.to_dict()) if settings.as_json else found.text() + "\n", end="")
    return worst(block.status.verdict for block in found.blocks)


COMMAND = Command(
    "list the attention blocks of a graph, and where their Q, K and V come from",
    CensusSettings,
    run,
    f"{NOT_SEEN}; " + exit_codes("every block has three projections of its own", "one has not", "no block, or one that is not clear"),
)
