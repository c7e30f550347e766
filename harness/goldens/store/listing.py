"""What lies in a store: every golden, whether its file is the one of the manifest, whether a test uses it, and where it comes from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compressor.json_text import from_json
from compressor.settings.kinds import Flag
from compressor.spelling import suggest
from harness.errors import GoldenError
from harness.goldens.store.manifest import GoldenEntry, Manifest, TensorEntry, Variant, Words, read_manifest, tensors_data
from harness.goldens.store.paths import MANIFEST, SUFFIX, folder_of
from harness.settings_file import read_as


def manifests_of(root: Path) -> Iterator[Manifest]:
    """Yield the manifest of every folder of a store, by path.

    Args:
        root: of the store.

    Yields:
        Manifests.

    Raises:
        GoldenError: there is no store, or a manifest cannot be read.
    """
    if not root.is_dir():
        raise GoldenError(f"{root}: is no folder of goldens; name it with --golden-dir, or write one with pytest --golden-update=new")
    for path in sorted(root.rglob(MANIFEST)):
        yield read_manifest(path.parent)


def find(root: Path, name: str) -> GoldenEntry:
    """Return the entry of a golden.

    Args:
        root: of the store.
        name: of the golden.

    Returns:
        The entry.

    Raises:
        GoldenError: there is none; the message gives the nearest name.
    """
    entry = read_manifest(root / folder_of(name)).goldens.get(name)
    if entry is None:
        known = [other for manifest in manifests_of(root) for other in manifest.goldens]
        raise GoldenError(f"golden {name!r}: does not exist below {root}; {suggest(name, known, otherwise='see golden list')}")
    return entry


def unused_goldens(root: Path, usage: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the goldens that no test used, and those of which it cannot be known because their test did not run through.

    Args:
        root: of the store.
        usage: the record of a complete run.

    Returns:
        Names, and names.
    """
    used, stopped = set(usage["used"]), tuple(usage["unknown_tests"])
    idle = [entry for manifest in manifests_of(root) for entry in manifest.goldens.values() if entry.name not in used]
    unsure = {
        entry.name for entry in idle if any(entry.test == test or entry.test.startswith((f"{test}::", f"{test}[")) for test in stopped)
    }
    return sorted(entry.name for entry in idle if entry.name not in unsure), sorted(unsure)


def state_of_goldens(root: Path) -> list[dict[str, Any]]:
    """Return every golden of a store, and every file that no manifest lists, with its state.

    Args:
        root: of the store.

    Returns:
        JSON types, by name.
    """
    rows = []
    for manifest in manifests_of(root):
        folder, listed = manifest.path.parent, set()
        for name, entry in sorted(manifest.goldens.items()):
            listed |= {variant.file for variant in entry.variants}
            states = {state_of_file(folder, variant) for variant in entry.variants}
            rows.append(
                {
                    "name": name,
                    "tensors": len(entry.variants[0].tensors),
                    "bytes": sum(_size(folder / variant.file) for variant in entry.variants),
                    "tier": str(entry.tier),
                    "platforms": [str(variant.platform) for variant in entry.variants],
                    "state": "ok" if states == {"ok"} else ", ".join(sorted(states - {"ok"})),
                }
            )
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if path.name not in listed:
                facts = {"name": path.name, "tensors": 0, "bytes": _size(path), "tier": "", "platforms": []}
                rows.append({**facts, "state": "in no manifest"})
    return rows


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def state_of_file(folder: Path, variant: Variant) -> str:
    """Return `ok`, or what is the matter with the file of a variant.

    Args:
        folder: of its manifest.
        variant: of a golden.

    Returns:
        In words.
    """
    try:
        data = (folder / variant.file).read_bytes()
    except OSError:
        return "file missing"
    return "ok" if hashlib.sha256(data).hexdigest() == variant.sha256 and _lists(variant, data) else "file differs from manifest"


# Names of dtypes in manifests, and in headers of safetensors; the bytes of others are kept as one row of uint8. No torch.
_STORED_AS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_STORED_AS |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_STORED_AS |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}


