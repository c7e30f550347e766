"""The verb `trace`: its arguments and what it prints. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse

from compressor.json_text import to_json
from compressor.settings.options import add_options, chosen
from compressor.settings.verbs import MODEL_HELP, TraceSettings

HELP = "Show how a model would be followed layer by layer: subgraphs, what crosses between them, guards; config.json alone is enough."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP["trace"])
    add_options(parser, TraceSettings)
    parser.add_argument("--draw", metavar="OUT.svg", help="write a picture: with dot where graphviz is installed, else with matplotlib")
    parser.add_argument("--print", action="store_true", dest="print_stages", help="print every subgraph: what crosses, and its graph")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Run the verb.

    Args:
        args: as `add_arguments` declares them.

    Returns:
        Exit code 0; errors are raised.
    """
    from compressor.entrypoints.trace import trace_model
    from compressor.tracing.picture import check_path, draw

    if args.draw is not None:
        check_path(args.draw)
    report = trace_model(args.model, **chosen(args, TraceSettings))
    tool = None if args.draw is None else draw(report.picture(), args.draw)
    if args.json:
        print(to_json(report.to_dict()), end="")
        return 0
    print("\n".join(report.lines()))
    if args.print_stages:
        print("\n".join(report.stage_lines()))
    if tool is not None:
        print(f"picture:  {args.draw} (drawn by {tool})")
    return 0
