"""`harness replay MODEL`: is the training step of a model the same in eager, capture and replay?"""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Annotated

from compressor.settings.kinds import Flag, Text, Texts, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command

_MODES = ("capture", "replay")


class EquivalenceSettings(Settings):
    """The choices of one comparison of modes."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """Folder of a causal language model, or an architecture of the zoo (harness trace-audit), tiny and random."""
    steps: Annotated[Whole, Option(metavar="N", read=int)] = 12
    """Training steps of each mode."""
    batch_size: Annotated[Whole, Option(metavar="N", read=int)] = 2
    """Rows of a batch."""
    seq_length: Annotated[Whole, Option(metavar="N", read=int)] = 16
    """Tokens of a row."""
    modes: Annotated[Texts, Option(metavar="MODE", choices=_MODES, many=True)] = _MODES
    """What is held against eager (default: both)."""
    recipe: Annotated[Text | None, Option(metavar="FILE")] = None
    """Recipe of modifiers that take part in training."""
    device: Annotated[Text, Option(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda."""
    seed: Annotated[Whole, Option(metavar="N", read=int)] = 0
    """Of every random generator."""
    every: Annotated[Whole, Option(metavar="N", read=int)] = 1
    """Compare state after every so manieth step."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the result as JSON instead of the text."""


def run(settings: EquivalenceSettings) -> Verdict:
    """Compare, and print what came of it.

    Args:
        settings: of the verb.

    Returns:
        What the records say.
    """
    from harness.replay.equivalence.compare import compare_modes
    from harness.replay.equivalence.models import Size, steps_of

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # what models print must not mix with the verdict
        warnings.simplefilter("ignore")
        size = Size(settings.batch_size, settings.seq_length)
        subject = steps_of(settings.model, size, recipe=settings.recipe, device=settings.device, num_steps=settings.steps)
        found = compare_modes(
            subject.factory, subject.batch_at, settings.modes, steps=settings.steps, seed=settings.seed, every=settings.every
        )
    for note in subject.notes:
        print(f"note: {note}", file=sys.stderr)
    print(found.to_json() if settings.as_json else found.to_text(), end="")
    return found.verdict


COMMAND = Command(
    "train a model in eager, capture and replay, and compare all state bit for bit; `harness replay MODEL` is short for it",
    EquivalenceSettings,
    run,
    exit_codes(
        "every mode gave the same bits",
        "one differs or refuses the step",
        "nothing can be said (too few steps, a step that does not repeat itself)",
    ),
)
