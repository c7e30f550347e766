"""The command `harness`. Arguments are read and checked before torch is imported, so that `--help` and mistakes answer at once.

A verb is a line of VERBS and a module with `add_arguments(parser)` and `run(args) -> exit code`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from compressor.console import Parser, with_output
from compressor.errors import CompressorError
from harness.reporting.verdict import EXIT_FAILURE, EXIT_INTERRUPTED


@dataclass(frozen=True)
class Verb:
    """One subcommand: its line of help and the module that does it."""

    help: str
    module: str


VERBS: Mapping[str, Verb] = {
    "validate": Verb(
        "prove a compressed causal language model against its base: files, format, weights, behaviour", "harness.validation.command"
    ),
    "verify": Verb("hold a modifier against the lifecycle contract: checks 47 to 54 and a state machine", "harness.lifecycle.command"),
    "check": Verb("hold a quantizer, solver, layer, transform, pruner, run or checkpoint against the catalogue", "harness.checks.command"),
    "catalogue": Verb("list every check, with the public bugs that it would have caught", "harness.checks.catalogue.command"),
    "bisect": Verb("find the layer, module and modifier that make a compressed model differ", "harness.bisect.command"),
    "golden": Verb("differences from golden outputs: look, accept, prune, explain", "harness.goldens.command"),
    "trace-audit": Verb("hold traced models against plain ones, bit for bit: a zoo, and toys", "harness.traceability.command"),
    "replay": Verb("training steps in eager, capture and replay: equality, hazards, other kernels, sabotage", "harness.replay.command"),
    "mutants": Verb("plant known bugs, and print which check kills which", "harness.mutants.command"),
    "nightly": Verb("measurements over nights: a history, and which change is none of noise", "harness.nightly.command"),
    "onnx": Verb("ONNX round-trips by role: what became of Q, K and V, and which pass took them", "harness.onnx_graph.commands.main"),
}


class _Parser(Parser):
    """Wrong arguments are bad input: exit code 3, because 1 and 2 are verdicts."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_FAILURE, f"{self.prog}: error: {message}\n{self.format_usage()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: arguments without the program's name; by default those of the process.
    Returns:
        The verb's exit code; 3 for bad input or a failure of the harness itself, which one line on standard error explains; 130 if
        interrupted, 141 if nobody reads what it prints any more.
    """
    try:
        return with_output("harness", lambda: _run(argv), EXIT_FAILURE)
    except Exception as error:  # a bug of ours would exit with 1, which reads as a verdict
        traceback.print_exc()
        raise SystemExit(EXIT_FAILURE) from error


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(_spelt_out(sys.argv[1:] if argv is None else argv))
    try:
        code: int = importlib.import_module(VERBS[args.verb].module).run(args)
        return code
    except CompressorError as error:
        return _fail(f"harness {args.verb}: error: {' '.join(str(error).split())}", EXIT_FAILURE)
    except KeyboardInterrupt:
        return _fail(f"harness {args.verb}: interrupted; nothing was written", EXIT_INTERRUPTED)


def _spelt_out(argv: Sequence[str]) -> list[str]:
    """Insert what a verb lets its user leave out."""
    if not argv or argv[0] not in VERBS:
        return list(argv)
    spell_out = getattr(importlib.import_module(VERBS[argv[0]].module), "spell_out", None)
    return list(argv) if spell_out is None else [argv[0], *spell_out(argv[1:])]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="harness", description="Check claims about compressed models, and say with evidence what was found.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        importlib.import_module(verb.module).add_arguments(verbs.add_parser(name, help=verb.help, description=verb.help))
    return parser


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
