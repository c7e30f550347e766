"""`harness replay sabotage MODEL`: break the ops of a captured step one at a time, and see whether `locate` names the very one."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.json_text import to_json
from harness.reporting.verdict import EXIT_CODES, Verdict

if TYPE_CHECKING:
    from harness.replay.sabotage.break_ops import Trial


EPILOG = """ways: `left out`, the op does not run; `one bit`, the lowest bit of a number that it writes is flipped; `twice`, an op that
writes in place runs two times; `elsewhere`, it also flips a bit of a tensor that it does not write; `on a view`, an op that only makes an
alias writes through it; `draws`, it also draws a random number. exit codes: 0 each op was named, or nothing that the step leaves depends on
what was done to it; 1 one was missed, or another one was named; 3 bad input, or a failure of the harness itself"""
_WAYS = ("left out", "one bit", "twice", "elsewhere", "on a view", "draws")


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
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--op", metavar="OP", help="ops of this name only, such as aten.silu")
    chosen.add_argument("--all", action="store_true", help="every op; by default one of each overload and phase")
    parser.add_argument("--ways", metavar="WAY", nargs="+", choices=_WAYS, default=_WAYS, help="what is done to them (default: all)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=1, help="rows of a batch (default: 1)")
    parser.add_argument("--seq-length", metavar="N", type=int, default=8, help="tokens of a row (default: 8)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of torch's random generator (default: 0)")
    parser.add_argument("--json", action="store_true", help="print every trial as JSON")


def run(args: argparse.Namespace) -> int:
    """Sabotage, and print what came of it.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0 or 1, as the epilog says.
    """
    from harness.replay.sabotage.break_ops import score

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # what models print must not mix with the verdict
        warnings.simplefilter("ignore")
        trials = _trials(args)
    counts = score(trials)
    verdict = Verdict.REGRESSION if counts["missed"] or counts["another named"] else Verdict.PASS
    if args.json:
        found = {"model": args.model, "verdict": verdict.value, "score": counts, "trials": [trial.to_dict() for trial in trials]}
        print(to_json(found), end="")
    else:
        print(_text(trials, counts))
    return EXIT_CODES[verdict]


def _trials(args: argparse.Namespace) -> list[Trial]:
    import torch

    from compressor.progress import RichProgress, SilentProgress
    from compressor.training.engines.tape import Tape
    from harness.replay.equivalence.models import Size, steps_of
    from harness.replay.kernels.exchange import find_ops
    from harness.replay.kernels.sources import plan_on_tape
    from harness.replay.sabotage.break_ops import one_of_each, sabotage

    subject = steps_of(args.model, Size(args.batch_size, args.seq_length), device="cpu")
    torch.manual_seed(args.seed)
    plan = plan_on_tape(subject.factory(), subject.batch_at)
    tape = plan.captured
    assert isinstance(tape, Tape)
    chosen = find_ops(tape.ops, args.op) if args.op else tape.ops if args.all else one_of_each(tape.ops)
    progress = RichProgress() if sys.stderr.isatty() else SilentProgress()
    with progress.task("sabotage", len(chosen) * len(args.ways)) as task:
        return sabotage(plan, subject.batch_at(0), chosen, args.ways, each=lambda trial: task.advance(1, trial.place))


def _text(trials: Sequence[Trial], counts: dict[str, int]) -> str:
    num_ops = len({trial.index for trial in trials})
    numbers = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    lines = [f"{num_ops} ops sabotaged one at a time, {len(trials)} trials: {numbers}"]
    for trial in trials:
        if trial.outcome == "another named":
            lines.append(f"  {trial.place}, {trial.way}: locate named op {trial.named}")
        elif trial.outcome != "named":
            lines.append(f"  {trial.place}, {trial.way}: {trial.outcome}")
    return "\n".join(lines)
