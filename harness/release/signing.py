"""The main path of a sign-off: digests, `harness validate`, the checks of a release, other processes, digests again, and the policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from compressor.data import CalibrationData, load_dataset_source, open_source
from compressor.errors import DatasetError, UserInputError
from compressor.model.folder import read_config, resolve_folder
from compressor.model.loading.load import resolve_device
from compressor.progress import Progress, SilentProgress
from compressor.settings.verbs import DataSettings
from harness.release import files, generation, invariance, tokenizer
from harness.release.candidate import Candidate, Check
from harness.release.outside.commands import check_commands, check_environments
from harness.release.outside.served import check_served
from harness.release.outside.tasks import check_tasks
from harness.release.policy import ReleasePolicy, load_release_policy
from harness.release.report import ReleaseReport, judged
from harness.reporting.record import CheckRecord
from harness.validation.behaviour.scoring import token_batches
from harness.validation.compare import ValidationReport, validate
from harness.validation.subject import check_folders

CHECKS: tuple[Check, ...] = (*files.CHECKS, *tokenizer.CHECKS, *generation.CHECKS, *invariance.CHECKS)


def sign_off(
    base: str | Path,
    compressed: str | Path,
    dataset: Any = None,
    *,
    policy: ReleasePolicy | Path | None = None,
    device: str = "auto",
    num_samples: int = 512,
    seed: int = 0,
    today: date | None = None,
    progress: Progress | None = None,
) -> ReleaseReport:
    """Look at everything that must be seen once before a model leaves.

    Args:
        base: folder of the base, or its name on the hub.
        compressed: folder of the checkpoint.
        dataset: held-out data, as for `validate`; None for that of the policy.
        policy: what is required, limits, waivers; or its file. None for the default.
        device: where the models run: auto, cpu, cuda.
        num_samples: sequences at most.
        seed: of the bootstrap and of what is sampled.
        today: the day for waivers; None for today in UTC.
        progress: shows bars.

    Returns:
        The report; a bad checkpoint gives a verdict, not an exception.

    Raises:
        UserInputError: a setting, the policy or the data cannot be used, or no data were given.
        ModelError: a folder is missing, or the base cannot be used.
    """
    policy = policy if isinstance(policy, ReleasePolicy) else load_release_policy(policy)
    source = policy.dataset if dataset is None else dataset
    if source is None:
        raise UserInputError("dataset: none was given, and the policy names none; pass held-out data that the model was not calibrated on")
    started, clock = datetime.now(UTC), time.monotonic()
    progress = progress or SilentProgress()
    base_dir, folder = resolve_folder(base).path, resolve_folder(compressed).path
    check_folders(base_dir, folder)
    before = files.contents(folder)
    report = validate(
        base_dir,
        folder,
        source,
        policy=policy.limits,
        trained=policy.trained,
        serve=policy.server,
        device=device,
        num_samples=num_samples,
        seed=seed,
        progress=progress,
    )
    rows = _rows(source, base_dir, policy)
    candidate = Candidate(base_dir, folder, policy, rows, resolve_device(device), seed)
    records = [*report.records, *_records(candidate, progress)]
    records.append(files.stable_record(before, files.contents(folder)))
    day = today or started.date()
    run = {**report.run, "started": started.isoformat(timespec="seconds"), "day": str(day), "seconds": round(time.monotonic() - clock, 2)}
    return judged(records, policy, day, _provenance(report, files.digests(before), seed), run)


def _provenance(report: ValidationReport, hashes: Mapping[str, str], seed: int) -> dict[str, Any]:
    told = report.provenance
    return {
        "base": told["base"]["sha256"],
        "compressed": hashes,
        "names": {role: Path(told[role]["path"]).resolve().name for role in ("base", "compressed")},
        "data": told["dataset"],
        "seed": seed,
        "versions": told["versions"],
        "metrics": report.quality.to_dict() if report.quality else None,
        "tensor_bytes": {role: told[role]["tensor_bytes"] for role in ("base", "compressed")},
    }


def _records(candidate: Candidate, progress: Progress) -> Iterator[CheckRecord]:
    outside = (check_environments, check_served, check_commands, check_tasks)
    with progress.task("release", len(CHECKS) + len(outside)) as task:
        for check in CHECKS:
            yield check.record(candidate)
            task.advance(1, check.claim.name)
        for run in outside:
            yield from run(candidate)
            task.advance(1, "other processes")


def _rows(source: Any, base: Path, policy: ReleasePolicy) -> list[list[int]]:
    """Token ids for the prompts; `validate` has read the data before, so that what is wrong with them is told by it."""
    asked = policy.generation
    tokenizer_ = tokenizer.read_tokenizer(base)
    opened = open_source(source, DataSettings(), batch_size=None, shuffle_seed=None, tokenizer=tokenizer_)
    least = 2 * asked.prompts + asked.long_context // 16
    positions = read_config(base).get("max_position_embeddings")
    data: CalibrationData = load_dataset_source(
        opened, tokenizer=tokenizer_, num_calibration_samples=least, batch_size=1, max_positions=positions
    )
    rows = [batch.input_ids[0][batch.real[0]].tolist() for batch in token_batches(data)]
    rows = [row for row in rows if len(row) >= asked.prompts + 2]
    if len(rows) < asked.prompts:
        told = f"{len(rows)} sequences have {asked.prompts + 2} tokens or more, and {asked.prompts} prompts are asked for"
        raise DatasetError(f"dataset: {told}; give longer ones")
    return rows
