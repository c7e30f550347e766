"""`harness onnx explain MODEL --contract ...`: which passes break a contract, and the smallest set of skips that keeps it."""

from __future__ import annotations

from typing import Annotated

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text
from compressor.settings.options import Option
from harness.onnx_graph.commands.check import LIMITS, ContractSettings
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.skips.passes import BACKENDS
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


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


def run(settings: ExplainSettings) -> Verdict:
    """Explain.

    Args:
        settings: of the verb.

    Returns:
        PASS where a set of skips keeps the contract, else what is left with every pass skipped.
    """
    from harness.onnx_graph.roundtrip.explain import explain
    from harness.onnx_graph.roundtrip.matrix import onnx_roundtrip

    trip = onnx_roundtrip(settings.model, model_class=settings.model_class)
    exported = trip.exported(trip.exporters[0])
    explanation = explain(exported.model, contract_from_names(settings.contract), settings.backend, exported.module)
    print(to_json(explanation.to_dict()) if settings.as_json else explanation.text() + "\n", end="")
    return Verdict.PASS if explanation.kept else explanation.default.holding.verdict


COMMAND = Command(
    "find the passes that break a contract, and the smallest set of skips",
    ExplainSettings,
    run,
    LIMITS + exit_codes("it holds, or a set of skips keeps it", "no set of skips keeps it", "it could not be analysed"),
)
