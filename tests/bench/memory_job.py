"""Runs of `oneshot` with their memory measured, in a process of their own; `tests.bench.memory` starts it.

`python -m tests.bench.memory_job SETTINGS.json RESULT.json`. The first case is run twice: what libraries load and keep on first use is
then there before the measurement begins.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from compressor import oneshot, plan
from compressor.planning import stages
from compressor.tracing import footprint
from tests.bench.memory_meter import MemoryMeter


class StageMarks:
    """A progress display that shows nothing and tells a meter where stages end."""

    def __init__(self, meter: MemoryMeter) -> None:
        """Remember the meter."""
        self._meter = meter

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[StageMarks]:
        """Begin and end a stretch of its own before and behind the work."""
        del total
        self._meter.mark(f"before {description}")
        yield self
        self._meter.mark("after the last stage")

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        """Take a note for the end of a stage."""
        del amount
        if note:
            self._meter.mark(note.partition(",")[0])


@contextmanager
def copied_up_to(num_bytes: int) -> Iterator[None]:
    """Copy no model beyond that size while it is traced, and plan so."""
    with mock.patch.object(footprint, "COPIED_BYTES", num_bytes), mock.patch.object(stages, "COPIED_BYTES", num_bytes):
        yield


def measure_case(case: Mapping[str, Any], folder: Path, *, warm_up: bool = False) -> dict[str, Any]:
    """Estimate one run, make it, and measure it.

    Args:
        case: `name`; `model`, a folder, or `class` and `config` of a random one; `dtype`; `recipe`; `num_samples`, `seq_len`; `options`
            for `oneshot` and `plan` both; `copied_bytes`, up to which a model is copied while it is traced, if not that of the product.
        folder: for models, data and results; is filled.
        warm_up: run it before on two sequences.

    Returns:
        The estimate, the peak, the peak of each stage, and what the weights take.
    """
    model = Path(case["model"]) if case.get("model") else build_model(case, folder / "model")
    data = random_tokens(case, model)
    common = {"recipe": case["recipe"], "max_seq_length": case["seq_len"], **case.get("options", {})}
    estimate = plan(model, num_calibration_samples=case["num_samples"], **common).estimate
    if warm_up:
        oneshot(model, dataset=data[:2], output_dir=folder / "first", **common)
    gc.collect()
    with MemoryMeter() as meter:
        result = oneshot(
            model,
            dataset=data,
            num_calibration_samples=case["num_samples"],
            output_dir=folder / "out",
            progress=StageMarks(meter),
            **common,
        )
    made = sum(tensor.untyped_storage().nbytes() for tensor in result.model.buffers())
    return {
        "name": case["name"],
        "peak_bytes": meter.peak_bytes,
        "stages": meter.peaks,
        "model_bytes": estimate.model_bytes,
        "compressed_bytes": made,
        "beyond_weights_bytes": meter.peak_bytes - estimate.model_bytes - made,
        "estimate": estimate.to_dict(),
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": result.seconds,
    }


def build_model(case: Mapping[str, Any], folder: Path) -> Path:
    """Save a random model.

    Args:
        case: `class`, a model class of transformers, `config`, arguments of its configuration, and `dtype`.
        folder: where.

    Returns:
        The folder.
    """
    import transformers

    model_class = getattr(transformers, case["class"])
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**case["config"]))
    model.to(getattr(torch, case.get("dtype", "bfloat16"))).save_pretrained(folder)
    return folder


def random_tokens(case: Mapping[str, Any], model: Path) -> torch.Tensor:
    """Draw token ids.

    Args:
        case: `num_samples` and `seq_len`.
        model: folder whose config says how many ids there are.

    Returns:
        int64 [num_samples, seq_len].
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, config["vocab_size"], (case["num_samples"], case["seq_len"]), generator=generator)


def main(settings_file: str, result_file: str) -> None:
    """Measure all cases, one after the other.

    Args:
        settings_file: JSON with `cases`.
        result_file: JSON to write, a list with an entry per case.
    """
    results: list[dict[str, Any]] = []
    for case in json.loads(Path(settings_file).read_text(encoding="utf-8"))["cases"]:
        with tempfile.TemporaryDirectory() as folder, copied_up_to(case.get("copied_bytes", footprint.COPIED_BYTES)):
            results.append(measure_case(case, Path(folder), warm_up=not results))
        gc.collect()
    Path(result_file).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
