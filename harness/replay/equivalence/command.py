"""`harness replay MODEL`: is the training step of a model the same in eager, capture and replay?"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings

EPILOG = """exit codes: 0 every mode gave the same bits, 1 one differs or refuses the step, 2 nothing can be said (too few steps, a step
that does not repeat itself), 3 no verdict: bad input or a failure of the harness itself"""
_MODES = ("capture", "replay")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.epilog = EPILOG
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a causal language model, or an architecture of the zoo (harness trace-audit), tiny and random",
    )
    parser.add_argument("--steps", metavar="N", type=int, default=12, help="training steps of each mode (default: 12)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=2, help="rows of a batch (default: 2)")
    parser.add_argument("--seq-length", metavar="N", type=int, default=16, help="tokens of a row (default: 16)")
    parser.add_argument(
        "--modes", metavar="MODE", nargs="+", choices=_MODES, default=_MODES, help="what is held against eager (default: both)"
    )
    parser.add_argument("--recipe", metavar="FILE", help="recipe of modifiers that take part in training")
    parser.add_argument("--device", metavar="DEVICE", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of every random generator (default: 0)")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="compare state after every so manieth step (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of the text")


def run(args: argparse.Namespace) -> int:
    """Compare, and print what came of it.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        The exit code of the verdict.
    """
    from harness.replay.equivalence.compare import compare_modes
    from harness.replay.equivalence.models import Size, steps_of
    from harness.reporting.verdict import EXIT_CODES

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # what models print must not mix with the verdict
        warnings.simplefilter("ignore")
        size = Size(args.batch_size, args.seq_length)
        subject = steps_of(args.model, size, recipe=args.recipe, device=args.device)
        found = compare_modes(subject.factory, subject.batch_at, args.modes, steps=args.steps, seed=args.seed, every=args.every)
    print(found.to_json() if args.json else found.to_text(), end="")
    return EXIT_CODES[found.verdict]
