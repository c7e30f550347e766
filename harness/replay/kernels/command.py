"""`harness replay kernels MODEL --swap aten.silu=module:function`: what another kernel changes in a training step, all else fixed."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import TYPE_CHECKING, Annotated

from compressor.errors import UserInputError
from compressor.json_text import to_json
from compressor.settings.kinds import Flag, Number, Text, Texts, Whole
from compressor.settings.options import Option, Settings
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command

if TYPE_CHECKING:
    from harness.replay.kernels.report import KernelReport


class KernelSettings(Settings):
    """The choices of one exchange of kernels."""

    model: Annotated[Text, Option(positional=True, metavar="MODEL")]
    """Folder of a causal language model, or an architecture of the zoo (harness trace-audit), tiny and random."""
    swap: Annotated[Texts, Option(metavar="OP=MODULE:FUNCTION", repeats=True)]
    """Exchange an op, such as aten.silu=mine:silu; repeatable."""
    steps: Annotated[Whole, Option(metavar="N", read=int)] = 10
    """Compare the state after 1 step and after N."""
    rounds: Annotated[Whole, Option(metavar="N", read=int)] = 15
    """Rounds of interleaved timing, 0 for none."""
    batch_size: Annotated[Whole, Option(metavar="N", read=int)] = 2
    """Rows of a batch."""
    seq_length: Annotated[Whole, Option(metavar="N", read=int)] = 16
    """Tokens of a row."""
    device: Annotated[Text, Option(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda."""
    seed: Annotated[Whole, Option(metavar="N", read=int)] = 0
    """Of every random generator."""
    max_ulps: Annotated[Number | None, Option(metavar="N", read=float)] = None
    """Fail where a result of the op is further away, in units in the last place."""
    max_error: Annotated[Number | None, Option(metavar="X", read=float)] = None
    """Fail where a result of the op differs by more, absolutely."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the result as JSON instead of the text."""


def run(settings: KernelSettings) -> Verdict:
    """Exchange, measure, and print what came of it.

    Args:
        settings: of the verb.

    Returns:
        What the tolerance says; PASS where there is none.
    """
    _check_limits(settings)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # what models and variants print must not mix with the verdict
        warnings.simplefilter("ignore")
        reports = _reports(settings)
    beyond = [line for report in reports for line in report.exceeded(settings.max_ulps, settings.max_error)]
    verdict, reason = _verdict(settings, reports, list(dict.fromkeys(beyond)))
    if settings.as_json:
        result = {"model": settings.model, "verdict": verdict.value, "reason": reason, "reports": [report.to_dict() for report in reports]}
        print(to_json(result), end="")
    else:
        print("\n\n".join(report.text() for report in reports))
        if reason:
            print(f"\n{verdict.value}: {reason}")
    return verdict


def _check_limits(settings: KernelSettings) -> None:
    from harness.tolerance.bits import FAR

    for flag, value in (("--max-ulps", settings.max_ulps), ("--max-error", settings.max_error)):
        if value is not None and not 0 <= value < FAR:
            raise UserInputError(f"{flag} {value:g}: a tolerance is a number of 0 or more, below {FAR:.1e}; 0 asks for equal values")


def _reports(settings: KernelSettings) -> list[KernelReport]:
    import torch

    from compressor.progress import progress_of
    from compressor.training.engines.tape import Tape
    from harness.replay.equivalence.models import Size, steps_of
    from harness.replay.kernels.compare import compare_kernels
    from harness.replay.kernels.exchange import find_ops
    from harness.replay.kernels.sources import plan_on_tape, read_swap

    swaps = [read_swap(text) for text in settings.swap]
    subject = steps_of(settings.model, Size(settings.batch_size, settings.seq_length), device=settings.device)
    torch.manual_seed(settings.seed)
    plan = plan_on_tape(subject.factory(), subject.batch_at)
    tape = plan.captured
    assert isinstance(tape, Tape)
    meant = [op.index for swap in swaps for op in find_ops(tape.ops, swap.match)]
    at_once = [swaps] if len(swaps) > 1 and len(set(meant)) == len(meant) else []
    progress = progress_of(sys.stderr.isatty())
    return [
        compare_kernels(
            plan, subject.batch_at(0), chosen, steps=settings.steps, rounds=settings.rounds, batch_at=subject.batch_at, progress=progress
        )
        for chosen in [*([swap] for swap in swaps), *at_once]
    ]


def _verdict(settings: KernelSettings, reports: list[KernelReport], beyond: list[str]) -> tuple[Verdict, str]:
    if settings.max_ulps is None and settings.max_error is None:
        return Verdict.PASS, ""
    if beyond:
        return Verdict.REGRESSION, "\n  ".join(["beyond the tolerance", *beyond])
    sites = [site for report in reports for site in report.sites]
    unsteady = [site.place for site in sites if not site.control_equal]
    if unsteady:
        return Verdict.INCONCLUSIVE, f"the original does not repeat its own bits at {unsteady[0]}"
    if all(error.scale == 0 for site in sites for error in site.errors):
        return Verdict.INCONCLUSIVE, "the original gives nothing but zeros, which any function may"
    return Verdict.PASS, "every op is within the tolerance"


_EPILOG = """Every FUNCTION is imported from the current folder or from what is installed, and runs: give only code that you trust. It is
called with the arguments of the op, and returns what the op returns, or writes into the arguments that the op writes. Several swaps are
reported one by one, and then all at once, unless two mean the same op. """

COMMAND = Command(
    "exchange the implementation of an op in a training step: local error, grown error, time beside its control",
    KernelSettings,
    run,
    _EPILOG
    + exit_codes(
        "measured, and within the tolerance where one is given",
        "beyond it",
        "nothing can be said about the tolerance: the original does not repeat its own bits, or gives nothing but zeros",
    ),
)
