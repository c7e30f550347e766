"""Search llm-compressor: `python -m harness.lifecycle.counterexamples`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from compressor.console import positive
from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Whole
from compressor.settings.options import Option, Settings
from harness.cli import run_alone
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


class SearchSettings(Settings):
    """How far the search goes, and how it tells what it found."""

    as_json: Annotated[Flag, Option("--json")] = False
    """Print JSON in place of text."""
    steps: Annotated[Whole, Option(metavar="N", read=positive)] = 5
    """Length of the longest programs."""


def run(settings: SearchSettings) -> Verdict:
    """Search llm-compressor, and print what was found.

    Args:
        settings: of the program.

    Returns:
        REGRESSION where a program shows that it breaks the contract.

    Raises:
        HarnessError: the library is not installed.
    """
    from harness.lifecycle.counterexamples.llmcompressor import OWN, PROBE, llm_compressor_versions, open_llm_compressor_run
    from harness.lifecycle.counterexamples.search import search

    versions = llm_compressor_versions()
    found = search(open_llm_compressor_run, (PROBE, OWN), settings.steps)
    if settings.as_json:
        print(to_json({"versions": versions, "counter_examples": [example.to_dict() for example in found]}), end="")
    else:
        print(", ".join(f"{name} {number}" for name, number in versions.items()))
        print("\n".join(f"\n{number}. {example.to_text()}" for number, example in enumerate(found, start=1)))
    return Verdict.REGRESSION if found else Verdict.PASS


COMMAND = Command(
    "search llm-compressor for the shortest runs that break the lifecycle contract, one for each way of breaking it",
    SearchSettings,
    run,
    exit_codes("nothing was found", "a run breaks the contract"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        Its exit code.
    """
    return run_alone("python -m harness.lifecycle.counterexamples", COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
