"""The verb `inspect`: its arguments and what it prints. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import sys

from compressor.json_text import to_json

HELP = "Say what a checkpoint is: formats by module, bytes, zeros, and how it was made."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.add_argument("folder", metavar="FOLDER", help="checkpoint, compressed or not: a folder, or its name on the hub (owner/name)")
    parser.add_argument("--model-revision", metavar="R", help="branch, tag or commit on the hub (default: main)")
    parser.add_argument("--modules", action="store_true", help="a line for each layer and tensor as well")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Run the verb.

    Args:
        args: as `add_arguments` declares them.

    Returns:
        Exit code 0; errors are raised.
    """
    from compressor.entrypoints.inspection import inspect_checkpoint

    found = inspect_checkpoint(args.folder, args.model_revision)
    width = 80 if sys.stdout.isatty() else None
    print(to_json(found.to_dict()) if args.json else "\n".join(found.lines(args.modules, width)), end="" if args.json else "\n")
    return 0
