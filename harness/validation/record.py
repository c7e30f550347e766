"""Checks of compression.json, the compressor's own account of the run, against what lies here. Optional: other writers have none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.verdict import CheckRecord, Claim, Outcome

BASE = Claim("record.base", "compression.json was written for this base")
DATA = Claim("record.data", "The data of the validation is not the calibration data")
RECORD_FILE = "compression.json"


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of a folder.

    Args:
        folder: a model folder.
    Returns:
        Hashes by path below the folder, sorted.
    """
    hashes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as stream:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return what compression.json holds.

    Args:
        folder: the compressed checkpoint.
    Returns:
        The record; None where there is none or it is no JSON object.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def check_record(folder: Path, base_hashes: Mapping[str, str], data_sha256: str) -> list[CheckRecord]:
    """Run every check of this family.

    Args:
        folder: the compressed checkpoint.
        base_hashes: sha256 of the base's files.
        data_sha256: of the token ids that are validated on.
    Returns:
        One record per check.
    """
    record = read_record(folder)
    if record is None:
        if not (folder / RECORD_FILE).is_file():
            return [claim.skipped(f"there is no {RECORD_FILE}") for claim in (BASE, DATA)]
        return [BASE.record(Outcome.FAIL, f"{RECORD_FILE} is no JSON object"), DATA.skipped(f"{RECORD_FILE} cannot be read")]
    return [_check_base(record.get("base"), base_hashes), _check_data(record.get("data"), data_sha256)]


def _check_base(recorded: Any, base_hashes: Mapping[str, str]) -> CheckRecord:
    if not isinstance(recorded, Mapping) or not recorded:
        return BASE.skipped(f"{RECORD_FILE} names no base")
    findings = [f"{name}: has another sha256 here" if name in base_hashes else f"{name}: is not here"
                for name, sha256 in sorted(recorded.items()) if base_hashes.get(name) != sha256]  # fmt: skip
    return BASE.found(findings, f"{len(recorded)} files have the recorded sha256", noun="file")


def _check_data(recorded: Any, data_sha256: str) -> CheckRecord:
    sha256 = recorded.get("sha256") if isinstance(recorded, Mapping) else None
    if sha256 is None:
        return DATA.skipped(f"{RECORD_FILE} names no calibration data")
    if sha256 == data_sha256:
        return DATA.record(Outcome.FAIL, "these are the very tokens that the model was calibrated on; give held-out data")
    return DATA.record(Outcome.PASS, "another data set than that of the calibration")
