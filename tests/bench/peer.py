"""Ours against llmcompressor on the same model folder, recipe and samples: time, memory, and the loss of what comes out.

Both libraries run on this machine in turns, each run in a fresh process under its own interpreter, so that a busy moment hits both.
Reported are medians, their spread and the ratio peer/ours; the quality of the two last checkpoints is compared sequence by sequence. The
whole run (load, calibrate, compress, save) is the fair figure: the libraries cut it into phases at different places (the peer packs while
it saves).

Run `python -m tests.bench.peer --peer-python PATH --model M --recipe R --calibration C --heldout H --output-dir O`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import compressor
from compressor.errors import CompressorError, OutputError, UserInputError
from harness.errors import HarnessError
from tests.bench.losses import compare_losses

DRIVER = Path(__file__).with_name("drive.py")
LIBRARIES = ("ours", "peer")
LOG_TAIL_LINES = 5
LOSS_PAIRS = (("ours", "peer"), ("ours", "base"), ("peer", "base"))


@dataclass(frozen=True)
class BenchPlan:
    """What is run, on what, and how often."""

    model: Path
    recipe: Path
    calibration: Path
    heldout: Path
    peer_python: Path
    num_samples: int = 128
    seq_len: int = 256
    rounds: int = 5
    num_threads: int = os.cpu_count() or 1
    device: str = "cpu"
    mode: str | None = None

    def check(self) -> None:
        """Refuse what cannot work before the first run.

        Raises:
            UserInputError: a file or folder that is named is not there, or there is nothing to repeat.
        """
        for name in ("model", "recipe", "calibration", "heldout", "peer_python"):
            if not getattr(self, name).exists():
                raise UserInputError(f"bench: {name} {getattr(self, name)} does not exist; give an existing path")
        if self.rounds < 1:
            raise UserInputError(f"bench: rounds={self.rounds} measures nothing; give at least 1")


@dataclass(frozen=True)
class Quantity:
    """One measured quantity of both libraries, over all rounds."""

    name: str
    unit: str
    ours: tuple[float, ...]
    peer: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the peer over median of ours: above 1 is in our favour; NaN when ours is zero."""
        return statistics.median(self.peer) / (statistics.median(self.ours) or math.nan)

    def to_dict(self) -> dict[str, Any]:
        """Return medians, values and ratio, ready for JSON."""
        medians = {"ours": statistics.median(self.ours), "peer": statistics.median(self.peer)}
        return {**asdict(self), "median": medians, "peer_over_ours": None if math.isnan(self.ratio) else self.ratio}


def run_benchmark(plan: BenchPlan, work_dir: Path, console: Console) -> dict[str, Any]:
    """Run every round and score the base and the two last checkpoints.

    Args:
        plan: what to run.
        work_dir: for checkpoints and logs; an existing folder.
        console: tells which run is under way.
    Returns:
        The whole result, ready for JSON.
    Raises:
        UserInputError: the plan names what is not there.
        HarnessError: a run failed.
    """
    plan.check()
    runs: dict[str, list[dict[str, Any]]] = {library: [] for library in LIBRARIES}
    for index in range(plan.rounds):
        # Who goes first changes every round: the second run may find warmer caches, or a hotter processor.
        for library in LIBRARIES if index % 2 == 0 else reversed(LIBRARIES):
            console.print(f"round {index + 1}/{plan.rounds}: {library}")
            runs[library].append(_compress(plan, library, work_dir))
    models = {"base": plan.model, **{library: work_dir / library for library in LIBRARIES}}
    losses = {name: _score(plan, name, model, work_dir) for name, model in models.items()}
    return {
        "plan": {key: value.name if isinstance(value, Path) else value for key, value in asdict(plan).items()},
        "versions": {library: runs[library][0]["versions"] for library in LIBRARIES},
        "quantities": [quantity.to_dict() for quantity in quantities(runs)],
        "runs": runs,
        "loss": compare_losses(losses, LOSS_PAIRS),
    }


def quantities(runs: dict[str, list[dict[str, Any]]]) -> list[Quantity]:
    """Gather what was measured in each run.

    Args:
        runs: the drivers' results, by library.
    Returns:
        Whole time first, then its phases, then memory.
    """

    def gather(name: str, unit: str, *keys: str, scale: float = 1.0) -> Quantity:
        values = {library: tuple(scale * _lookup(run, keys) for run in runs[library]) for library in LIBRARIES}
        return Quantity(name, unit, values["ours"], values["peer"])

    return [
        gather("whole run", "s", "seconds", "total"),
        gather("process with imports", "s", "seconds", "process"),
        gather("calibrate + compress", "s", "seconds", "compress"),
        gather("load", "s", "seconds", "load"),
        gather("data", "s", "seconds", "data"),
        gather("save", "s", "seconds", "save"),
        gather("peak memory over start", "MB", "rss_over_start_bytes", scale=1e-6),
        gather("peak memory", "MB", "rss_peak_bytes", scale=1e-6),
    ]


