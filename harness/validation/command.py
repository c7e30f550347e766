"""The verb `harness validate`: arguments in, report folder and exit code out. Nothing heavy is imported before `run`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.console import count, positive

if TYPE_CHECKING:
    from harness.validation.compare import ValidationReport
    from harness.validation.policy import Policy


EPILOG = """exit codes: 0 pass, 1 regression (a check failed), 2 inconclusive (nothing failed, but a check could not tell),
3 no verdict: bad input or a failure of the harness itself"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.epilog = EPILOG
    parser.add_argument("base", metavar="BASE", type=Path, help="folder of the model that was compressed, a causal language model")
    parser.add_argument("compressed", metavar="COMPRESSED", type=Path, help="folder of the compressed checkpoint")
    parser.add_argument("--dataset", metavar="D", required=True, help="held-out data: .safetensors (input_ids), .jsonl, .txt, .parquet")
    parser.add_argument("--policy", metavar="P.yaml", type=Path, help="limits; what the file does not name keeps its default")
    parser.add_argument(
        "--trained",
        action="store_true",
        help="it was trained too (QAT, pruning): values may differ from the base's, behaviour decides",
    )
    parser.add_argument("--output-dir", metavar="O", type=Path, help="report folder, new or empty (default: ./<COMPRESSED>-validation)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on standard output instead of the table")
    parser.add_argument("--device", default="auto", help="where the models run: auto, cpu, cuda (default: auto)")
    parser.add_argument(
        "--max-seq-length", metavar="T", type=positive, help="tokens of a sequence (default: what the model takes, <= 2048)"
    )
    parser.add_argument("--num-samples", metavar="N", type=positive, default=512, help="sequences at most (default: 512)")
    parser.add_argument("--seed", type=count, default=0, help="of the bootstrap (default: 0)")
    parser.add_argument("--confidence", metavar="C", type=_confidence, help="of the intervals, over the policy's (default: 0.95)")
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")


def _confidence(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.5 < value <= 0.9999:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0.5 and up to 0.9999, such as 0.95")
    return value


def run(args: argparse.Namespace) -> int:
    """Validate, write the report and say what was found.

    Args:
        args: as declared by `add_arguments`.
    Returns:
        The exit code of the verdict.
    """
    policy = _policy(args)
    output_dir = args.output_dir or Path(f"{args.compressed.resolve().name}-validation")
    from compressor.progress import RichProgress, SilentProgress
    from harness.validation.compare import validate
    from harness.validation.report.page import check_output_dir, write_report

    for source in (args.base, args.compressed):
        check_output_dir(output_dir, source=source)
    report = validate(
        args.base,
        args.compressed,
        args.dataset,
        policy=policy,
        trained=args.trained,
        device=args.device,
        max_seq_length=args.max_seq_length,
        num_samples=args.num_samples,
        seed=args.seed,
        progress=SilentProgress() if args.quiet else RichProgress(),
    )
    _print(report, write_report(report, output_dir), as_json=args.json)
    return report.exit_code


def _policy(args: argparse.Namespace) -> Policy:
    from harness.validation.policy import Policy, load_policy

    policy = load_policy(args.policy)
    return policy if args.confidence is None else Policy.model_validate({**policy.model_dump(), "confidence": args.confidence})


def _print(report: ValidationReport, page: Path, *, as_json: bool) -> None:
    from compressor.console import Console
    from compressor.json_text import to_json
    from harness.reporting.record import to_table

    if as_json:
        sys.stdout.write(to_json(report.to_dict()))
        return
    console = Console()
    console.print(to_table(report.records, width=console.width))
    styles = {"pass": "bold green", "regression": "bold red", "inconclusive": "bold yellow"}
    console.print(f"verdict: {report.verdict.value}", style=styles[report.verdict.value])
    console.print(f"report:  {page}", soft_wrap=True, highlight=False)
