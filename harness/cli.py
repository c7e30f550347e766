"""The command `harness`. Arguments are read and checked before torch is imported, so that `--help` and mistakes answer at once.

A verb is a line of VERBS and a module that holds a `COMMAND` (see `harness.verbs`).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from compressor.console import Parser, add_completion, with_output
from compressor.errors import CompressorError, RankError
from compressor.interruption import EXIT_INTERRUPTED
from harness.reporting.verdict import EXIT_CODES, EXIT_FAILURE
from harness.verbs import Actions, Command

VERBS: Mapping[str, str] = {
    "validate": "harness.validation.command",
    "verify": "harness.lifecycle.command",
    "check": "harness.checks.command",
    "catalogue": "harness.checks.catalogue.command",
    "report": "harness.run_report.command",
    "bisect": "harness.bisect.command",
    "golden": "harness.goldens.command",
    "trace-audit": "harness.traceability.command",
    "replay": "harness.replay.command",
    "mutants": "harness.mutants.command",
    "nightly": "harness.nightly.command",
    "release": "harness.release.command",
    "onnx": "harness.onnx_graph.commands.main",
}
"""Name to the module that does it, in the order of the help."""


# What no path of ours makes: the system refuses a name that the user gave.
_REFUSED_NAMES: Mapping[int | None, str] = {
    errno.ENAMETOOLONG: "is a longer name than the system takes; give a shorter one",
    errno.ELOOP: "is a link that leads to itself; give what it should lead to",
    errno.EACCES: "may not be opened; ask for the right to, or give another path",
}


class _Parser(Parser):
    """Wrong arguments are bad input: exit code 3, because 1 and 2 are verdicts."""

    usage_error = EXIT_FAILURE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: arguments without the program's name; by default those of the process.
    Returns:
        The verb's exit code; 3 for bad input or a failure of the harness itself, which one line on standard error explains; 130 if
        interrupted (ctrl-C, SIGTERM), 141 if nobody reads what it prints any more.
    """

    def run() -> int:
        words = spelled(sys.argv[1:] if argv is None else argv)
        args = _parser(words).parse_args(words)
        return _conclude(f"harness {args.verb}", args)

    return _guarded("harness", run)


def run_alone(program: str, command: Command, argv: Sequence[str] | None = None) -> int:
    """Run a command that is no verb, but a program of its own.

    Args:
        program: how it is called, such as `python -m package`.
        command: it.
        argv: arguments without the program's name; by default those of the process.

    Returns:
        As `main`.
    """

    def run() -> int:
        parser = _Parser(prog=program, description=command.help)
        command.declare(parser)
        return _conclude(program, parser.parse_args(argv))

    return _guarded(program, run)


def _guarded(program: str, run: Callable[[], int]) -> int:
    try:
        return with_output(program, run, EXIT_FAILURE)
    except Exception as error:  # a bug of ours would exit with 1, which reads as a verdict
        traceback.print_exc()
        raise SystemExit(EXIT_FAILURE) from error


def _conclude(name: str, args: argparse.Namespace) -> int:
    try:
        return EXIT_CODES[args.to_verdict(args)]
    except SystemExit as error:  # of code that the user named; exit codes are verdicts
        return _fail(f"{name}: error: code that it ran called sys.exit({error.code!r}); take that out", EXIT_FAILURE)
    except RankError as error:
        return _fail(f"{name}: error: {' '.join(str(error).split())}", EXIT_FAILURE) if error.is_mine_to_tell else EXIT_FAILURE
    except CompressorError as error:
        return _fail(f"{name}: error: {' '.join(str(error).split())}", EXIT_FAILURE)
    except OSError as error:
        if error.errno not in _REFUSED_NAMES:
            raise
        return _fail(f"{name}: error: {str(error.filename)[:100]}: {_REFUSED_NAMES[error.errno]}", EXIT_FAILURE)
    except RuntimeError as error:  # of pathlib, before Python 3.13
        if not str(error).startswith("Symlink loop"):
            raise
        return _fail(f"{name}: error: {error}; give what the link should lead to", EXIT_FAILURE)
    except KeyboardInterrupt as stop:
        kept = "; ".join(getattr(stop, "__notes__", ["nothing was written"]))
        return _fail(f"{name}: interrupted; {kept}", EXIT_INTERRUPTED)


def spelled(argv: Sequence[str]) -> list[str]:
    """Insert what a verb lets its user leave out: `harness replay MODEL` is short for `harness replay equivalence MODEL`."""
    return [argv[0], *command_of(argv[0]).spelled(argv[1:])] if argv and argv[0] in VERBS else list(argv)


def command_of(verb: str) -> Command | Actions:
    """Import a verb.

    Args:
        verb: one of VERBS.

    Returns:
        What its module holds.
    """
    command: Command | Actions = importlib.import_module(VERBS[verb]).COMMAND
    return command


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="harness", description="Check claims about compressed models, and say with evidence what was found.")
    add_completion(parser)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in argv[:1] if argv and argv[0] in VERBS else VERBS:  # one verb answers sooner than all
        command = command_of(name)
        command.declare(verbs.add_parser(name, help=command.help, description=command.help))
    return parser


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
