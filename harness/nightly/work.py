"""What a check of ours does in its own process: `python -m harness.nightly.work JOB.json RESULT.json`.

Times are ratios to a fixed piece of work that runs before and after in the same process, so that a slow machine or a busy neighbour slows
both. The piece is products of float32 matrices on the device, as compression itself is.
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.atomic import write_whole
from compressor.errors import CompressorError, UserInputError
from compressor.json_text import from_json, to_json
from harness.nightly.cells import CellOutcome

if TYPE_CHECKING:
    from torch import Tensor, nn

_PIECE = 512  # rows and columns
_PIECE_SECONDS = 0.2
_PROMPT, _DECODED = 128, 16


@dataclass(frozen=True)
class Job:
    """What a process is told.

    Attributes:
        check: compress, validate or speed.
        model: folder or name of the base.
        recipe: recipe file.
        device: where it runs.
        compressed: folder of the checkpoint, written by compress.
        data: fields of `config.Data`.
        repetitions: of times.
    """

    check: str
    model: str
    recipe: str
    device: str
    compressed: str
    data: dict[str, Any]
    repetitions: int


@dataclass
class Result:
    """What it answers.

    Attributes:
        outcome: word of `CellOutcome`.
        summary: in a line.
        metrics: name behind that of the cell to values, way that is better, kind.
    """

    outcome: CellOutcome = CellOutcome.PASS
    summary: str = ""
    metrics: dict[str, tuple[list[float], str, str]] = field(default_factory=dict)

    def add(self, name: str, values: list[float], better: str = "lower", kind: str = "series") -> None:
        """Note a metric."""
        self.metrics[name] = (values, better, kind)


class Pace:
    """The piece of work that times are held against."""

    def __init__(self, device: str) -> None:
        """Warm up.

        Args:
            device: of torch.
        """
        import torch

        generator = torch.Generator().manual_seed(0)
        self._matrix: Tensor = torch.rand(_PIECE, _PIECE, generator=generator, dtype=torch.float32).to(device) / _PIECE
        self._times = 1
        while (seconds := self.seconds()) < _PIECE_SECONDS:
            self._times = max(self._times + 1, int(self._times * _PIECE_SECONDS / seconds))

    def seconds(self) -> float:
        """Do it once.

        Returns:
            Seconds.
        """
        start, product = time.perf_counter(), self._matrix
        for _ in range(self._times):
            product = product @ self._matrix
        float(product.sum())  # waits for a GPU
        return time.perf_counter() - start

    def around(self, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Time work against the piece before and after it.

        Args:
            work: gives seconds by phase.

        Returns:
            Ratio by phase.
        """
        before = self.seconds()
        phases = work()
        piece = (before + self.seconds()) / 2
        return {name: seconds / piece for name, seconds in phases.items()}


def compress(job: Job, result: Result) -> None:
    """Compress once to warm up, then as often as times are wanted; the last checkpoint stays.

    Args:
        job: what to compress.
        result: gets `time`, `time.<phase>`, `bytes`, `memory`.
    """
    from compressor import oneshot

    folder, pace = Path(job.compressed), Pace(job.device)
    folder.parent.mkdir(parents=True, exist_ok=True)

    def once() -> dict[str, float]:
        shutil.rmtree(folder, ignore_errors=True)
        done = oneshot(
            job.model,
            recipe=job.recipe,
            dataset=job.data["calibration"],
            num_calibration_samples=job.data["num_calibration_samples"],
            max_seq_length=job.data["max_seq_length"],
            device=job.device,
            output_dir=folder,
            progress=False,
        )
        return done.seconds

    once()
    ratios = [pace.around(once) for _ in range(job.repetitions)]
    result.add("time", [sum(phases.values()) for phases in ratios])
    for phase in ratios[0]:
        result.add(f"time.{phase}", [phases[phase] for phases in ratios])
    result.add("bytes", [float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))])
    result.add("memory", [_peak_memory(job.device)])
    times = sorted(result.metrics["time"][0])
    result.summary = f"{times[len(times) // 2]:.2f} times the piece of work, {result.metrics['bytes'][0][0]:,.0f} bytes of weights"


