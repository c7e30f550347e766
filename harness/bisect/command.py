"""The verb `harness bisect`: two folders in, the guilty module and a test that reproduces it out. Imports nothing heavy before `run`."""

from __future__ import annotations

import argparse
import sys
from typing import Annotated

from compressor.console import positive
from compressor.settings.kinds import FilePath, Flag, Number, PathLike, Text, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


class BisectSettings(Settings):
    """The choices of one search."""

    base: Annotated[PathLike, Option(positional=True, metavar="BASE")]
    """Folder of the base, or of a compressed checkpoint that was accepted; or its name on the hub (owner/name, owner/name@revision)."""
    compressed: Annotated[PathLike, Option(positional=True, metavar="COMPRESSED")]
    """Folder of the compressed checkpoint, or its name on the hub."""
    dataset: Annotated[Text, Option(metavar="D")]
    """Tokens to compare on: .safetensors (input_ids), .jsonl, .txt, .parquet."""
    measure: Annotated[Text, Option(choices=("kl", "loss", "sqnr"))] = "kl"
    """Of the predictions against the base's."""
    limit: Annotated[Number | None, Option(metavar="L", read=_positive_number)] = None
    """What counts as a difference: nats for kl and loss, dB of the logits for sqnr (default: half of the whole difference)."""
    num_samples: Annotated[Whole, Option(metavar="N", read=positive)] = 8
    """Sequences at most."""
    max_seq_length: Annotated[Whole, Option(metavar="T", read=positive)] = 128
    """Tokens of a sequence at most."""
    device: Annotated[Text, Option()] = "auto"
    """Where the models run: auto, cpu, cuda."""
    test: Annotated[FilePath | None, Option(metavar="OUT.py")] = None
    """Write the pytest file here instead of printing it; must not exist."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print JSON instead of text."""
    quiet: Annotated[Flag, Option()] = False
    """Show no progress bars."""


def run(settings: BisectSettings) -> Verdict:
    """Search, and print what was found.

    Args:
        settings: of the verb.

    Returns:
        REGRESSION where a layer was found, INCONCLUSIVE where the difference is spread over layers, PASS where there is none.

    Raises:
        OutputError: the file for the test is there, or its folder is not.
    """
    from compressor.atomic import whole_file
    from compressor.errors import OutputError
    from compressor.json_text import to_json
    from compressor.progress import progress_of
    from harness.bisect.locate import bisect

    if settings.test is not None and (settings.test.exists() or not settings.test.parent.is_dir()):
        rule = "exists already" if settings.test.exists() else "lies in a folder that does not exist"
        raise OutputError(f"--test {settings.test}: {rule}; name a new file in a folder that is there")
    report = bisect(
        settings.base,
        settings.compressed,
        settings.dataset,
        measure=settings.measure,
        limit=settings.limit,
        num_samples=settings.num_samples,
        max_seq_length=settings.max_seq_length,
        device=settings.device,
        progress=progress_of(not settings.quiet),
    )
    if report.test is not None and settings.test is not None:
        with whole_file(settings.test) as path:
            path.write_text(report.test, encoding="utf-8")
    if settings.as_json:
        sys.stdout.write(to_json(report.to_dict()))
        return report.verdict
    sys.stdout.write(report.to_text())
    if report.test is not None:
        sys.stdout.write(f"test        {settings.test}\n" if settings.test is not None else f"\n{report.test}")
    return report.verdict


COMMAND = Command(
    "find the layer, module and modifier that make a compressed model differ",
    BisectSettings,
    run,
    exit_codes("no difference beyond the limit", "a layer was found that makes it", "it is spread over layers"),
)
