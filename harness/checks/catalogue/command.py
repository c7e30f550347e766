"""Checks of the catalogue that other parts of the harness hold: where each lives, and which command runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text
from compressor.settings.options import Option, Settings
from harness.checks.catalogue.kinds import KINDS
from harness.reporting.text import plain_console, plain_table
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


@dataclass(frozen=True)
class Elsewhere:
    """A numbered check that is no function of this catalogue.

    Attributes:
        number: in the catalogue.
        title: the statement, as a sentence.
        lives: the file that holds it.
        command: what runs it.
        caught_by: public bugs that it would have caught.
    """

    number: int
    title: str
    lives: str
    command: str
    caught_by: tuple[str, ...] = ()


_VERIFY = "harness verify PACKAGE.MODULE:MODIFIER"

ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere(47, "An illegal call raises and changes nothing", "harness/lifecycle/checks/order.py", _VERIFY),
    Elsewhere(
        48, "Callbacks come exactly at start and end, for whole and fractional indices", "harness/lifecycle/checks/order.py", _VERIFY
    ),
    Elsewhere(
        49,
        "No hook, observer or patched attribute is left outside calibration, after an exception too",
        "harness/lifecycle/checks/leftovers.py",
        _VERIFY,
        ("aimet#4115",),
    ),
    Elsewhere(
        50,
        "Contexts nest: leaving an inner disable_hooks() does not wake the hooks of the outer one",
        "harness/lifecycle/checks/order.py",
        _VERIFY,
    ),
    Elsewhere(
        51,
        "RNG state, training flags, requires_grad, use_cache, dtype and config are as before",
        "harness/lifecycle/checks/leftovers.py",
        _VERIFY,
    ),
    Elsewhere(52, "Applying to an already quantized model raises", "harness/lifecycle/checks/leftovers.py", _VERIFY),
    Elsewhere(
        53,
        "parse(dump(recipe)) == recipe, with two modifiers of one type in a stage too",
        "harness/lifecycle/checks/recipe.py",
        _VERIFY,
        ("llm-compressor#2805",),
    ),
    Elsewhere(
        54,
        "A failure in the middle rolls back, or leaves a directory that no loader takes for a finished checkpoint",
        "harness/lifecycle/checks/leftovers.py",
        _VERIFY,
    ),
    Elsewhere(
        61,
        "onnxruntime with optimizations off agrees with all: relative 1e-5, but for a declared policy",
        "harness/onnx_graph/roundtrip/matrix.py",
        "harness onnx roundtrip",
    ),
    Elsewhere(
        62,
        "Three separate Q/K/V projections survive under the declared skips, and are fused without them",
        "harness/onnx_graph/contracts/roles.py",
        "harness onnx roundtrip",
    ),
    Elsewhere(
        63,
        "Eager, capture and replay give the same bits, on batches unseen at capture and with outputs spoiled first; all state compared",
        "harness/replay/equivalence/compare.py",
        "harness replay MODEL",
        ("pytorch#84614", "pytorch#114844", "pytorch#181723", "burn#5779", "TransformerEngine#2937"),
    ),
)

# The verb `harness catalogue`: every check with its number, its statement, and the bugs that it would have caught.


class CatalogueSettings(Settings):
    """Which checks are listed."""

    kind: Annotated[Text | None, Option(choices=tuple(KINDS), metavar="KIND", help=f"only the checks of one kind: {', '.join(KINDS)}")] = (
        None
    )
    """Only the checks for subjects of this kind."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print JSON instead of the table."""


def run(settings: CatalogueSettings) -> Verdict:
    """Print the catalogue.

    Args:
        settings: of the verb.

    Returns:
        PASS.
    """
    rows = listing(settings.kind)
    if settings.as_json:
        print(to_json(rows), end="")
        return Verdict.PASS
    cells = [
        (str(row["number"] or ""), row["name"] or row["command"], row["title"], " ".join(row["needs"]), " ".join(row["caught_by"]))
        for row in rows
    ]
    plain_console(180).print(plain_table(("no.", "check", "statement", "needs", "would have caught"), cells, is_lined=True))
    return Verdict.PASS


def listing(kind: str | None = None) -> list[dict[str, Any]]:
    """Return the catalogue as JSON types, by number.

    Args:
        kind: only the checks for subjects of this kind; None also lists what other parts of the harness hold.

    Returns:
        A row per check.
    """
    from harness.checks.catalogue.registry import find_checks

    rows: list[dict[str, Any]] = [
        {
            "number": one.number,
            "name": one.name,
            "title": one.title,
            "kind": one.kind,
            "needs": sorted(one.needs),
            "caught_by": list(one.caught_by),
            "lives": one.function.__module__.replace(".", "/") + ".py",
            "command": "harness check PACKAGE.MODULE:SUBJECT",
        }
        for one in find_checks(None, kind)
    ]
    others = [] if kind else ELSEWHERE
    rows += [
        {
            "number": one.number,
            "name": "",
            "title": one.title,
            "kind": "",
            "needs": [],
            "caught_by": list(one.caught_by),
            "lives": one.lives,
            "command": one.command,
        }
        for one in others
    ]
    return sorted(rows, key=lambda row: (row["number"] or 1000, row["name"]))


COMMAND = Command("list every check, with the public bugs that it would have caught", CatalogueSettings, run, exit_codes("listed"))
