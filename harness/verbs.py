"""What a verb of `harness` is: a class of settings, from which its options follow, and a function from them to a verdict.

The module of a verb holds one as `COMMAND`, and imports torch and the like only inside of that function, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.settings.options import Settings, add_options, settings_of
from harness.reporting.verdict import Verdict

Run = Callable[[Any], Verdict]


@dataclass(frozen=True)
class Command:
    """A verb, or one action of a verb.

    Attributes:
        help: one line.
        settings: its fields are the options.
        run: takes an object of that class; what it returns decides the exit code.
        epilog: end of the help, with what each exit code means (`exit_codes`).
    """

    help: str
    settings: type[Settings]
    run: Run
    epilog: str

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the options."""
        parser.epilog = self.epilog
        add_options(parser, self.settings)
        parser.set_defaults(to_verdict=self._to_verdict)

    def spelled(self, argv: Sequence[str]) -> list[str]:
        """Return what follows the verb as it is."""
        return list(argv)

    def _to_verdict(self, args: argparse.Namespace) -> Verdict:
        return self.run(settings_of(args, self.settings))


@dataclass(frozen=True)
class Actions:
    """A verb that can do several things.

    Attributes:
        help: one line.
        actions: by name.
        default: the action that a command line without one means; None where one must be named.
    """

    help: str
    actions: Mapping[str, Command]
    default: str | None = None

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the actions."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        for name, action in self.actions.items():
            action.declare(actions.add_parser(name, help=action.help, description=action.help))

    def spelled(self, argv: Sequence[str]) -> list[str]:
        """Return what follows the verb with the action in front that it means."""
        is_spelled = self.default is None or not argv or argv[0] in self.actions or argv[0] in ("-h", "--help")
        return list(argv) if is_spelled else [str(self.default), *argv]
