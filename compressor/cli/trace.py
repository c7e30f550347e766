"""The verb `trace`: its arguments and what it prints. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import json

from compressor.console import positive

HELP = "Show how a model would be followed layer by layer: subgraphs, what crosses between them, guards; config.json alone is enough."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.add_argument("model", metavar="MODEL", help="folder with a config.json; weights are not needed")
    parser.add_argument("--model-class", metavar="C", help="transformers class (the one that config.json names)")
    parser.add_argument("--sequential-targets", nargs="+", metavar="P", help="layers to stop at (default: inferred)")
    parser.add_argument(
        "--ignore", nargs="+", default=[], metavar="P", help="modules that stay as they are: no targets, one box when drawn"
    )
    parser.add_argument("--modality", choices=("text", "vision", "audio"), help="what the random batches hold (what the model reads first)")
    parser.add_argument("--dataset", metavar="D", help="real inputs: as for oneshot, or .safetensors with the forward's arguments by name")
    parser.add_argument("--engine", choices=("auto", "graph", "suspend"), default="auto", help="how layers are followed one by one (auto)")
    parser.add_argument("--targets-per-subgraph", type=positive, default=1, metavar="N", help="layers that share a subgraph (1)")
    parser.add_argument("--max-variants", type=positive, default=8, metavar="N", help="recorded graphs at most (8)")
    parser.add_argument("--leaf", action="append", default=[], metavar="MODULE:FUNCTION", help="function recorded as one node")
    parser.add_argument(
        "--verify", choices=("off", "first", "all"), default="first", help="batches on which the graph is held against the model (first)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that lies in the model's folder")
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
    report = trace_model(
        args.model,
        model_class=args.model_class,
        sequential_targets=args.sequential_targets,
        ignore=args.ignore,
        modality=args.modality,
        dataset=args.dataset,
        engine=args.engine,
        targets_per_subgraph=args.targets_per_subgraph,
        max_variants=args.max_variants,
        leaves=args.leaf,
        verify=args.verify,
        trust_remote_code_model=args.trust_remote_code,
    )
    tool = None if args.draw is None else draw(report.picture(), args.draw)
    if args.json:
        print(json.dumps(report.to_dict(), indent=1, sort_keys=True))
        return 0
    print("\n".join(report.lines()))
    if args.print_stages:
        print("\n".join(report.stage_lines()))
    if tool is not None:
        print(f"picture:  {args.draw} (drawn by {tool})")
    return 0
