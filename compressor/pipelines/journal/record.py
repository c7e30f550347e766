"""What compression.json says of a run: everything that made the result, and how well it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.data import CalibrationData
from compressor.lifecycle import Report
from compressor.pipelines.journal.fingerprint import Fingerprint, digest, versions


def run_record(
    recipe: str,
    base: Mapping[str, str],
    data: CalibrationData | None,
    report: Report,
    choices: Mapping[str, Any],
    seed: int,
    run: Fingerprint,
) -> dict[str, Any]:
    """Put together what compression.json holds: no time, no path, so that equal runs give equal bytes.

    Args:
        recipe: the recipe as text.
        base: hashes of the files of the base model.
        data: the calibration data; None where none was needed.
        report: what was done.
        choices: of the user; named are the pipeline, and what is not the default.
        seed: of everything random.
        run: what the result depends on.

    Returns:
        JSON types.
    """
    return {
        "base": dict(base),
        "data": None if data is None else {"sha256": data.sha256, "num_samples": data.num_samples, "num_tokens": data.num_tokens},
        "pipeline": choices["pipeline"],
        "recipe": recipe,
        "seed": seed,
        "versions": versions(),
        **({"calibrate_all_experts": True} if choices["calibrate_all_experts"] else {}),
        "fingerprint": digest(run),
        **report.to_dict(),
    }
