"""Checks of compression.json, the compressor's own account of the run, against what lies here. Optional: other writers have none."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from compressor.data import CalibrationData
from compressor.data.collate import marks_digest, text_marks, token_rows
from compressor.json_text import from_json
from compressor.model.folder import some
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.format.container import DTYPES, Checkpoint

WHOLE = Claim("record.whole", "compression.json is, to the last value, as it was written")
BASE = Claim("record.base", "compression.json was written for this base")
DATA = Claim("record.data", "The data of the validation is not the calibration data")
DIGESTS = Claim("record.tensors", "Every tensor is, bit for bit, the one that compression.json says was written, and there is no other")
CONFIG = Claim("record.config", "quantization_config is, key by key, the one that compression.json says was written")
RECORD_FILE = "compression.json"

_MARKS = re.compile(r"([0-9a-f]{8})*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[A-Z0-9_]+\[[0-9,]*\] [0-9a-f]{64}")
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of a folder.

    Args:
        folder: a model folder.
    Returns:
        Hashes by path below the folder, sorted.
    """
    hashes = {}
    for path in folder_entries(folder):
        if path.is_file():
            with path.open("rb") as stream:
                hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def folder_entries(folder: Path) -> list[Path]:
    """Return all that lies in a folder and is no folder itself: files, and also links to wherever, pipes, sockets and devices.

    Args:
        folder: a model folder.

    Returns:
        Paths, sorted; links are not followed.

    Raises:
        OSError: a folder in it cannot be read, so that nobody knows what it holds.
    """
    found = []
    for place, folders, files in os.walk(folder, onerror=_raise):
        here = Path(place)
        found += [here / name for name in files] + [here / name for name in folders if (here / name).is_symlink()]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


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
        record = from_json(path.read_text(encoding="utf-8"), once=True)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def written_notes(folder: Path) -> list[str]:
    """Return what the run said of the checkpoint beforehand.

    Args:
        folder: the compressed checkpoint.
    Returns:
        Sentences; none where compression.json holds no list of them.
    """
    notes = (read_record(folder) or {}).get("notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []


def check_quantization_config(folder: Path, config: Mapping[str, Any] | None) -> CheckRecord:
    """Hold the quantization_config of config.json against the one that was written; no tensor tells whether inputs were quantized.

    Args:
        folder: the compressed checkpoint.
        config: its config.json, None where it cannot be read.
    Returns:
        The record: keys that differ. A record that names no quantization_config cannot tell.
    """
    record = read_record(folder)
    if record is None:
        return CONFIG.skipped(f"there is no {RECORD_FILE} that can be read; what leaves no tensor (dynamic inputs) is taken on trust")
    if config is None:
        return CONFIG.record(Outcome.INCONCLUSIVE, "config.json cannot be read, so nothing says what was left of it; see what refuses it")
    if "quantization_config" not in record:
        why = f"{RECORD_FILE} names no quantization_config, so nothing says what was written; compress again"
        return CONFIG.record(Outcome.INCONCLUSIVE, why)
    noted, found = _leaves(record["quantization_config"]), _leaves(config.get("quantization_config"))
    keys = sorted(key for key in noted.keys() | found.keys() if noted.get(key) != found.get(key))
    findings = [f"{key or 'quantization_config'}: is {_told(found, key)}, was written as {_told(noted, key)}" for key in keys]
    return CONFIG.found(findings, f"{len(noted)} entries as written", noun="other value")


def _leaves(value: Any, path: str = "") -> dict[str, str]:
    """Flatten JSON: dotted path to value as text."""
    if isinstance(value, Mapping) and value:
        return {key: text for name, inner in value.items() for key, text in _leaves(inner, f"{path}.{name}" if path else name).items()}
    return {path: json.dumps(value)}


def _told(leaves: Mapping[str, str], key: str) -> str:
    """The value of a key, which may have keys of its own here."""
    inner = [name for name in leaves if name.startswith(f"{key}.")]
    return leaves.get(key, f"a table with {inner[0].removeprefix(f'{key}.').partition('.')[0]}" if inner else "absent")


def check_digests(compressed: Checkpoint) -> CheckRecord:
    """Hold every tensor against the digest that was noted when it was written.

    Args:
        compressed: the checkpoint as read.
    Returns:
        The record: missing, unexpected and changed tensors by name. A record without digests cannot tell.
    """
    record = read_record(compressed.folder)
    if record is None:
        return DIGESTS.skipped(f"there is no {RECORD_FILE} that can be read; damage shows where weights.rows sees it")
    noted = record.get("tensors")
    if noted is None:
        why = f"{RECORD_FILE} holds no digests, so nothing says what was written; compress again, or judge by weights.rows"
        return DIGESTS.record(Outcome.INCONCLUSIVE, why)
    if not isinstance(noted, dict) or not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in noted.values()):
        return DIGESTS.record(Outcome.FAIL, f"{RECORD_FILE}: tensors is no table of digests by name")
    there = compressed.entries.keys()
    findings = [f"{name}: is missing" for name in sorted(noted.keys() - there)]
    findings += [f"{name}: was never written" for name in sorted(there - noted.keys())]
    findings += [text for name in sorted(there & noted.keys()) if (text := _difference(compressed, name, noted[name]))]
    return DIGESTS.found(findings, f"{len(noted)} tensors have the digest of the writer", noun="tensor")


