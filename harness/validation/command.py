"""The verb `harness validate`: arguments in, report folder and exit code out. Nothing heavy is imported before `run`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from compressor.console import count, positive
from compressor.settings.kinds import FilePath, Flag, Number, PathLike, Text, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command

if TYPE_CHECKING:
    from harness.validation.compare import ValidationReport
    from harness.validation.policy import Policy
    from harness.validation.serving.servers import ServerName


def _confidence(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.5 < value <= 0.9999:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0.5 and up to 0.9999, such as 0.95")
    return value


class ValidateSettings(Settings):
    """The choices of one validation."""

    base: Annotated[PathLike, Option(positional=True, metavar="BASE")]
    """Folder of the model that was compressed, a causal language model; or its name on the hub (owner/name, owner/name@revision)."""
    compressed: Annotated[PathLike, Option(positional=True, metavar="COMPRESSED")]
    """Folder of the compressed checkpoint, or its name on the hub."""
    dataset: Annotated[Text, Option(metavar="D")]
    """Held-out data: .safetensors (input_ids), .jsonl, .json, .csv, .txt, .parquet, a name on the hub (owner/name), wikitext and the
    like."""
    split: Annotated[Text | None, Option(metavar="S")] = None
    """Split of a dataset that has several, or a part of one: test, test[:100]."""
    policy: Annotated[FilePath | None, Option(metavar="P.yaml")] = None
    """Limits; what the file does not name keeps its default."""
    trained: Annotated[Flag, Option()] = False
    """It was trained too (QAT, pruning): values may differ from the base's, behaviour decides."""
    trust_remote_code_model: Annotated[Flag, Option("--trust-remote-code")] = False
    """Run Python code that lies in either folder."""
    serve: Annotated[Text, Option(choices=("vllm", "sglang", "none"))] = "vllm"
    """The server whose loader the files are held against: vllm, sglang, none."""
    output_dir: Annotated[FilePath | None, Option(metavar="O")] = None
    """Report folder, new or empty (default: ./<COMPRESSED>-validation)."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the report as JSON on standard output instead of the table."""
    device: Annotated[Text, Option()] = "auto"
    """Where the models run: auto, cpu, cuda."""
    max_seq_length: Annotated[Whole | None, Option(metavar="T", read=positive)] = None
    """Tokens of a sequence (default: what the model takes, <= 2048)."""
    num_samples: Annotated[Whole, Option(metavar="N", read=positive)] = 512
    """Sequences at most."""
    seed: Annotated[Whole, Option(read=count)] = 0
    """Of the bootstrap."""
    confidence: Annotated[Number | None, Option(metavar="C", read=_confidence)] = None
    """Of the intervals, over the policy's (default: 0.95)."""
    quiet: Annotated[Flag, Option()] = False
    """Show no progress bars."""


def run(settings: ValidateSettings) -> Verdict:
    """Validate, write the report and say what was found.

    Args:
        settings: of the verb.
    Returns:
        What the report says.
    """
    policy = _policy(settings)
    output_dir = settings.output_dir or Path(f"{Path(settings.compressed).resolve().name}-validation")
    from compressor.distributed.launch import is_first_rank, launched
    from compressor.progress import progress_of
    from harness.validation.compare import validate
    from harness.validation.report.page import check_output_dir, write_report

    for source in (settings.base, settings.compressed):
        check_output_dir(output_dir, source=source)
    with launched():
        report = validate(
            settings.base,
            settings.compressed,
            settings.dataset,
            split=settings.split,
            policy=policy,
            trained=settings.trained,
            trust_remote_code_model=settings.trust_remote_code_model,
            serve=cast("ServerName", settings.serve),
            device=settings.device,
            max_seq_length=settings.max_seq_length,
            num_samples=settings.num_samples,
            seed=settings.seed,
            progress=progress_of(is_first_rank() and not settings.quiet),
        )
    if not is_first_rank():
        return report.verdict
    _print(report, write_report(report, output_dir), as_json=settings.as_json)
    return report.verdict


def _policy(settings: ValidateSettings) -> Policy:
    from harness.validation.policy import Policy, load_policy

    policy = load_policy(settings.policy)
    return policy if settings.confidence is None else Policy.model_validate({**policy.model_dump(), "confidence": settings.confidence})


def _print(report: ValidationReport, page: Path, *, as_json: bool) -> None:
    from compressor.console import Console
    from compressor.json_text import to_json
    from harness.reporting.text import VERDICT_STYLES, to_table

    if as_json:
        sys.stdout.write(to_json(report.to_dict()))
        return
    console = Console()
    console.print(to_table(report.records, width=console.width))
    console.print(f"verdict: {report.verdict.value}", style=VERDICT_STYLES[report.verdict])
    console.print(f"report:  {page}", soft_wrap=True, highlight=False)


COMMAND = Command(
    "prove a compressed causal language model against its base: files, format, weights, behaviour",
    ValidateSettings,
    run,
    exit_codes("pass", "regression (a check failed)", "inconclusive (nothing failed, but a check could not tell)"),
)
