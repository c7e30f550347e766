"""The verb `harness bisect`: two folders in, the guilty module and a test that reproduces it out. Imports nothing heavy before `run`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compressor.console import positive

EPILOG = """exit codes: 0 no difference beyond the limit, 1 a layer was found that makes it, 2 it is spread over layers,
3 no answer: bad input or a failure of the harness itself"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.epilog = EPILOG
    parser.add_argument("base", metavar="BASE", type=Path, help="folder of the base, or of a compressed checkpoint that was accepted")
    parser.add_argument("compressed", metavar="COMPRESSED", type=Path, help="folder of the compressed checkpoint")
    parser.add_argument(
        "--dataset", metavar="D", required=True, help="tokens to compare on: .safetensors (input_ids), .jsonl, .txt, .parquet"
    )
    parser.add_argument(
        "--measure", choices=("kl", "loss", "sqnr"), default="kl", help="of the predictions against the base's (default: kl)"
    )
    parser.add_argument(
        "--limit",
        metavar="L",
        type=_positive_number,
        help="what counts as a difference: nats for kl and loss, dB of the logits for sqnr (default: half of the whole difference)",
    )
    parser.add_argument("--num-samples", metavar="N", type=positive, default=8, help="sequences at most (default: 8)")
    parser.add_argument("--max-seq-length", metavar="T", type=positive, default=128, help="tokens of a sequence at most (default: 128)")
    parser.add_argument("--device", default="auto", help="where the models run: auto, cpu, cuda (default: auto)")
    parser.add_argument("--test", metavar="OUT.py", type=Path, help="write the pytest file here instead of printing it; must not exist")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Search, and print what was found.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        The exit code of the verdict.

    Raises:
        OutputError: the file for the test is there, or its folder is not.
    """
    from compressor.atomic import whole_file
    from compressor.errors import OutputError
    from compressor.json_text import to_json
    from compressor.progress import RichProgress, SilentProgress
    from harness.bisect.locate import bisect

    if args.test is not None and (args.test.exists() or not args.test.parent.is_dir()):
        rule = "exists already" if args.test.exists() else "lies in a folder that does not exist"
        raise OutputError(f"--test {args.test}: {rule}; name a new file in a folder that is there")
    report = bisect(
        args.base,
        args.compressed,
        args.dataset,
        measure=args.measure,
        limit=args.limit,
        num_samples=args.num_samples,
        max_seq_length=args.max_seq_length,
        device=args.device,
        progress=SilentProgress() if args.quiet else RichProgress(),
    )
    if report.test is not None and args.test is not None:
        with whole_file(args.test) as path:
            path.write_text(report.test, encoding="utf-8")
    if args.json:
        sys.stdout.write(to_json(report.to_dict()))
        return report.exit_code
    sys.stdout.write(report.to_text())
    if report.test is not None:
        sys.stdout.write(f"test        {args.test}\n" if args.test is not None else f"\n{report.test}")
    return report.exit_code
