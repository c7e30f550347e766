"""`harness replay MODEL`: is the training step of a model the same in eager, capture and replay?"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from typing import Annotated

from compressor.settings.kinds import Flag, Text, Texts, Whole
from compressor.settings.options import Option, Settings, add_options, settings_of

EPILOG = """exit codes: 0 every mode gave the same bits, 1 one differs or refuses the step, 2 nothing can be said (too few steps, a step
that does not repeat itself), 3 no verdict: bad input or a failure of the harness itself"""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: of the action; changed.
    """
    parser.epilog = EPILOG
    add_options(parser, EquivalenceSettings)


def run(args: argparse.Namespace) -> int:
    """Compare, and print what came of it.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        The exit code of the verdict.
    """
    settings = settings_of(args, EquivalenceSettings)
    from harness.replay.equivalence.compare import compare_modes
    from harness.replay.equivalence.models import Size, steps_of
    from harness.reporting.verdict import EXIT_CODES

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # what models print must not mix with the verdict
        warnings.simplefilter("ignore")
        size = Size(settings.batch_size, settings.seq_length)
        subject = steps_of(settings.model, size, recipe=settings.recipe, device=settings.device)
        found = compare_modes(
            subject.factory, subject.batch_at, settings.modes, steps=settings.steps, seed=settings.seed, every=settings.every
        )
    print(found.to_json() if settings.as_json else found.to_text(), end="")
    return EXIT_CODES[found.verdict]
