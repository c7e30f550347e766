"""`harness replay sabotage MODEL`: break the ops of a captured step one at a time, and see whether `locate` names the very one."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Text, Texts, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes, worst
from harness.verbs import Command

if TYPE_CHECKING:
    from harness.replay.sabotage.break_ops import Trial


_WAYS = ("left out", "one bit", "twice", "elsewhere", "on a view", "draws")


class SabotageSettings(Settings):
    """The choices of one sabotage."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """Folder of a causal language model, or an architecture of the zoo (harness trace-audit), tiny and random."""
    op: Annotated[Text | None, Option(metavar="OP", group="chosen")] = None
    """Ops of this name only, such as aten.silu."""
    all: Annotated[Flag, Option(group="chosen")] = False
    """Every op; by default one of each overload and phase."""
    ways: Annotated[Texts, Option(metavar="WAY", choices=_WAYS, many=True)] = _WAYS
    """What is done to them (default: all)."""
    batch_size: Annotated[Whole, Option(metavar="N", read=int)] = 1
    """Rows of a batch."""
    seq_length: Annotated[Whole, Option(metavar="N", read=int)] = 8
    """Tokens of a row."""
    seed: Annotated[Whole, Option(metavar="N", read=int)] = 0
    """Of torch's random generator."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print every trial as JSON."""


def run(settings: SabotageSettings) -> Verdict:
    """Sabotage, and print what came of it.

    Args:
        settings: of the verb.

    Returns:
        The worst of the trials.
    """
    from harness.replay.sabotage.break_ops import score

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # what models print must not mix with the verdict
        warnings.simplefilter("ignore")
        trials = _trials(settings)
    counts = score(trials)
    verdict = worst(trial.outcome.verdict for trial in trials)
    if settings.as_json:
        found = {"model": settings.model, "verdict": verdict.value, "score": counts, "trials": [trial.to_dict() for trial in trials]}
        print(to_json(found), end="")
    else:
        print(_text(trials, counts))
    return verdict


def _trials(settings: SabotageSettings) -> list[Trial]:
    import torch

    from compressor.progress import progress_of
    from compressor.training.engines.tape import Tape
    from harness.replay.equivalence.models import Size, steps_of
    from harness.replay.kernels.exchange import find_ops
    from harness.replay.kernels.sources import plan_on_tape
    from harness.replay.sabotage.break_ops import one_of_each, sabotage

    subject = steps_of(settings.model, Size(settings.batch_size, settings.seq_length), device="cpu")
    torch.manual_seed(settings.seed)
    plan = plan_on_tape(subject.factory(), subject.batch_at)
    tape = plan.captured
    assert isinstance(tape, Tape)
    chosen = find_ops(tape.ops, settings.op) if settings.op else tape.ops if settings.all else one_of_each(tape.ops)
    progress = progress_of(sys.stderr.isatty())
    with progress.task("sabotage", len(chosen) * len(settings.ways)) as task:
        return sabotage(plan, subject.batch_at(0), chosen, settings.ways, each=lambda trial: task.advance(1, trial.place))


def _text(trials: Sequence[Trial], counts: dict[str, int]) -> str:
    from harness.replay.sabotage.break_ops import TrialOutcome

    num_ops = len({trial.index for trial in trials})
    numbers = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    lines = [f"{num_ops} ops sabotaged one at a time, {len(trials)} trials: {numbers}"]
    for trial in trials:
        if trial.outcome is TrialOutcome.ANOTHER:
            lines.append(f"  {trial.place}, {trial.way}: locate named op {trial.named}")
        elif trial.outcome is not TrialOutcome.NAMED:
            lines.append(f"  {trial.place}, {trial.way}: {trial.outcome.value}")
    return "\n".join(lines)


_EPILOG = """ways: `left out`, the op does not run; `one bit`, the lowest bit of a number that it writes is flipped; `twice`, an op that
writes in place runs two times; `elsewhere`, it also flips a bit of a tensor that it does not write; `on a view`, an op that only makes an
alias writes through it; `draws`, it also draws a random number. """

COMMAND = Command(
    "break the ops of a captured step one at a time, and see whether `locate` names the very one",
    SabotageSettings,
    run,
    _EPILOG
    + exit_codes(
        "each op was named, or nothing that the step leaves depends on what was done to it",
        "one was missed, or another one was named",
        "none of the ways applies to any of the ops",
    ),
)
