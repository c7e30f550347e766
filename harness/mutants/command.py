"""The verb `harness mutants`: plant every known bug, and print which check kills which."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from compressor.console import positive
from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text, Texts, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.text import plain_console, plain_table
from harness.reporting.verdict import Verdict, exit_codes, worst
from harness.verbs import Command

if TYPE_CHECKING:
    from harness.mutants.family import Family, Fate


class MutantSettings(Settings):
    """Which planted bugs are looked for."""

    family: Annotated[Text | None, Option(positional=True, nargs="?", metavar="FAMILY")] = None
    """Only this family of the table (default: all)."""
    table: Annotated[Text, Option(metavar="WHERE:NAME")] = "tests.mutation.families:FAMILIES"
    """Lists the families, by name."""
    mutant: Annotated[Texts | None, Option(metavar="NAME", repeats=True)] = None
    """Plant only this bug; may be given several times."""
    all_checks: Annotated[Flag, Option()] = False
    """Let every check look, not only up to the first that sees the bug."""
    jobs: Annotated[Whole | None, Option(metavar="N", read=positive)] = None
    """Processes (default: one per core)."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the result as JSON instead of the table."""


def run(settings: MutantSettings) -> Verdict:
    """Plant the bugs, and print what became of them.

    Args:
        settings: of the verb.

    Returns:
        REGRESSION if a bug survived or the control did not pass, else PASS.
    """
    from harness.mutants.family import find_family, listed_families

    sys.path.insert(0, str(Path.cwd()))  # the repository in which the command is run
    names = [settings.family] if settings.family else list(listed_families(settings.table))
    results = {name: _fates(find_family(name, settings.table), settings) for name in names}
    if settings.as_json:
        print(to_json({name: summary(fates) for name, fates in results.items()}), end="")
    else:
        for fates in results.values():
            _print(fates)
    return worst(fate.verdict for fates in results.values() for fate in fates)


def _fates(family: Family, settings: MutantSettings) -> list[Fate]:
    """Return the fates in the order of the table, the control first where all bugs are planted."""
    from compressor.progress import progress_of
    from harness.mutants.hunt import hunt

    mutants = [*([] if settings.mutant else [None]), *family.chosen(settings.mutant)]
    fates: dict[int, Fate] = {}
    jobs = min(settings.jobs or os.cpu_count() or 1, len(mutants))
    with progress_of(True).task(f"{family.name} mutants", len(mutants)) as task:
        for number, fate in hunt(family, mutants, settings.all_checks, jobs, settings.table):
            fates[number] = fate
            task.advance(note=f"{fate.mutant.name if fate.mutant else 'control'}: {next(iter(fate.killed_by), 'nothing is seen')}")
    return [fates[number] for number in sorted(fates)]


def summary(fates: Sequence[Fate]) -> dict[str, Any]:
    """Return the fates of one family as JSON types.

    Args:
        fates: of its bugs, and of the control where it was run.

    Returns:
        The fates and their numbers.
    """
    bugs = [fate for fate in fates if fate.mutant]
    control = next((fate.to_dict() for fate in fates if not fate.mutant), None)
    return {
        "mutants": [fate.to_dict() for fate in bugs],
        "control": control,
        "num_mutants": len(bugs),
        "num_killed": sum(bool(fate.killed_by) for fate in bugs),
        "num_only_machines": sum(fate.only_machines for fate in bugs),
    }


def _print(fates: Sequence[Fate]) -> None:
    rows = [
        (fate.mutant.name, fate.mutant.wrong, ", ".join(map(_short, fate.killed_by)) or "nobody: it survives", str(len(fate.survived)))
        for fate in fates
        if fate.mutant
    ]
    console = plain_console(160)
    console.print(plain_table(("planted bug", "what is wrong", "killed by", "saw nothing"), rows), "")
    for checks, names in _in_vain(fates).items():
        console.print(f"Only a state machine saw these {len(names)}: {', '.join(names)}.")
        console.print(f"Each was first looked at by {', '.join(checks)}, which saw nothing.", "")
    for fate in fates:
        for name, text in fate.broken.items():
            console.print(f"{fate.mutant.name if fate.mutant else 'Without any bug'}: {_short(name)} could not look: {text}")
        if not fate.mutant:
            seen = "; ".join(f"{_short(name)}: {text}" for name, text in fate.killed_by.items())
            console.print(f"Without any bug: {seen or f'{len(fate.survived)} checks and machines see nothing'}.")
    numbers = summary(fates)
    only = f"{numbers['num_only_machines']} of them only by a state machine"
    console.print(f"{numbers['num_killed']} of {numbers['num_mutants']} planted bugs were killed, {only}.")


def _in_vain(fates: Sequence[Fate]) -> dict[tuple[str, ...], list[str]]:
    """Bugs that died only in a machine, by the checks that had looked before."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for fate in fates:
        if fate.mutant and fate.only_machines:
            checks = tuple(_short(name) for name in fate.survived if name not in fate.machines)
            groups.setdefault(checks, []).append(fate.mutant.name)
    return groups


def _short(name: str) -> str:
    return name.removeprefix("lifecycle.")


COMMAND = Command(
    "plant known bugs, and print which check kills which",
    MutantSettings,
    run,
    exit_codes("every planted bug was seen and nothing without one", "a bug survived or something was seen in sound code"),
)