def _difference(compressed: Checkpoint, name: str, noted: str) -> str | None:
    entry, (form, _, sha256) = compressed.entries[name], noted.partition(" ")
    found = f"{_DTYPE_NAMES[entry.dtype]}[{','.join(map(str, entry.shape))}]"
    if found != form:
        return f"{name}: is {found}, was written as {form}"
    return None if hashlib.sha256(compressed.raw(name).data).hexdigest() == sha256 else f"{name}: has other bytes than were written"


def check_record(
    folder: Path, base_hashes: Mapping[str, str], weight_files: Collection[str], data: CalibrationData | None
) -> list[CheckRecord]:
    """Run every check of this family.

    Args:
        folder: the compressed checkpoint.
        base_hashes: sha256 of the base's files.
        weight_files: those of them that hold its weights.
        data: that is validated on; None where there is none.
    Returns:
        One record per check.
    """
    record = read_record(folder)
    if record is None:
        if not os.path.lexists(folder / RECORD_FILE):
            return [claim.skipped(f"there is no {RECORD_FILE}") for claim in (WHOLE, BASE, DATA)]
        unread = [claim.skipped(f"{RECORD_FILE} cannot be read") for claim in (BASE, DATA)]
        return [WHOLE.record(Outcome.FAIL, f"{RECORD_FILE} is no JSON object"), *unread]
    return [_check_whole(record), _check_base(record.get("base"), base_hashes, weight_files), _check_data(record, data)]


def _check_whole(record: Mapping[str, Any]) -> CheckRecord:
    rest = {key: value for key, value in record.items() if key != "sha256"}
    if "sha256" not in record:
        return WHOLE.record(Outcome.INCONCLUSIVE, f"{RECORD_FILE} holds no digest of itself, though every run notes it; compress again")
    found = hashlib.sha256((json.dumps(rest, indent=2, sort_keys=True) + "\n").encode()).hexdigest()
    if record["sha256"] != found:
        return WHOLE.record(Outcome.FAIL, f"{RECORD_FILE} was changed after it had been written; restore it, or compress again")
    return WHOLE.record(Outcome.PASS, "every value is as it was written")


def _check_base(recorded: Any, base_hashes: Mapping[str, str], weight_files: Collection[str]) -> CheckRecord:
    if recorded is None:
        return BASE.record(Outcome.INCONCLUSIVE, f"{RECORD_FILE} holds no digests of a base, though every run notes them; compress again")
    if recorded == {}:
        return BASE.skipped(f"{RECORD_FILE} names no file of a base: the model was in memory")
    if not isinstance(recorded, Mapping):
        return BASE.record(Outcome.FAIL, f"{RECORD_FILE}: base is no table of digests by file")
    findings = [f"{name}: has another sha256 here" if name in base_hashes else f"{name}: is not here"
                for name, sha256 in sorted(recorded.items()) if base_hashes.get(name) != sha256]  # fmt: skip
    unnamed = sorted({*weight_files, "config.json"} - recorded.keys())
    if unnamed and not findings:
        why = f"{RECORD_FILE} holds no digest of the base's {some(unnamed)}, though every run notes them; compress again"
        return BASE.record(Outcome.INCONCLUSIVE, why, findings=[f"{name}: has no digest" for name in unnamed])
    return BASE.found(findings, f"{len(recorded)} files have the recorded sha256", noun="file")


