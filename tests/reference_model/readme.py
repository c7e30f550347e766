"""Measure whether the reference model is good enough to judge by, and write its README from the records.

Good enough means that quantization shows: 4-bit round-to-nearest predicts held-out text worse than bf16 and GPTQ better than
round-to-nearest, both beyond their intervals. The measurement goes to quality.json, README.md is rendered from the records alone.

Run `python -m tests.reference_model.readme golden/reference`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError
from harness.errors import HarnessError

NAMES = {"base": "bf16", "rtn": "4-bit round-to-nearest", "gptq": "4-bit GPTQ"}
PAIRS = (("rtn", "base"), ("gptq", "rtn"), ("gptq", "base"))
RTN_RECIPE = {
    "quant_stage": {"quant_modifiers": {"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16"}}}
}

INTRODUCTION = """# The reference model

A small Llama (grouped-query attention, SwiGLU, rotary positions, untied head) that has really learned Python, and the fixed tokens to
compress and judge it with.
Written by `python -m tests.reference_model.readme golden/reference` from the records beside it; change those, not this text.
"""


_OLDER_WEIGHTS = """The script makes its steps with `compressor.training` (captured once, proved, replayed). These weights are older:
a plain loop of torch made them, which stands in `tests/reference_model/test_reference_training.py`. 50 steps of the script, eager and
replayed, end with the bits of 50 steps of that loop: losses and all weights, at full size (seen once, with the rates of all 6,000 steps)
and at a small one (in the test)."""


def measure_quality(folder: Path, work_dir: Path) -> dict[str, Any]:
    """Compress the model both ways and compare the losses on the held-out sequences.

    Args:
        folder: the reference model with its arrays and recipe.
        work_dir: for the two checkpoints.
    Returns:
        What `tests.bench.losses.compare_losses` gives.
    """
    from compressor import oneshot
    from tests.bench.drive import score
    from tests.bench.losses import compare_losses

    oneshot(folder, recipe=RTN_RECIPE, output_dir=work_dir / "rtn")
    oneshot(folder, recipe=folder / "recipe.yaml", dataset=folder / "calibration.safetensors", output_dir=work_dir / "gptq")
    models = {"base": folder, "rtn": work_dir / "rtn", "gptq": work_dir / "gptq"}
    heldout = str(folder / "heldout.safetensors")
    losses = {name: score({"model": str(model), "heldout": heldout, "device": "cpu"})["losses"] for name, model in models.items()}
    return compare_losses(losses, PAIRS)


def is_good_enough(quality: Mapping[str, Any]) -> bool:
    """Tell whether both differences lie beyond zero with their whole intervals."""
    differences = quality["differences"]
    return bool(differences["rtn_minus_base"]["low"] > 0 and differences["gptq_minus_rtn"]["high"] < 0)


def render_readme(training: Mapping[str, Any], arrays: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    """Return the text of README.md.

    Args:
        training: training.json, written by `reference_model`.
        arrays: arrays.json, written by `reference_arrays`.
        quality: quality.json, written here.
    Returns:
        Markdown.
    """
    return "\n".join([INTRODUCTION, _how_it_was_made(training), _the_fixed_tokens(arrays), _why_it_can_judge(quality)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write quality.json and README.md.

    Args:
        argv: the command line, that of the process if None.
    Returns:
        0, 1 when the model is not good enough to judge by, 3 after a one-line error.
    """
    parser = argparse.ArgumentParser(prog="reference_readme", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the reference model's folder")
    args = parser.parse_args(argv)
    try:
        training, arrays = (_read_record(args.folder / name) for name in ("training.json", "arrays.json"))
        with tempfile.TemporaryDirectory() as work_dir:
            quality = measure_quality(args.folder, Path(work_dir))
    except CompressorError as error:
        print(f"reference_readme: {error}", file=sys.stderr)
        return 3
    (args.folder / "quality.json").write_text(json.dumps(quality, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (args.folder / "README.md").write_text(render_readme(training, arrays, quality), encoding="utf-8")
    for pair, interval in quality["differences"].items():
        print(f"{pair.replace('_', ' ')}: {_interval(interval)} nats per token")
    return 0 if is_good_enough(quality) else 1


def _read_record(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise HarnessError(f"{path}: is missing; run the script that writes it first (reference_model, then reference_arrays)")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _how_it_was_made(training: Mapping[str, Any]) -> str:
    plan, corpus, held_out = training["plan"], training["corpus"], training["held_out"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(training["versions"].items()))
    return f"""## How it was made

`python -m tests.reference_model.train --output-dir golden/reference --work-dir FOLDER`, on the Python sources of one machine
(standard library and installed packages), read in place and kept nowhere. One file in a hundred is held out, chosen by the hash of its
content. The same files give the same list hash.

{_which_trainer(training)}

| | |
| --- | --- |
| seed | {plan["seed"]} |
| steps | {plan["num_steps"]:,} of {plan["batch_size"]} x {plan["seq_len"]} tokens |
| tokens trained on | {training["tokens_trained"]:,} |
| tokens in the corpus | {training["tokens_in_corpus"]:,} |
| files | {corpus["files"]:,} ({corpus["held_out_files"]:,} held out), {corpus["bytes"]:,} bytes |
| sha256 of the file list | `{corpus["sha256"]}` |
| held-out loss | {held_out["loss_nats_per_token"]:.4f} nats per token |
| held-out bits per byte | {held_out["bits_per_byte"]:.4f} ({held_out["bytes_per_token"]:.3f} bytes per token) |
| time | {training["minutes"]} minutes on {training["machine"]["device"]} |
| versions | {versions} |
"""


def _which_trainer(training: Mapping[str, Any]) -> str:
    """Say which code made the steps: records of before the trainer do not name it."""
    if "trainer" in training:
        return f"The steps were made by {training['trainer']}."
    return _OLDER_WEIGHTS


def _the_fixed_tokens(arrays: Mapping[str, Any]) -> str:
    return f"""## The fixed tokens

Cut from this project's own source text as it was at one moment, {arrays["seq_len"]} tokens a sequence; no file is on both sides.

| array | sequences | files |
| --- | --- | --- |
| `calibration.safetensors` | {arrays["calibration"]["sequences"]} | {len(arrays["calibration"]["files"])} |
| `heldout.safetensors` | {arrays["heldout"]["sequences"]} | {len(arrays["heldout"]["files"])} |

sha256 of the list of files: `{arrays["files_sha256"]}`
"""


def _in_order(losses: Mapping[str, float]) -> list[tuple[str, float]]:
    """The losses in the order of NAMES: a record that was read back is sorted by its keys."""
    return [(name, losses[name]) for name in NAMES]


def _why_it_can_judge(quality: Mapping[str, Any]) -> str:
    losses = "\n".join(f"| {NAMES[name]} | {loss:.4f} |" for name, loss in _in_order(quality["mean_nats_per_token"]))
    differences = "\n".join(
        f"| {NAMES[left]} minus {NAMES[right]} | {_interval(quality['differences'][f'{left}_minus_{right}'])} |" for left, right in PAIRS
    )
    return f"""## Why it can judge

Mean loss on the {quality["num_sequences"]} held-out sequences, quantized with W4A16 (groups of 128, `lm_head` left alone), and the paired
differences with their {quality["confidence"]:.0%} bootstrap intervals:

| model | nats per token |
| --- | --- |
{losses}

| difference | nats per token |
| --- | --- |
{differences}
"""


def _interval(interval: Mapping[str, float]) -> str:
    return f"{interval['estimate']:+.4f} ({interval['low']:+.4f} to {interval['high']:+.4f})"


if __name__ == "__main__":
    raise SystemExit(main())
