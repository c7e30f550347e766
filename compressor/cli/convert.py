"""The verb `convert`: its arguments and what it prints. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from compressor.cli import resumed_lines
from compressor.console import add_verbosity
from compressor.json_text import to_json
from compressor.settings.options import add_options, chosen
from compressor.settings.verbs import MODEL_HELP, ConvertSettings

if TYPE_CHECKING:
    from compressor.conversion.convert import ConvertResult


HELP = "Quantize the weights of a model in its files, tensor by tensor, without data and without loading it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP["convert"])
    add_options(parser, ConvertSettings)
    add_verbosity(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Run the verb.

    Args:
        args: as `add_arguments` declares them.

    Returns:
        Exit code 0; errors are raised.
    """
    result = _convert(args)
    if args.json:
        own = {"output_dir": str(result.output_dir), "seconds": result.seconds, "resumed": result.resumed}
        print(to_json({**result.record, **own, "phases": [asdict(lap) for lap in result.phases]}), end="")
    else:
        _print(result, resumed_lines(args.resume, result.resumed))
    return 0


def _convert(args: argparse.Namespace) -> ConvertResult:
    from compressor.conversion.convert import model_free

    return model_free(args.model, **chosen(args, ConvertSettings))


def _print(result: ConvertResult, resumed: Sequence[str]) -> None:
    from compressor.console import Console

    console = Console(soft_wrap=True, highlight=False)
    by_scheme: dict[str, list[float]] = {}
    for record in result.report.modules.values():
        by_scheme.setdefault(record.scheme, []).append(record.error)
    for scheme, errors in by_scheme.items():
        console.print(f"converted:  {len(errors)} modules to {scheme}, relative errors {min(errors):.2e} to {max(errors):.2e}")
    for note in result.report.notes:
        console.print(f"note:       {note}")
    for line in resumed:
        console.print(line)
    console.print(", ".join(f"{phase} {value:.1f} s" for phase, value in result.seconds.items()))
    console.print(f"checkpoint: {result.output_dir}")