def validate(job: Job, result: Result) -> None:
    """Hold the checkpoint against its base.

    Args:
        job: base, checkpoint and held-out data.
        result: gets the verdict, and `kl` and `loss` by sequence.
    """
    import numpy as np

    from harness.validation import validate as held_against

    report = held_against(
        job.model,
        job.compressed,
        job.data["held_out"],
        device=job.device,
        num_samples=job.data["num_held_out"],
        max_seq_length=job.data["max_seq_length"],
    )
    result.outcome = CellOutcome(report.verdict.value)
    failed = [record.name for record in report.records if record.outcome.value == "fail"]
    result.summary = f"failed: {', '.join(failed)}" if failed else f"{len(report.records)} checks"
    if report.scores is not None:
        sequence, tokens = report.scores.sequence, report.scores.tokens
        counts = np.bincount(sequence)
        for name, values in (("kl", tokens.kl), ("loss", tokens.nll_compressed)):
            means = np.bincount(sequence, weights=values) / counts
            result.add(name, np.maximum(means, 0.0).tolist(), kind="paired")


def speed(job: Job, result: Result) -> None:
    """Run base and checkpoint in turns.

    Args:
        job: base and checkpoint.
        result: gets `prefill` and `decode`, seconds of the compressed model over those of the base.
    """
    import torch

    from compressor.model.loading.load import load_model
    from harness.validation.loading import load_for_running

    base: Any = load_model(job.model, device=job.device).model.eval()
    compressed = load_for_running(job.compressed, device=job.device, matmul="native")
    positions = int(getattr(base.config, "max_position_embeddings", _PROMPT + _DECODED))
    if positions <= _DECODED:
        raise UserInputError(
            f"{job.model}: takes {positions} positions, and speed decodes {_DECODED} behind a prompt; leave it out of checks"
        )
    length = min(_PROMPT, positions - _DECODED)
    ids = torch.randint(0, base.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(job.device)
    seconds = [[_seconds(model, ids) for model in (base, compressed)] for _ in range(job.repetitions + 1)][1:]
    for place, name in enumerate(("prefill", "decode")):
        result.add(name, [ours[place] / theirs[place] for theirs, ours in seconds])
    middle = {name: sorted(values)[len(values) // 2] for name, (values, *_) in result.metrics.items()}
    result.summary = ", ".join(f"{name} {value:.2f} of the base's time" for name, value in middle.items())


def _seconds(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Seconds of one pass over the prompt, and of a token behind it."""
    import torch

    from compressor.nn.attention.kv_cache import cache_argument

    key = cache_argument(model)
    with torch.inference_mode():
        start = time.perf_counter()
        out = model(input_ids=ids, use_cache=True)
        float(out.logits[0, -1, 0])  # waits for a GPU
        between = time.perf_counter()
        for _ in range(_DECODED):
            out = model(input_ids=out.logits[:, -1:].argmax(-1), use_cache=True, **{key: out[key]})
        float(out.logits[0, -1, 0])
        return between - start, (time.perf_counter() - between) / _DECODED


def _peak_memory(device: str) -> float:
    """Peak of this process in bytes: of the GPU where it runs on one, else resident."""
    if device.startswith("cuda"):
        import torch

        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


WORK = {"compress": compress, "validate": validate, "speed": speed}


def main(job_file: str, result_file: str) -> None:
    """Do a job and write the result; an error of ours is a result, too.

    Args:
        job_file: JSON of a `Job`.
        result_file: written whole.
    """
    job, result = Job(**from_json(Path(job_file).read_text("utf-8"))), Result()
    try:
        WORK[job.check](job, result)
    except CompressorError as error:
        result = Result(CellOutcome.ERROR, " ".join(str(error).split()))
    write_whole(Path(result_file), to_json({"outcome": result.outcome, "summary": result.summary, "metrics": result.metrics}).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
