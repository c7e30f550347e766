"""Replay against eager, in one run: how much faster, what the guards take of it, and what memory the tape holds.

Equal training steps take turns on one machine: eager, an ordinary loop (gradients set to None, the same optimizer, nothing of a trainer's),
replay with guards at every step and replay without guards, both without audits, which take at most 3 % of a long run; on a GPU also the
model under `torch.compile(mode="reduce-overhead")`. Every ratio is a median over rounds with its interval, and stands beside the goal. All
runs make the same steps, and must end in the same bits.

Run `python -m tests.bench.replay [--rounds N] [--threads N] [--device D] [--clock wall|cpu] [--json]`.
No time makes it fail; different bits do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from compressor.errors import CompressorError, UserInputError
from tests.bench.replay_runs import CaseResult, Goals, measure

REFERENCE = Path("golden/reference")
DEFAULT_ROUNDS = 21
GUARDS_GOAL, MEMORY_GOAL = 0.10, 3.0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_WIDTH = 110
EPILOG = (
    "exit codes: 0 measured, whatever the times are; 1 eager and replay end in different bits; 3 bad input or a failure of the benchmark"
)


@dataclass(frozen=True)
class BenchPlan:
    """What to measure."""

    model: Path
    rounds: int
    device: str
    clock: str = "wall"

    def results(self) -> list[CaseResult]:
        """Measure all cases."""
        import torch

        from compressor.model.loading.load import resolve_device
        from tests.bench import replay_cases as cases

        device = resolve_device(self.device)
        on_gpu = device.type == "cuda"
        if on_gpu and self.clock != "wall":
            raise UserInputError(f"--clock {self.clock}: a GPU works without time of the processor; leave it at wall")
        small = Goals(3.0 if on_gpu else 1.5, GUARDS_GOAL, MEMORY_GOAL)
        chosen = [
            (cases.mlp(), small),
            (cases.small_llama(), small),
            (cases.reference(self.model), Goals(1.0, GUARDS_GOAL, MEMORY_GOAL)),
        ]
        if on_gpu:
            chosen.insert(2, (cases.small_llama(128, 12), small))
        state = torch.get_rng_state()
        found = [measure(case, goals, self.rounds, device, CLOCKS[self.clock]) for case, goals in chosen]
        torch.set_rng_state(state)
        return found


def render(results: Sequence[CaseResult]) -> Table:
    """Show what was measured beside the goals.

    Args:
        results: a case each.

    Returns:
        A table with a row per figure.
    """
    table = Table("model", "figure", "median [interval]", "of", "goal", "met", title="Replay of a training step")
    for result in results:
        for number, row in enumerate(rows := result.figures()):
            table.add_row(result.name if number == 0 else "", *row, end_section=number == len(rows) - 1)
    return table


def machine() -> dict[str, Any]:
    """Say what the figures were taken on."""
    import torch

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def report(results: Sequence[CaseResult], where: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Collect everything as JSON types.

    Args:
        results: a case each.
        where: the machine.
        seconds: that it took.

    Returns:
        The report.
    """
    return {
        "machine": dict(where),
        "seconds": round(seconds, 1),
        "bitwise_equal": all(not result.differences for result in results),
        "cases": [result.to_dict() for result in results],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and show the table.

    Args:
        argv: the command line, that of the process if None.

    Returns:
        0, or 1 when bits differ, or 3 after a one-line error.
    """
    args = _parser().parse_args(argv)
    begin = time.monotonic()
    try:
        where = _prepare(args) | {"clock": args.clock}
        results = BenchPlan(args.model, args.rounds, args.device, args.clock).results()
    except CompressorError as error:
        print(f"tests.bench.replay: error: {error}", file=sys.stderr)
        return 3
    found = report(results, where, time.monotonic() - begin)
    if args.json:
        print(json.dumps(found, indent=1, sort_keys=True))
    else:
        _show(results, where, found["seconds"])
    return 0 if found["bitwise_equal"] else 1


def _prepare(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    for flag, value in (("--rounds", args.rounds), ("--threads", args.threads)):
        if value < 1:
            raise UserInputError(f"{flag} {value}: this is below 1; give at least 1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that tells of memory says on standard error when it starts
    torch.set_num_threads(args.threads)
    return machine()


def _show(results: Sequence[CaseResult], where: Mapping[str, Any], seconds: float) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(render(results))
    rounds = ", ".join(str(result.rounds) for result in results)
    gpu = f", {where['gpu']}" if where["gpu"] else ""
    console.print(f"{rounds} rounds, {seconds:g} s of which {where['clock']} time counts; ?: the goal lies within the interval")
    console.print(
        f"torch {where['torch']}, {where['threads']} thread(s) of {where['cores']} cores, load before {where['load_before']}{gpu}"
    )
    for result in results:
        for line in result.differences[:3]:
            console.print(f"{result.name}: NOT equal: {line}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.bench.replay", description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "--rounds",
        type=int,
        default=DEFAULT_ROUNDS,
        metavar="N",
        help=f"interleaved rounds, five times as many for short steps (default: {DEFAULT_ROUNDS})",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch on the CPU (default: 1)")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu or cuda (default: auto)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="wall, or cpu: time of the processor, for a machine that others load, too (default: wall)",
    )
    parser.add_argument("--model", type=Path, default=REFERENCE, metavar="M", help="folder with the configuration of the reference model")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
