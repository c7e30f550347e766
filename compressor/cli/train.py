"""The verb `train`: its arguments and what it prints. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from compressor.cli import resumed_lines
from compressor.console import add_verbosity
from compressor.json_text import to_json
from compressor.settings.options import add_options, chosen
from compressor.settings.verbs import MODEL_HELP, TrainSettings

if TYPE_CHECKING:
    from compressor.training_run import TrainResult


HELP = "Train a causal language model, with a recipe that prunes or quantizes it meanwhile, and save the checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP["train"])
    add_options(parser, TrainSettings)
    add_verbosity(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Run the verb.

    Args:
        args: as `add_arguments` declares them.

    Returns:
        Exit code 0; errors are raised.
    """
    result = _train(args)
    if args.json:
        print(to_json(_payload(args, result)), end="")
    else:
        _print(args, result)
    return 0


def _train(args: argparse.Namespace) -> TrainResult:
    from compressor.training_run import train

    return train(args.model, **chosen(args, TrainSettings))


def _mode(args: argparse.Namespace) -> str:
    return str(args.mode or TrainSettings.model_fields["mode"].default)


def _payload(args: argparse.Namespace, result: TrainResult) -> dict[str, object]:
    """The record, and what belongs to this run alone: how it ran, and for how long."""
    own = {"output_dir": str(result.output_dir), "seconds": result.seconds, "resumed": result.resumed}
    return {**result.record, **own, "mode": _mode(args), "plans": result.plans, "losses": result.losses}


def _print(args: argparse.Namespace, result: TrainResult) -> None:
    from compressor.console import Console

    console = Console(soft_wrap=True, highlight=False)
    for line in _lines(args, result):
        console.print(line)


def _lines(args: argparse.Namespace, result: TrainResult) -> list[str]:
    training, data = result.record["training"], result.record["data"]
    lines = [
        f"trained:    {training['steps']:,} steps, {training['tokens']:,} tokens, "
        f"drawn from {data['num_blocks']:,} blocks of {data['block_length']}",
        f"train loss: {result.losses[0]:.4f} in the first step, {result.losses[-1]:.4f} in the last",
    ]
    for entry in result.evaluations:
        averages = "".join(f", {loss:.4f} with the averages of {decay}" for decay, loss in entry.get("ema", {}).items())
        when = "as saved" if entry.get("as_saved") else f"step {entry['step']:,}"
        lines.append(f"held out:   {entry['loss']:.4f} nats per token, {when}{averages}")
    if result.plans:
        sizes = ", ".join(f"{plan['operators']:,} operators holding {plan['bytes'] / 1e6:.1f} MB" for plan in result.plans)
        lines.append(
            f"mode:       {_mode(args)}, {len(result.plans)} {'plan' if len(result.plans) == 1 else 'plans'} captured and proved: {sizes}"
        )
    else:
        lines.append(f"mode:       {_mode(args)}")
    if result.report.modules:
        lines.append(
            f"modules:    {len(result.report.modules)} changed by the recipe (start, end and update count {training['recipe_counts']})"
        )
    if training["sparsity"]["all"] >= 0.001:
        lines.append(f"zeros:      {training['sparsity']['all']:.1%} of all matrices")
    lines += [f"fallback:   {fallback.module}: {fallback.kind}: {fallback.detail}" for fallback in result.report.fallbacks]
    lines += [f"note:       {note}" for note in result.report.notes]
    lines += resumed_lines(args.resume, result.resumed)
    lines.append(", ".join(f"{phase} {value:.1f} s" for phase, value in result.seconds.items()))
    lines.append(f"checkpoint: {args.output_dir}")
    return lines
