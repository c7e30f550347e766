"""`harness onnx census MODEL`: the attention blocks of a graph, and where their Q, K and V come from."""

from __future__ import annotations

import argparse
from typing import Annotated

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text
from compressor.settings.options import Option, Settings, add_options, settings_of
from harness.onnx_graph.skips.supervision import NOT_SEEN
from harness.reporting.verdict import EXIT_CODES, worst


class CensusSettings(Settings):
    """Which graph is looked at."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """An .onnx file, or the folder of a transformers checkpoint."""
    model_class: Annotated[Text | None, Option(metavar="CLASS")] = None
    """Class of transformers, for a folder; by default AutoModelForCausalLM."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the census as JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    codes = "exit codes: 0 every block has three projections of its own, 1 one has not, 2 no block, or one that is not clear"
    parser.epilog = f"{NOT_SEEN}; {codes}"
    add_options(parser, CensusSettings)


def run(args: argparse.Namespace) -> int:
    """Take the census.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 if all blocks are SEPARATE, 1 if one is fused or absorbed, else 2 if there is none or one is not clear.
    """
    settings = settings_of(args, CensusSettings)
    from harness.onnx_graph.census.census import census
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip

    trip = onnx_roundtrip(settings.model, model_class=settings.model_class)
    found = census(trip.exported(trip.exporters[0]).model)
    print(to_json(found.to_dict()) if settings.as_json else found.text() + "\n", end="")
    return EXIT_CODES[worst(block.status.verdict for block in found.blocks)]
