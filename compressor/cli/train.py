"""The verb `train`: its arguments and what it prints. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.console import count, positive, whole
from compressor.errors import AlreadyDoneError

if TYPE_CHECKING:
    from compressor.training_run import TrainResult


HELP = "Train a causal language model, with a recipe that prunes or quantizes it meanwhile, and save the checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb; --recipe-arg is that of the other verbs and is added by them.

    Args:
        parser: of the verb; changed.
    """
    parser.add_argument("model", metavar="MODEL", help="folder of a transformers checkpoint (config.json, *.safetensors)")
    parser.add_argument("--recipe", metavar="R", help="recipe: a YAML or JSON file, or its text (none: plain training)")
    parser.add_argument("--dataset", required=True, metavar="D", help="training data: .jsonl, .txt, .parquet or .safetensors")
    parser.add_argument("--output-dir", required=True, metavar="O", help="folder of the checkpoint; must not exist or be empty")
    _data_arguments(parser)
    _step_arguments(parser)
    _run_arguments(parser)


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text-column", default="text", metavar="NAME", help="column of the dataset that holds the text (text)")
    parser.add_argument("--max-seq-length", type=positive, metavar="T", help="tokens of each block (what the model takes, up to 2048)")
    parser.add_argument("--no-shuffle", action="store_true", help="take blocks in the order of the data, not in one drawn for each epoch")
    parser.add_argument("--eval-dataset", metavar="D", help="held-out data; its loss is measured before and after the run")
    parser.add_argument("--eval-every", type=positive, metavar="N", help="measure it after every N steps, too")


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, metavar="N", help="length of the run; start, end and update in the recipe count steps")
    length.add_argument("--epochs", type=float, metavar="E", help="length in passes over the data (1); the recipe then counts epochs")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="B", help="blocks in a micro-batch (8)")
    parser.add_argument("--accumulate", type=positive, default=1, metavar="A", help="micro-batches in a step (1)")
    parser.add_argument("--learning-rate", type=float, default=2e-5, metavar="LR", help="peak of AdamW; a cosine leads from it to 0 (2e-5)")
    parser.add_argument("--warmup-steps", type=count, default=0, metavar="W", help="steps that lead up to the peak (0)")
    parser.add_argument("--weight-decay", type=float, default=0.0, metavar="WD", help="decay of matrices; norms and biases have none (0)")
    parser.add_argument("--clip-norm", type=float, default=1.0, metavar="C", help="largest norm of all gradients; 0 clips nothing (1)")
    parser.add_argument("--autocast", choices=("off", "bf16"), default="off", help="dtype of the forward's products (off)")
    parser.add_argument(
        "--ema", type=float, action="append", default=[], metavar="DECAY", help="keep a moving average of the weights; may be repeated"
    )
    parser.add_argument("--ema-warmup", action="store_true", help="begin with smaller decays: (1 + n) / (10 + n) after n steps")
    parser.add_argument("--save-ema", type=float, metavar="DECAY", help="save the average of this decay, not the weights")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=("replay", "eager", "capture"),
        default="replay",
        help="how a step runs, with the same bits: captured once and repeated, as it is, or recorded every time (replay)",
    )
    parser.add_argument("--check-every", type=positive, default=1, metavar="N", help="check the guards at every Nth replay (1)")
    parser.add_argument(
        "--audit-every",
        type=count,
        metavar="N",
        help="run every Nth step eagerly, too, and compare; 0: none (1, 2, 4, ... 64 steps after a proof, then in 3 %% of the time): "
        "what the guards see is refused at once; anything else that Python reads is found by the audit, if it stays changed, "
        "at most 1,000 steps later",
    )
    parser.add_argument("--save-every", type=count, metavar="N", help="keep a state after every N steps; 0: never (a tenth of the run)")
    parser.add_argument("--run-dir", metavar="R", help="folder that keeps the last two states until the end (O.partial-run)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest state of an earlier run of the same command")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (auto)")
    parser.add_argument(
        "--dtype", default="float32", choices=("auto", "bfloat16", "float16", "float32"), help="of weights in training (float32)"
    )
    parser.add_argument(
        "--save-dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="of weights in the checkpoint (as loaded)"
    )
    parser.add_argument("--model-class", metavar="C", help="transformers class to load with (AutoModelForCausalLM)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that lies in the model's folder")
    parser.add_argument("--seed", type=whole, default=0, metavar="S", help="seed of everything random (0)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")


def run(args: argparse.Namespace) -> int:
    """Run the verb.

    Args:
        args: as `add_arguments` declares them.

    Returns:
        Exit code 0; errors are raised.
    """
    try:
        result = _train(args)
    except AlreadyDoneError as done:
        print(f"compressor train: {done}", file=sys.stderr)
        if args.json:
            record = json.loads((Path(args.output_dir) / "compression.json").read_text(encoding="utf-8"))
            print(json.dumps({**record, "output_dir": str(Path(args.output_dir).resolve())}, indent=1, sort_keys=True))
        return 0
    if args.json:
        print(json.dumps(_payload(args, result), indent=1, sort_keys=True))
    else:
        _print(args, result)
    return 0


def _train(args: argparse.Namespace) -> TrainResult:
    from compressor.training_run import train

    return train(
        args.model,
        recipe=args.recipe,
        recipe_args=args.recipe_arg,
        dataset=args.dataset,
        output_dir=args.output_dir,
        run_dir=args.run_dir,
        resume=args.resume,
        steps=args.steps,
        epochs=args.epochs,
        batch_size=args.batch_size,
        max_seq_length=args.max_seq_length,
        text_column=args.text_column,
        shuffle=not args.no_shuffle,
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay,
        accumulate=args.accumulate,
        clip_norm=args.clip_norm,
        autocast=args.autocast,
        ema=args.ema,
        ema_warmup=args.ema_warmup,
        save_ema=args.save_ema,
        eval_dataset=args.eval_dataset,
        eval_every=args.eval_every,
        save_every=args.save_every,
        mode=args.mode,
        check_every=args.check_every,
        audit_every=args.audit_every,
        device=args.device,
        dtype=args.dtype,
        save_dtype=args.save_dtype,
        model_class=args.model_class,
        trust_remote_code_model=args.trust_remote_code,
        seed=args.seed,
        progress=not args.quiet,
    )


def _payload(args: argparse.Namespace, result: TrainResult) -> dict[str, object]:
    """The record, and what belongs to this run alone: how it ran, and for how long."""
    own = {"output_dir": str(result.output_dir), "seconds": result.seconds, "resumed": result.resumed}
    return {**result.record, **own, "mode": args.mode, "plans": result.plans, "losses": result.losses}


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
            f"mode:       {args.mode}, {len(result.plans)} {'plan' if len(result.plans) == 1 else 'plans'} captured and proved: {sizes}"
        )
    else:
        lines.append(f"mode:       {args.mode}")
    if result.report.modules:
        lines.append(
            f"modules:    {len(result.report.modules)} changed by the recipe (start, end and update count {training['recipe_counts']})"
        )
    if training["sparsity"]["all"] >= 0.001:
        lines.append(f"zeros:      {training['sparsity']['all']:.1%} of all matrices")
    lines += [f"fallback:   {fallback.module}: {fallback.kind}: {fallback.detail}" for fallback in result.report.fallbacks]
    lines += [f"note:       {note}" for note in result.report.notes]
    if result.resumed is not None:
        lines.append(result.resumed)
    lines.append(", ".join(f"{phase} {value:.1f} s" for phase, value in result.seconds.items()))
    lines.append(f"checkpoint: {args.output_dir}")
    return lines
