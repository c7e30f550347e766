"""The verb `harness release`: a sign-off, and whether a folder is still what was signed off. Nothing heavy is imported before `run`."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from compressor.console import count, positive
from compressor.json_text import to_json
from compressor.settings.kinds import FilePath, Flag, PathLike, Text, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Actions, Command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.reporting.record import CheckRecord


class CheckSettings(Settings):
    """The choices of one sign-off."""

    base: Annotated[PathLike, Option(positional=True, metavar="BASE")]
    """Folder of the model that was compressed, or its name on the hub."""
    compressed: Annotated[PathLike, Option(positional=True, metavar="COMPRESSED")]
    """Folder of the compressed checkpoint."""
    policy: Annotated[FilePath, Option(metavar="P.yaml")] = Path("default")
    """What is required, limits, waivers, environments, commands; the word default for the built-in policy."""
    dataset: Annotated[Text | None, Option(metavar="D")] = None
    """Held-out data, as for validate (default: that of the policy)."""
    output_dir: Annotated[FilePath | None, Option(metavar="O")] = None
    """Folder for release.html, release.json, statement.json, junit.xml; new or empty (default: ./<COMPRESSED>-release)."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the report as JSON instead of the table."""
    device: Annotated[Text, Option()] = "auto"
    """Where the models run: auto, cpu, cuda."""
    num_samples: Annotated[Whole, Option(metavar="N", read=positive)] = 512
    """Sequences at most."""
    seed: Annotated[Whole, Option(read=count)] = 0
    """Of the bootstrap and of sampled text."""
    quiet: Annotated[Flag, Option()] = False
    """Show no progress bars."""


class VerifySettings(Settings):
    """What is held against what."""

    statement: Annotated[FilePath, Option(positional=True, metavar="STATEMENT.json")]
    """Of the sign-off."""
    folder: Annotated[FilePath, Option(positional=True, metavar="FOLDER")]
    """The checkpoint, wherever it lies now."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the records as JSON instead of the table."""


def run(settings: CheckSettings) -> Verdict:
    """Sign off, write the folder, and say what was found.

    Args:
        settings: of the verb.

    Returns:
        What the report says.
    """
    from harness.release.policy import load_release_policy

    policy = load_release_policy(settings.policy)
    from compressor.atomic import check_output_dir
    from compressor.progress import progress_of
    from harness.release.page import write_release
    from harness.release.signing import sign_off

    output_dir = settings.output_dir or Path(f"{Path(settings.compressed).resolve().name}-release")
    for source in (settings.base, settings.compressed):
        check_output_dir(output_dir, source=source)
    report = sign_off(
        settings.base,
        settings.compressed,
        settings.dataset,
        policy=policy,
        device=settings.device,
        num_samples=settings.num_samples,
        seed=settings.seed,
        progress=progress_of(not settings.quiet),
    )
    page = write_release(report, output_dir)
    if settings.as_json:
        sys.stdout.write(to_json(report.to_dict()))
        return report.verdict
    waived = [f"waived:  {name} until {waiver.until}: {waiver.reason}" for name, waiver in report.waived.items()]
    _print(report.records, report.verdict, *waived, f"page:    {page}")
    return report.verdict


def verify(settings: VerifySettings) -> Verdict:
    """Hold a folder against the statement of its sign-off.

    Args:
        settings: of the verb.

    Returns:
        PASS where every file is the one that was signed off, and the sign-off had passed.
    """
    from harness.release.statement import verify_statement
    from harness.reporting.record import decide

    records = verify_statement(settings.statement, settings.folder, today=datetime.now(UTC).date())
    verdict = decide(records)
    if settings.as_json:
        sys.stdout.write(to_json({"verdict": verdict.value, "checks": [record.to_dict() for record in records]}))
        return verdict
    _print(records, verdict, *(finding for record in records for finding in record.findings))
    return verdict


def _print(records: Sequence[CheckRecord], verdict: Verdict, *lines: str) -> None:
    from compressor.console import Console
    from harness.reporting.text import VERDICT_STYLES, printable, to_table

    console = Console()
    console.print(to_table(records, width=console.width))
    console.print(f"verdict: {verdict.value}", style=VERDICT_STYLES[verdict])
    for line in lines:
        console.print(printable(line), soft_wrap=True, highlight=False, markup=False)


COMMAND = Actions(
    "sign off a compressed model before its release, and check later that a folder is what was signed off",
    {
        "check": Command(
            "everything that must be seen once before a model leaves, on one page (harness release BASE COMPRESSED)",
            CheckSettings,
            run,
            exit_codes("pass, or all that failed is waived", "regression (a check failed)", "inconclusive (a check could not tell)"),
        ),
        "verify": Command(
            "hold a folder against the statement of its sign-off",
            VerifySettings,
            verify,
            exit_codes("it is what was signed off", "a file is another, or the sign-off failed", "the sign-off was inconclusive"),
        ),
    },
    default="check",
)
