"""`harness replay hazards`: run the catalogue of hazards, and print one table."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from compressor.settings.kinds import Flag, Texts
from compressor.settings.options import Option, Settings
from harness.reporting.text import plain_console, plain_table
from harness.reporting.verdict import Verdict, exit_codes, worst
from harness.verbs import Command

if TYPE_CHECKING:
    from harness.replay.hazards.registry import HazardResult


class HazardSettings(Settings):
    """Which hazards run."""

    only: Annotated[Texts | None, Option(metavar="NAME", repeats=True)] = None
    """A hazard or a theme; may be given several times (default: all)."""
    listing: Annotated[Flag, Option("--list")] = False
    """Print the table without running anything."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the results as JSON instead of the table."""


def run(settings: HazardSettings) -> Verdict:
    """Run hazards, and print what became of them.

    Args:
        settings: of the verb.

    Returns:
        REGRESSION if one is red, else PASS.
    """
    from compressor.json_text import to_json
    from compressor.progress import progress_of
    from harness.replay.hazards.registry import chosen_hazards, run_hazards

    chosen = chosen_hazards(settings.only)
    if settings.listing:
        rows = [{"theme": theme, **_known(hazard)} for theme, hazard in chosen.values()]
        print(to_json({"hazards": rows}) if settings.as_json else _listing(rows), end="")
        return Verdict.PASS
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(), progress_of(True).task("hazards", len(chosen)) as task:
        warnings.simplefilter("ignore")
        results = run_hazards(settings.only, lambda result: task.advance(note=f"{result.hazard.name}: {result.outcome.value}"))
    if settings.as_json:
        print(to_json(_summary(results)), end="")
    else:
        _print(results)
    return worst(result.outcome.verdict for result in results)


def _known(hazard: Any) -> dict[str, Any]:
    expected = "equal" if hazard.expected is None else hazard.expected.__name__
    return {"name": hazard.name, "what": hazard.what, "expected": expected, "source": hazard.source}


def _listing(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(f"{row['theme']:<11} {row['name']:<26} {row['expected']:<26} {row['what']}  [{row['source']}]\n" for row in rows)


def _summary(results: Sequence[HazardResult]) -> dict[str, Any]:
    rows = [
        {"theme": one.theme, **_known(one.hazard), "fate": one.outcome.value, "detail": one.detail, "seconds": round(one.seconds, 3)}
        for one in results
    ]
    return {"hazards": rows, "counts": dict(Counter(one.outcome.value for one in results)), "red": sum(not one.is_well for one in results)}


def _print(results: Sequence[HazardResult]) -> None:
    console = plain_console(180)
    headings = ("theme", "hazard", "what the step does", "outcome", "error, or first difference")
    rows = [(one.theme, one.hazard.name, one.hazard.what, one.outcome.value, _reason(one)) for one in results]
    console.print(plain_table(headings, rows), "")
    counts = Counter(one.outcome.value for one in results)
    text = ", ".join(f"{count} {fate}" for fate, count in counts.items())
    console.print(
        f"{len(results)} hazards in {sum(one.seconds for one in results):.0f} s: {text}; {sum(not one.is_well for one in results)} red."
    )


def _reason(one: HazardResult) -> str:
    if not one.is_well:
        return one.detail
    return "" if one.hazard.expected is None else one.hazard.expected.__name__


COMMAND = Command(
    "run what broke captured training steps elsewhere: equal, or the named error",
    HazardSettings,
    run,
    exit_codes(
        "every hazard is equal or refused with the error that the table names",
        "one is silently different or otherwise not as the table says",
    ),
)
