"""`harness onnx passes`: the passes in force, against those on record; a new list is tried before it is trusted."""

from __future__ import annotations

from typing import Annotated

from compressor.json_text import to_json
from compressor.settings.kinds import FilePath, Flag, Text, Texts
from compressor.settings.options import Option
from harness.onnx_graph.commands.check import LIMITS, ContractSettings, NamesAction
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.skips.passes import BACKENDS
from harness.reporting.verdict import Verdict, exit_codes, worst
from harness.verbs import Command

DEFAULT_SKIPS = "fuse_qkv,fuse_attention"


class PassesSettings(ContractSettings):
    """Which lists of passes are compared."""

    backend: Annotated[Texts | None, Option(choices=BACKENDS, repeats=True)] = None
    """May be given several times; by default all that are installed."""
    golden: Annotated[FilePath | None, Option(metavar="FILE")] = None
    """The record; by default golden/onnx_passes.json."""
    skip: Annotated[Text, Option(metavar="PASSES", action=NamesAction)] = DEFAULT_SKIPS
    """The skips that are relied on, with commas between; may be given several times."""
    accept: Annotated[Flag, Option()] = False
    """Put the lists in force on record, if none of them breaks the contract."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print what was found as JSON."""


def run(settings: PassesSettings) -> Verdict:
    """Compare, try what is new, and put it on record if asked.

    Args:
        settings: of the verb.

    Returns:
        PASS where everything is known or was accepted, REGRESSION where a list breaks the contract, INCONCLUSIVE where a new one waits
        to be accepted, or no optimizer is installed.

    Raises:
        UserInputError: an unknown pass or contract, an optimizer that is not installed, a damaged record.
    """
    from harness.onnx_graph.roundtrip.pass_list_check import DEFAULT_PATH, accept, check_passes, read_records
    from harness.onnx_graph.skips.passes import installed_backends, resolve_skips

    path = settings.golden or DEFAULT_PATH
    skips = [name.strip() for name in settings.skip.split(",") if name.strip()]
    resolve_skips(skips)
    contract, records = contract_from_names(settings.contract), read_records(path)
    alarms = [check_passes(records, backend, contract, skips) for backend in settings.backend or installed_backends()]
    if settings.as_json:
        print(to_json([alarm.to_dict() for alarm in alarms]), end="")
    else:
        print("\n".join(alarm.text() for alarm in alarms))
    verdict = worst(alarm.verdict for alarm in alarms)
    tried = [alarm for alarm in alarms if alarm.trials]
    if verdict is not Verdict.REGRESSION and tried and settings.accept:
        accept(path, tried)
        return Verdict.PASS
    return verdict


COMMAND = Command(
    "compare the passes in force with those on record, and try new ones",
    PassesSettings,
    run,
    LIMITS + exit_codes("every list is known, or accepted, and harmless", "a list breaks the contract", "a new list that does not"),
)
