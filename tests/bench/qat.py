"""What quantization-aware training is worth on the reference model: held-out loss of W4A16, against rounding to nearest and its controls.

Training text is the calibration text, so every training moves the model towards the held-out text, which is of the same kind. The control
is therefore a float training of as many steps on the same batches, and that model rounded: what quantization-aware training itself gains
is its distance from there. All models are scored from their checkpoints, with transformers alone, on sequences that none has seen.

Run `python -m tests.bench.qat [--steps N] [--learning-rate R] [--json FILE]`: some minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from compressor.errors import CompressorError

REFERENCE = Path("golden/reference")
SCHEME, IGNORE = "W4A16", ["lm_head"]
STEPS, BATCH_SIZE, LEARNING_RATE = 200, 4, 1e-4
FREEZE_FRAC = 0.8  # of the run, after which scales are fixed

# Name in the results -> name in the table.
MODELS: Mapping[str, str] = {
    "base": "as it is",
    "rtn": "rounded to nearest",
    "qat": "quantization-aware training",
    "trained": "float training, as many steps",
    "trained_rtn": "float training, rounded to nearest",
    "trained_gptq": "float training, GPTQ",
}
PAIRS = (
    ("rtn", "base"),
    ("qat", "rtn"),
    ("qat", "trained_rtn"),
    ("trained_rtn", "trained"),
    ("qat", "trained"),
    ("trained_gptq", "qat"),
)


def measure(model: Path, work_dir: Path, *, steps: int, batch_size: int, learning_rate: float, seed: int, show: bool) -> dict[str, Any]:
    """Make every model and score it.

    Args:
        model: folder of the base, with `calibration.safetensors` and `heldout.safetensors` in it.
        work_dir: empty folder for the checkpoints.
        steps: of each training.
        batch_size: sequences in a step.
        learning_rate: the peak.
        seed: of both trainings: they see the same batches.
        show: show progress.

    Returns:
        What `compare_losses` gives, settings, seconds and training losses; JSON types.
    """
    import torch

    from compressor import GPTQModifier, QuantizationModifier, oneshot, train
    from tests.bench.drive import score
    from tests.bench.losses import compare_losses

    calibration = model / "calibration.safetensors"
    settings = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    chosen: dict[str, Any] = {**settings, "dataset": calibration, "warmup_steps": steps // 20, "progress": show, "save_every": 0}
    rounding: dict[str, Any] = {"scheme": SCHEME, "ignore": IGNORE}
    times = {"start": 0.0, "disable_quantization_observer_epoch": float(round(FREEZE_FRAC * steps))}
    folders = {name: model if name == "base" else work_dir / name for name in MODELS}
    begin = time.monotonic()
    oneshot(model, recipe=QuantizationModifier(**rounding), output_dir=folders["rtn"])
    qat = train(model, recipe=QuantizationModifier(**rounding, **times), output_dir=folders["qat"], **chosen)
    trained = train(model, output_dir=folders["trained"], **chosen)
    oneshot(folders["trained"], recipe=QuantizationModifier(**rounding), output_dir=folders["trained_rtn"])
    oneshot(folders["trained"], recipe=GPTQModifier(**rounding), dataset=calibration, output_dir=folders["trained_gptq"], progress=show)
    made = time.monotonic()
    heldout = {"heldout": str(model / "heldout.safetensors"), "device": "cpu"}
    losses = {name: score({"model": str(folder), **heldout})["losses"] for name, folder in folders.items()}
    return {
        **compare_losses(losses, PAIRS),
        "settings": {**settings, "scheme": SCHEME, "ignore": IGNORE, "threads": torch.get_num_threads()},
        "training_losses": {"qat": [qat.losses[0], qat.losses[-1]], "trained": [trained.losses[0], trained.losses[-1]]},
        "seconds": {"training": made - begin, "scoring": time.monotonic() - made},
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Hold the result against the two claims.

    Args:
        result: of `measure`.

    Returns:
        What does not hold, in sentences; empty when quantization-aware training beats rounding the base, and rounding the control.
    """
    failures = []
    for other in ("rtn", "trained_rtn"):
        interval = result["differences"][f"qat_minus_{other}"]
        if not interval["high"] < 0:
            failures.append(f"{MODELS['qat']} is not better than {MODELS[other]}: {spell(interval)} nats per token")
    return failures


def spell(interval: Mapping[str, float]) -> str:
    """Write an estimate with its interval.

    Args:
        interval: estimate, low and high.

    Returns:
        For instance `-0.0061 (-0.0071 to -0.0050)`.
    """
    return f"{interval['estimate']:+.4f} ({interval['low']:+.4f} to {interval['high']:+.4f})"


def render(result: Mapping[str, Any]) -> list[Table]:
    """Show a result.

    Args:
        result: of `measure`.

    Returns:
        A table of losses and one of paired differences.
    """
    number, confidence = result["num_sequences"], result["confidence"]
    losses = Table("model", "nats per token", title=f"Mean loss on {number} held-out sequences, {SCHEME}")
    for name, text in MODELS.items():
        losses.add_row(text, f"{result['mean_nats_per_token'][name]:.4f}")
    differences = Table("difference", "nats per token", title=f"Paired differences, {confidence:.0%} bootstrap intervals")
    for left, right in PAIRS:
        differences.add_row(f"{MODELS[left]} minus {MODELS[right]}", spell(result["differences"][f"{left}_minus_{right}"]))
    return [losses, differences]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show the tables.

    Args:
        argv: the command line, that of the process if None.

    Returns:
        0 when quantization-aware training beats rounding with and without the control, 1 when it does not, 3 after a one-line error.
    """
    args = _parser().parse_args(argv)
    console = Console()
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(
                args.model,
                Path(folder),
                steps=args.steps,
                batch_size=args.batch_size,
                learning_rate=args.learning_rate,
                seed=args.seed,
                show=sys.stderr.isatty(),
            )
    except CompressorError as error:
        print(f"tests.bench.qat: error: {error}", file=sys.stderr)
        return 3
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    failures = verdict(result)
    console.print(*render(result))
    console.print("\n".join(failures) or "quantization-aware training beats rounding to nearest, and is not merely more training")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.bench.qat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=REFERENCE, metavar="M", help="folder of the model with its fixed tokens")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of each training; by default {STEPS}")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, metavar="N", help=f"sequences in a step; by default {BATCH_SIZE}")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, metavar="R", help=f"the peak; by default {LEARNING_RATE:g}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of both trainings; by default 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as JSON, too")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
