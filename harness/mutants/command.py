"""The verb `harness mutants`: plant every known bug, and print which check kills which."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.mutants.lifecycle import Fate

EPILOG = "exit codes: 0 every planted bug was seen, 1 one survived, 3 bad input or a failure of the harness itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.epilog = EPILOG
    families = parser.add_subparsers(dest="family", required=True, metavar="FAMILY")
    lifecycle = families.add_parser("lifecycle", help="known-wrong lifecycles, sessions, hooks, states and recipes", epilog=EPILOG)
    lifecycle.add_argument("--mutant", action="append", metavar="NAME", help="plant only this bug; may be given several times")
    lifecycle.add_argument("--json", action="store_true", help="print the result as JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    """Plant the bugs one after another, and print what became of them.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0, or 1 if a bug survived.
    """
    from harness.mutants.lifecycle import chosen_mutants, fate_of

    mutants = chosen_mutants(args.mutant)
    fates = []
    for number, mutant in enumerate(mutants, 1):
        print(f"{number} of {len(mutants)}: {mutant.name}", file=sys.stderr, end="\n" if not sys.stderr.isatty() else "\x1b[K\r")
        fates.append(fate_of(mutant))
    if args.json:
        print(json.dumps(_summary(fates), sort_keys=True, indent=1))
    else:
        _print(fates)
    return 0 if all(fate.killed_by for fate in fates) else 1


def _summary(fates: Sequence[Fate]) -> dict[str, object]:
    return {
        "mutants": [fate.to_dict() for fate in fates],
        "num_mutants": len(fates),
        "num_killed": sum(bool(fate.killed_by) for fate in fates),
        "num_only_machines": sum(fate.only_machines for fate in fates),
    }


def _print(fates: Sequence[Fate]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("planted bug", "what is wrong", "killed by", box=None, pad_edge=False)
    for fate in fates:
        names = [name.removeprefix("lifecycle.") for name in fate.killed_by]
        table.add_row(fate.mutant.name, fate.mutant.wrong, ", ".join(names) or "nobody: it survives")
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table)
    summary = _summary(fates)
    killed, only = summary["num_killed"], summary["num_only_machines"]
    console.print(f"{killed} of {len(fates)} planted bugs were killed, {only} of them only by a state machine", markup=False)