def render(result: dict[str, Any]) -> list[Table]:
    """Show a result.

    Args:
        result: what `run_benchmark` gave.
    Returns:
        One table of time and memory, one of losses.
    """
    plan = result["plan"]
    what = f"{plan['model']}, {plan['recipe']}, {plan['num_samples']} x {plan['seq_len']} tokens"
    mode = plan["mode"] or "of the recipe"
    title = f"{what}, mode {mode}, {plan['rounds']} rounds, {plan['num_threads']} threads, {plan['device']}"
    cost = Table("quantity", "ours", "peer", "peer / ours", title=title, title_justify="left")
    for row in result["quantities"]:
        cells = [f"{row['median'][who]:.2f} {row['unit']} ({min(row[who]):.2f} to {max(row[who]):.2f})" for who in LIBRARIES]
        cost.add_row(row["name"], *cells, "-" if row["peer_over_ours"] is None else f"{row['peer_over_ours']:.2f}x")
    quality = Table(
        "held-out loss",
        "nats per token",
        title=f"{result['loss']['num_sequences']} sequences, intervals of {result['loss']['confidence']:.0%}",
        title_justify="left",
    )
    for name, mean in result["loss"]["mean_nats_per_token"].items():
        quality.add_row(name, f"{mean:.5f}")
    for name, interval in result["loss"]["differences"].items():
        quality.add_row(name.replace("_", " "), f"{interval['estimate']:+.5f} ({interval['low']:+.5f} to {interval['high']:+.5f})")
    return [cost, quality]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, write peer.json and show the tables.

    Args:
        argv: the command line, that of the process if None.
    Returns:
        0, or 3 after a one-line error.
    """
    args = _parser().parse_args(argv)
    plan = BenchPlan(**{name: getattr(args, name) for name in BenchPlan.__dataclass_fields__})
    console = Console(stderr=True)
    try:
        if (args.output_dir / "peer.json").exists():
            raise OutputError(f"bench: {args.output_dir / 'peer.json'} exists; choose another folder")
        with tempfile.TemporaryDirectory() as work_dir:
            result = run_benchmark(plan, Path(work_dir), console)
    except CompressorError as error:
        console.print(f"tests.bench.peer: {error}", markup=False, soft_wrap=True)
        return 3
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "peer.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for table in render(result):
        Console().print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the model that both compress")
    parser.add_argument("--recipe", type=Path, required=True, help="YAML recipe that both read")
    parser.add_argument("--calibration", type=Path, required=True, help=".safetensors file with input_ids [N, T]")
    parser.add_argument("--heldout", type=Path, required=True, help=".safetensors file with input_ids [N, T], for the loss")
    parser.add_argument("--peer-python", type=Path, required=True, help="interpreter of an environment with llmcompressor")
    parser.add_argument("--output-dir", type=Path, required=True, help="where peer.json goes")
    parser.add_argument("--num-samples", type=int, default=BenchPlan.num_samples)
    parser.add_argument("--seq-len", type=int, default=BenchPlan.seq_len)
    parser.add_argument("--rounds", type=int, default=BenchPlan.rounds)
    parser.add_argument("--num-threads", type=int, default=BenchPlan.num_threads)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=BenchPlan.device)
    parser.add_argument("--mode", choices=("fast", "default", "best"), help="of ours; the recipe's own where it is left out")
    return parser


def _compress(plan: BenchPlan, library: str, work_dir: Path) -> dict[str, Any]:
    output_dir = work_dir / library
    shutil.rmtree(output_dir, ignore_errors=True)
    settings = {
        "model": str(plan.model.resolve()),
        "recipe": str(plan.recipe.resolve()),
        "calibration": str(plan.calibration.resolve()),
        "output_dir": str(output_dir),
        "num_samples": plan.num_samples,
        "seq_len": plan.seq_len,
        "device": plan.device,
        "options": {"mode": plan.mode},
    }
    result, process_seconds = run_job(plan, library, library, settings, work_dir)
    result["seconds"]["process"] = process_seconds
    return result


def _score(plan: BenchPlan, name: str, model: Path, work_dir: Path) -> list[float]:
    settings = {"model": str(model.resolve()), "heldout": str(plan.heldout.resolve()), "device": plan.device}
    result, _ = run_job(plan, "score", f"score-{name}", settings, work_dir)
    return list(result["losses"])


def run_job(plan: BenchPlan, job: str, name: str, settings: dict[str, Any], work_dir: Path) -> tuple[dict[str, Any], float]:
    """Run the driver in a fresh process, below a shell: a process starts with the peak memory of the one that forked it.

    Args:
        plan: threads, device, interpreter of the peer.
        job: what the driver does.
        name: of the files.
        settings: of the job.
        work_dir: gets the files.

    Returns:
        What the driver measured, and the seconds of the whole process.

    Raises:
        HarnessError: the process failed.
    """
    settings_file, result_file, log_file = (work_dir / f"{name}.{kind}" for kind in ("settings.json", "result.json", "log"))
    settings_file.write_text(json.dumps(settings), encoding="utf-8")
    python = plan.peer_python if job == "peer" else Path(sys.executable)
    with log_file.open("w", encoding="utf-8") as log:
        command = ["sh", "-c", '"$@"; exit $?', "sh", str(python), "-P", str(DRIVER), job, str(settings_file), str(result_file)]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=work_dir, env=_environment(plan, job), stdout=log, stderr=subprocess.STDOUT, check=False)
        seconds = time.perf_counter() - start
    if done.returncode != 0:
        tail = "\n".join(log_file.read_text(encoding="utf-8").splitlines()[-LOG_TAIL_LINES:])
        raise HarnessError(f"bench: {name} exited with {done.returncode}; its last lines:\n{tail}")
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return result, seconds


def _environment(plan: BenchPlan, job: str) -> dict[str, str]:
    """Return this process's environment with equal threads for both, no network, and only what is installed on the peer's path."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": str(plan.num_threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if plan.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if job == "ours":
        environment["PYTHONPATH"] = str(Path(compressor.__file__).parent.parent)
    return environment


def _lookup(run: dict[str, Any], keys: Sequence[str]) -> float:
    value: Any = run
    for key in keys:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    raise SystemExit(main())