def _lists(variant: Variant, data: bytes) -> bool:
    """Whether a manifest lists the very tensors that a file holds, as whoever reads it checks, too."""
    begin = 8 + int.from_bytes(data[:8], "little")
    try:
        held = {name: one for name, one in from_json(data[8:begin].decode()).items() if name != "__metadata__"}
        ranges = {name: slice(*(begin + at for at in one["data_offsets"])) for name, one in held.items()}
        forms = {name: (one["dtype"], one["shape"]) for name, one in held.items()}
    except (ValueError, LookupError, TypeError, AttributeError):  # a file of another kind, which some manifest describes
        return False
    if forms.keys() != variant.tensors.keys():
        return False
    return all(_is_entry(entry, *forms[name], data[ranges[name]]) for name, entry in variant.tensors.items())


def _is_entry(entry: TensorEntry, dtype: str, shape: Sequence[int], data: bytes) -> bool:
    count = math.prod(entry.shape)
    form = (dtype, shape) == (_STORED_AS.get(entry.dtype), entry.shape)
    as_bytes = entry.dtype not in _STORED_AS and (dtype, shape) == ("U8", [len(data)]) and len(data) % max(count, 1) == 0
    return (form or as_bytes) and hashlib.sha256(data).hexdigest() == entry.sha256


def explain(entry: GoldenEntry) -> tuple[dict[str, Any], list[str]]:
    """Return where a golden comes from, as JSON types and as lines.

    Args:
        entry: of the manifest.

    Returns:
        Both forms.
    """
    variants = [
        {"platform": str(variant.platform), "versions": dict(variant.versions), "tensors": tensors_data(variant.tensors)}
        for variant in entry.variants
    ]
    data = {
        "name": entry.name,
        "test": entry.test,
        "tier": str(entry.tier),
        "elsewhere": str(entry.elsewhere) if entry.elsewhere else None,
        "reason": entry.reason,
        "recipe": entry.recipe,
        "seed": entry.seed,
        "inputs": tensors_data(entry.inputs),
        "variants": variants,
        "history": [dict(step) for step in entry.history],
    }
    lines = [
        entry.name,
        f"  written by  {entry.test}",
        f"  tier        {entry.tier}",
        f"  elsewhere   {entry.elsewhere or 'the same tier'}",
        f"  reason      {entry.reason or 'none given'}",
        f"  recipe      {entry.recipe or 'none'}",
        f"  seed        {'none' if entry.seed is None else entry.seed}",
        *(f"  input       {name}: {tensor}" for name, tensor in entry.inputs.items()),
        *(line for variant in entry.variants for line in _variant_lines(variant)),
        "  history",
        *(f"    {_step(step)}" for step in entry.history),
    ]
    return data, lines


def _variant_lines(variant: Variant) -> list[str]:
    numbers = ", ".join(f"{name} {number}" for name, number in sorted(variant.versions.items()))
    head = f"  accepted on {variant.platform} with {numbers}"
    return [head, *(f"    {name}: {tensor}" for name, tensor in variant.tensors.items())]


def _step(step: Mapping[str, str]) -> str:
    change = f" from {step['from']} to {step['to']}" if "from" in step else ""
    return f"{step['date']}  {step['what']}{change}: {step['reason'] or 'no reason given'}"


# The record that a test run leaves of the goldens it used; the plugin writes it, `harness golden` reads it.


@dataclass(frozen=True)
class _Usage:
    complete: Flag
    gaps: tuple[Words, ...]
    used: tuple[Words, ...]
    unknown_tests: tuple[Words, ...]
    golden_dir: Words = ""


_USAGE = TypeAdapter(_Usage)


def read_usage(path: Path) -> dict[str, Any] | None:
    """Return the record of which goldens were used, or None where there is none that can be read."""
    try:
        record: dict[str, Any] = from_json(path.read_text(encoding="utf-8"))
        read_as(_USAGE, record)
    except (OSError, ValueError):
        return None
    return record
