"""The verb `harness replay`: a table of what it can do, each a module with `add_arguments(parser)` and `run(args) -> exit code`.

`harness replay MODEL` is short for `harness replay equivalence MODEL`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One thing the verb can do: its line of help and the module that does it."""

    help: str
    module: str


DEFAULT_ACTION = "equivalence"
ACTIONS: Mapping[str, Action] = {
    "equivalence": Action(
        "train a model in eager, capture and replay, and compare all state bit for bit; `harness replay MODEL` is short for it",
        "harness.replay.equivalence.command",
    ),
    "hazards": Action("run what broke captured training steps elsewhere: equal, or the named error", "harness.replay.hazards.command"),
    "kernels": Action(
        "exchange the implementation of an op in a training step: local error, grown error, time beside its control",
        "harness.replay.kernels.command",
    ),
    "sabotage": Action(
        "break the ops of a captured step one at a time, and see whether `locate` names the very one", "harness.replay.sabotage.command"
    ),
}


def spell_out(argv: Sequence[str]) -> list[str]:
    """Insert the action that a command line without one means.

    Args:
        argv: what follows the verb.

    Returns:
        The same, with an action in front.
    """
    if not argv or argv[0] in ACTIONS or argv[0] in ("-h", "--help"):
        return list(argv)
    return [DEFAULT_ACTION, *argv]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments.

    Args:
        parser: of the verb; changed.
    """
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action in ACTIONS.items():
        module = importlib.import_module(action.module)
        module.add_arguments(actions.add_parser(name, help=action.help, description=action.help))


def run(args: argparse.Namespace) -> int:
    """Do one of the actions.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        Its exit code.
    """
    code: int = importlib.import_module(ACTIONS[args.action].module).run(args)
    return code