def _check_data(record: Mapping[str, Any], data: CalibrationData | None) -> CheckRecord:
    if data is None:
        return DATA.skipped("there is no data that it could be")
    recorded = record.get("data")
    sha256 = recorded.get("sha256") if isinstance(recorded, Mapping) else recorded
    if "data" in record and recorded is None and record.get("pipeline", "data_free") == "data_free":
        return DATA.skipped(f"{RECORD_FILE} names no calibration data")
    if sha256 is None:
        return DATA.record(Outcome.INCONCLUSIVE, f"{RECORD_FILE} holds no digest of the data, though the run had some; compress again")
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        return DATA.record(Outcome.FAIL, f"{RECORD_FILE}: data.sha256 is no digest, so nothing says what the model was calibrated on")
    if sha256 == data.sha256:
        return DATA.record(Outcome.FAIL, "these are the very tokens that the model was calibrated on; give held-out data")
    if not isinstance(recorded, Mapping) or "marks" not in recorded:
        why = f"{RECORD_FILE} says nothing of what this text and that of the calibration share, though every run notes it; compress again"
        return DATA.record(Outcome.INCONCLUSIVE, why)
    return _check_marks(recorded["marks"], data)


def _check_marks(marks: Any, data: CalibrationData) -> CheckRecord:
    share = _shared(marks, data)
    if share is None:
        return DATA.record(
            Outcome.FAIL, f"{RECORD_FILE}: data.marks are not what a run writes, so nothing says how much of this text it has seen"
        )
    if math.isnan(share):
        return DATA.record(Outcome.INCONCLUSIVE, f"{RECORD_FILE}: the data of the calibration held no text, and this is one")
    if share >= _MOST_SHARED:
        return DATA.record(Outcome.FAIL, f"{share:.0%} of this text was in the calibration data, too; give held-out data")
    if "sha256" not in marks:
        why = f"{RECORD_FILE} holds no digest of data.marks, so nothing says whether some were taken out; compress again"
        return DATA.record(Outcome.INCONCLUSIVE, why)
    also = f", which holds {share:.0%} of this text" if share else ""
    return DATA.record(Outcome.PASS, f"another data set than that of the calibration{also}")


_LEAST_MARKS = 1024  # where some were left out: with twice as many kept there would be 4,096 at least, but for chance
_SEEN = 0.8  # of the marks of a sample
_MOST_SHARED = 0.25  # of the text, in which what templates and system prompts repeat counts once


def _shared(recorded: Any, data: CalibrationData) -> float | None:
    """How much of the data those of the calibration hold: of all marks, or of the samples; None where no run made such marks, NaN for none.

    They are sorted, and a digest stands beside them; without it, what they show of the data still holds.

    A mark that comes again counts once, as templates and system prompts do; a sample that comes again counts each time.
    """
    every, text = (recorded.get("every"), recorded.get("hex")) if isinstance(recorded, Mapping) else (None, None)
    if type(every) is not int or every < 1 or every & (every - 1) or not isinstance(text, str) or _MARKS.fullmatch(text) is None:
        return None
    held = [text[place : place + 8] for place in range(0, len(text), 8)]
    known = set(held)
    if recorded.get("sha256", marks_digest(every, text)) != marks_digest(every, text) or held != sorted(known):
        return None
    if every > 1 and len(known) < _LEAST_MARKS:
        return None
    samples = [marks for row in token_rows(data.batches) if (marks := text_marks([row], every).marks)]
    if not samples or not known:
        return 0.0 if not samples else math.nan
    shares = [sum(one in known for one in marks) / len(marks) for marks in ({one for marks in samples for one in marks}, *samples)]
    return max(shares[0], sum(share >= _SEEN for share in shares[1:]) / len(samples))
