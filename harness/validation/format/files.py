"""Checks of the folder: is everything that belongs to the base there, unchanged, and nothing else? Nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor.json_text import from_json
from compressor.model.folder import read_config
from compressor.model.side_files import side_files
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.format.container import Checkpoint
from harness.validation.format.decoder import expected_parts
from harness.validation.format.online import matrix_names
from harness.validation.format.record import read_record
from harness.validation.format.scheme import attention_scheme
from harness.validation.format.transforms import TransformedCheckpoint, config_settings
from harness.validation.loading import LOADER_ERRORS, first_line, with_settings
from harness.validation.subject import Subject

CONFIG = Claim("files.config", "config.json describes the base's model; only quantization_config is new")
GENERATION_CONFIG = Claim("files.generation_config", "generation_config.json equals the base's")
TOKENIZER = Claim("files.tokenizer", "The tokenizer files equal the base's, apart from what says where they were loaded from")
OTHERS = Claim("files.others", "No Python, nothing that it reads and no settings of another format lie beside the model but the base's own")
SHARDS = Claim("files.shards", "The safetensors files are well formed and the index tells the truth")
TENSORS = Claim("files.tensors", "Every base tensor is there, unchanged or as the parts of its quantized form, and no other")
_LARGEST_STEP = 0.5  # of a norm that was trained, in units of its mean size: beyond, it is another norm
# Weights whose owner keeps keys and values in a cache.
_KV_PROJECTIONS = (".k_proj.weight", ".qkv_proj.weight", ".kv_b_proj.weight")

TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "tokenizer.model.v*",  # these and the next, of Mistral's own tokenizer, which vLLM takes first
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
)
"""What belongs to a tokenizer or processor, as patterns below the model folder."""

# transformers runs custom_generate/generate.py, and loads the adapter of an adapter_config.json; vLLM reads the settings of Mistral's own
# format, and those that other quantizers write beside config.json (ModelOpt, GPTQ, AWQ, AutoRound, quanto).
_OTHER_FILES = ("**/*.py", "params.json", "*quant*.json", "adapter_config.json", "*.gguf")
_VOLATILE_KEYS = {"transformers_version", "_name_or_path", "_from_model_config"}
_OF_LOADING = {"is_local", "local_files_only", "name_or_path"}  # transformers adds them when it saves a tokenizer that it has loaded


def check_files(subject: Subject) -> list[CheckRecord]:
    """Run every check of this family.

    Args:
        subject: both folders.
    Returns:
        One record per check.
    """
    base_dir, folder = subject.base.folder, subject.compressed.folder
    return [
        check_config(subject),
        check_generation_config(subject),
        check_tokenizer(base_dir, folder),
        check_others(base_dir, folder),
        check_shards(subject.compressed.stored),
        check_tensors(subject),
    ]


def check_config(subject: Subject) -> CheckRecord:
    """Compare config.json key by key, and by meaning where a newer transformers spells the same thing differently.

    Args:
        subject: both folders.
    Returns:
        The record.
    """
    if subject.config is None:
        return CONFIG.record(Outcome.FAIL, subject.problems[0])
    differing = _differing_keys(_as_recorded(subject, subject.base_config), subject.config)
    if not differing and not config_settings(subject.moved):
        return CONFIG.record(Outcome.PASS, "equal, apart from quantization_config")
    try:
        said = _as_recorded(subject, _normalized(subject.base.folder, config_settings(subject.moved), subject.trust_remote_code))
        read = _normalized(subject.compressed.folder, {}, subject.trust_remote_code)
        differing = _differing_keys(said, read) + _contradictions(subject.config, subject.base_config, said, read)
    except LOADER_ERRORS as error:
        return CONFIG.record(Outcome.FAIL, f"transformers cannot read it: {first_line(error)}", findings=differing)
    return CONFIG.found(differing, "equal in meaning; spelled by another version of transformers", noun="differing key")


def _contradictions(config: Mapping[str, Any], base: Mapping[str, Any], said: Mapping[str, Any], read: Mapping[str, Any]) -> list[str]:
    """Name settings that the base has otherwise, or not at all, and that transformers obeys unseen, or passes over where others do not."""
    known = _leaves(base).keys() | _leaves(read).keys()
    values: dict[str, list[Any]] = {}
    for place, value in _leaves(said).items():
        values.setdefault(place[-1], []).append(value)
    values["torch_dtype"] = values.get("dtype", ["nothing"])  # its name before transformers 5
    odd = {
        place: value
        for place, value in _leaves(config).items()
        if place not in known and value not in values.get(place[-1], [] if _is_obeyed_unseen(place[-1]) else [value])
    }
    return [
        f"{'.'.join(place)}: {value!r} stands where transformers does not write it; the base says {values.get(place[-1], ['nothing'])[0]!r}"
        for place, value in odd.items()
    ]


def _is_obeyed_unseen(name: str) -> bool:
    """Whether transformers takes a setting out of config.json, so that the config that it reads does not show it."""
    from transformers import GenerationConfig

    return name.endswith("_implementation") or name in GenerationConfig().to_dict()


def _leaves(config: Mapping[str, Any], *place: str) -> dict[tuple[str, ...], Any]:
    """All values of a config by the keys that lead to them, but for what `_differing_keys` passes over."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, *place, key) if place or key != "quantization_config" else {}
        elif key not in _VOLATILE_KEYS:
            found[(*place, key)] = value
    return found


def _normalized(folder: Path, settings: Mapping[tuple[str, ...], Any], trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    read = with_settings(stored, settings)
    config: dict[str, Any] = from_json(read.to_json_string(use_diff=False))
    return {key: meaning(value, config.get("dtype")) for key, value in config.items()}


def meaning(value: Any, dtype: Any) -> Any:
    """What a config inside a config says of itself: neither who wrote it, nor the dtype of the whole, which loading fills in."""
    if isinstance(value, list):
        return [meaning(part, dtype) for part in value]
    if not isinstance(value, dict):
        return value
    told = {key: part for key, part in value.items() if key not in _VOLATILE_KEYS and not (key == "dtype" and part in (None, dtype))}
    return {key: meaning(part, dtype) for key, part in told.items()}


def _differing_keys(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    ignored = _VOLATILE_KEYS | {"quantization_config"}
    keys = sorted((base.keys() | other.keys()) - ignored)
    return [f"{key}: {_shown(base, key)} became {_shown(other, key)}" for key in keys if _shown(base, key) != _shown(other, key)]


def _as_recorded(subject: Subject, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The base's config, without the tie of a head that got a weight of its own, as compression.json says."""
    if not (isinstance(subject.base, TransformedCheckpoint) and subject.base.untied):
        return config
    text = config.get("text_config")
    nested = {"text_config": {**text, "tie_word_embeddings": False}} if isinstance(text, Mapping) else {}
    return {**config, "tie_word_embeddings": False, **nested}


def _shown(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], sort_keys=True) if key in config else "(absent)"


def check_generation_config(subject: Subject) -> CheckRecord:
    """Compare generation_config.json; the version of transformers that wrote it may differ, and it may spell out the base's config.json.

    Args:
        subject: both folders.
    Returns:
        The record.
    """
    name = "generation_config.json"
    base, other = subject.base.folder / name, subject.compressed.folder / name
    if not base.is_file() and not other.is_file():
        return GENERATION_CONFIG.skipped("the base has none")
    if not other.is_file():
        return GENERATION_CONFIG.record(Outcome.FAIL, f"{name} is missing")
    if base.is_file() and base.read_bytes() == other.read_bytes():
        return GENERATION_CONFIG.record(Outcome.PASS, "equal byte for byte")
    try:
        found = from_json(other.read_text("utf-8"), once=True)
        known = {place[-1]: value for place, value in _leaves(subject.base_config).items()}
        expected = from_json(base.read_text("utf-8")) if base.is_file() else {key: known[key] for key in found.keys() & known.keys()}
        differing = _differing_keys(expected, found)
    except (ValueError, AttributeError) as error:
        return GENERATION_CONFIG.record(Outcome.FAIL, f"{name} is not a JSON object: {error}")
    return GENERATION_CONFIG.found(differing, "equal, apart from who wrote it", noun="differing key")


def check_tokenizer(base_dir: Path, folder: Path) -> CheckRecord:
    """Compare every tokenizer file of either folder.

    Args:
        base_dir: folder of the base.
        folder: the compressed checkpoint.
    Returns:
        The record.
    """
    expected, found = _files(base_dir, TOKENIZER_FILES), _files(folder, TOKENIZER_FILES)
    if not expected and not found:
        return TOKENIZER.skipped("neither folder holds a tokenizer")
    findings = [f"{name}: is missing" for name in sorted(expected.keys() - found.keys())]
    findings += [f"{name}: the base has no such file" for name in sorted(found.keys() - expected.keys())]
    findings += [text for name in sorted(expected.keys() & found.keys()) if (text := _difference(name, expected[name], found[name]))]
    return TOKENIZER.found(findings, f"{len(expected)} files equal the base's", evidence={"files": sorted(expected)}, noun="file")


def check_others(base_dir: Path, folder: Path) -> CheckRecord:
    """Look for Python, what that may read, and files that make a loader read the folder another way; the base's may be left away.

    Args:
        base_dir: folder of the base.
        folder: the compressed checkpoint.
    Returns:
        The record.
    """
    base, found = _files(base_dir, _OTHER_FILES), _files(folder, _OTHER_FILES)
    if read_config(base_dir).get("auto_map"):  # the code of the model may read anything beside it
        names = [name for name in side_files(base_dir)[0] if (folder / name).is_file()]
        base, found = (files | {name: place / name for name in names} for files, place in ((base, base_dir), (found, folder)))
    texts = [_difference(name, base[name], path) if name in base else f"{name}: the base has no such file" for name, path in found.items()]
    return OTHERS.found([text for text in texts if text], f"{len(found)} files, all the base's" if found else "there are none", noun="file")


def _files(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path for path in sorted(paths)}


def _difference(name: str, base: Path, other: Path) -> str | None:
    old, new = base.read_bytes(), other.read_bytes()
    if old == new or (name.endswith("_config.json") and _says_the_same(old, new)):
        return None
    position = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return f"{name}: {len(old)} bytes became {len(new)}, first difference at byte {position}"


def _says_the_same(old: bytes, new: bytes) -> bool:
    """Whether two configs of a tokenizer or processor differ in nothing but where these were loaded from."""
    try:
        base, other = from_json(old.decode("utf-8")), from_json(new.decode("utf-8"), once=True)
    except ValueError:
        return False
    both = isinstance(base, dict) and isinstance(other, dict)
    return both and not [key for key in base.keys() | other.keys() if key not in _OF_LOADING and _shown(base, key) != _shown(other, key)]


def check_shards(compressed: Checkpoint) -> CheckRecord:
    """Report what the reader found wrong with headers, offsets, index and stray files.

    Args:
        compressed: the checkpoint as read.
    Returns:
        The record.
    """
    stray = [f"{path.name}: is no part of a finished checkpoint" for path in sorted(compressed.folder.glob("*"))
             if path.suffix in (".tmp", ".bin", ".pt", ".part", ".incomplete")]  # fmt: skip
    evidence = {"files": compressed.num_files, "tensors": len(compressed.entries), "bytes": compressed.num_bytes}
    return SHARDS.found(
        [*compressed.problems, *stray],
        f"{len(compressed.entries)} tensors in {compressed.num_files} file{'s' if compressed.num_files != 1 else ''}",
        evidence=evidence,
    )


def check_tensors(subject: Subject) -> CheckRecord:
    """Account for every tensor of both checkpoints.

    Args:
        subject: both folders.
    Returns:
        The record: missing, unexpected and changed tensors by name.
    """
    if not subject.modules and (subject.problems or subject.quantizes_weights):
        return TENSORS.record(Outcome.FAIL, subject.problems[0] if subject.problems else "nothing is quantized", findings=subject.problems)
    plain, parts, open_modules = _expected_names(subject)
    there = subject.compressed.entries.keys()
    loose = {name for name in there if name.rpartition(".")[0] in open_modules}
    tied = {name for name in plain - there if _is_tied_copy(subject, name)}
    twins = {name for name in there - plain - parts - loose if _is_stored_twice(subject, name)}
    missing, unexpected = plain - there - tied | parts - there, there - plain - parts - loose - twins
    changes = {name: text for name in sorted(plain & there) if (text := _change(subject, name))}
    tuned = _tuned(subject)
    moved = {
        name
        for name in changes
        if _same_form(subject, name)
        and (subject.trained or _has_moved_as_said(subject, name, tuned.get(name)) or _is_pruned_as_said(subject, name))
    }
    spoilt = {name for name in moved if _is_finite(subject.base, name) and not _is_finite(subject.compressed, name)}
    changes |= {name: f"{name}: holds numbers that are not finite, and the base's are" for name in spoilt}
    moved -= spoilt
    changed = [text for name, text in changes.items() if name not in moved]
    if subject.trained and not moved and not subject.modules:
        changed.append("no tensor differs from the base: nothing was trained")
    findings = [f"{name}: is missing" for name in sorted(missing)] + [f"{name}: is unexpected" for name in sorted(unexpected)] + changed
    evidence = {
        "base tensors": len(subject.base.entries),
        "unchanged": len(plain & there) - len(changes),
        "trained": len(moved - _pruned_weights(subject)),
        "pruned": len(moved & _pruned_weights(subject)),
        "quantized modules": len(subject.modules),
        "their parts": len(parts & there),
        "tied copies left away": sorted(tied),
        "tied copies added": sorted(twins),
    }
    kept = f"{len(plain & there) - len(moved)} tensors unchanged, " + _of_moved(subject, moved)
    return TENSORS.found(findings, f"{kept}{len(subject.modules)} weights quantized", evidence=evidence)


def _is_finite(checkpoint: Checkpoint, name: str) -> bool:
    return bool(checkpoint.tensor(name).isfinite().all())


def _expected_names(subject: Subject) -> tuple[set[str], set[str], set[str]]:
    """Return names that must be as in the base, names of quantized parts, and modules whose format is not known here."""
    plain = {name for name in subject.base.entries if name.removesuffix(".weight") not in subject.modules}
    parts: set[str] = set()
    for module, group in subject.readable_modules.items():
        assert group.scheme is not None
        shape = subject.base.entries[f"{module}.weight"].shape
        has_g_idx = f"{module}.weight_g_idx" in subject.compressed.entries
        parts |= {f"{module}.{part}" for part in expected_parts(group.scheme, shape, has_g_idx=has_g_idx)}
    return plain, parts | _kv_names(subject) | matrix_names(subject), subject.modules.keys() - subject.readable_modules.keys()


def _kv_names(subject: Subject) -> set[str]:
    """Return the scales (and zero points) that static quantization of keys, values and queries adds to every attention module."""
    config = subject.quantization_config or {}
    queries = attention_scheme(config)
    scheme = config.get("kv_cache_scheme") or queries
    if not isinstance(scheme, Mapping) or scheme.get("dynamic"):
        return set()
    kinds = ("scale",) if scheme.get("symmetric", True) else ("scale", "zero_point")
    owners = {name.rpartition(".")[0].rpartition(".")[0] for name in subject.base.entries if name.endswith(_KV_PROJECTIONS)}
    return {f"{owner}.{part}_{kind}" for owner in owners for part in ("k", "v", *(["q"] if queries else [])) for kind in kinds}


def _is_tied_copy(subject: Subject, name: str) -> bool:
    """Say whether a tensor may be left away, because the config ties it to another one that is there with the same bytes."""
    entry = subject.base.entries[name]
    twins = [other for other, found in subject.base.entries.items() if other != name and found.shape == entry.shape]
    is_tied = bool(subject.base_config.get("tie_word_embeddings"))
    return is_tied and any(
        twin in subject.compressed.entries and np.array_equal(subject.base.raw(name), subject.base.raw(twin)) for twin in twins
    )


def _is_stored_twice(subject: Subject, name: str) -> bool:
    """Say whether a tensor that the base does not store is the copy of one to which the config ties it: loaders read either."""
    compressed, entry = subject.compressed, subject.compressed.entries[name]
    if not subject.base_config.get("tie_word_embeddings") or len(entry.shape) != 2:
        return False
    twins = [other for other in subject.base.entries if other in compressed.entries and compressed.entries[other].shape == entry.shape]
    return any(
        compressed.entries[twin].dtype == entry.dtype and np.array_equal(compressed.raw(name), compressed.raw(twin)) for twin in twins
    )


def _tuned(subject: Subject) -> dict[str, float]:
    """Return the tensors of norms that the record says were trained, and how far they have moved at most."""
    modules = (read_record(subject.compressed.folder) or {}).get("modules")
    found: dict[str, float] = {}
    for name, entry in (modules if isinstance(modules, Mapping) else {}).items():
        details = entry.get("details") if isinstance(entry, Mapping) else None
        step = details.get("tuned") if isinstance(details, Mapping) else None
        if isinstance(step, int | float) and name not in subject.modules:
            found |= {f"{name}.{part}": step for part in ("weight", "bias")}
    return found


def _has_moved_as_said(subject: Subject, name: str, step: float | None) -> bool:
    """Say whether a vector lies within the step that the record names, in units of its mean size, apart from its rounding."""
    if step is None or not 0 < step <= _LARGEST_STEP or len(subject.base.entries[name].shape) != 1:
        return False
    base, found = subject.base.tensor(name), subject.compressed.tensor(name)
    before, after = base.double(), found.double()
    room = 1.01 * step * before.abs().mean().clamp(min=1e-3) + torch.finfo(base.dtype).eps * torch.maximum(before.abs(), after.abs())
    return bool(after.isfinite().all()) and bool(((after - before).abs() <= room).all())


def _is_pruned_as_said(subject: Subject, name: str) -> bool:
    """Say whether a weight is the base's but for zeros, or may be another because the record says that kept ones were changed."""
    module = name.removesuffix(".weight")  # fused experts have a name without it
    if module not in subject.pruned:
        return False
    base, found = subject.base.tensor(name), subject.compressed.tensor(name)
    return subject.pruned[module] or bool(((found == 0) | (found == base)).all())


def _pruned_weights(subject: Subject) -> set[str]:
    return {f"{name}.weight" if f"{name}.weight" in subject.base.entries else name for name in subject.pruned}


def _of_moved(subject: Subject, moved: Collection[str]) -> str:
    pruned = _pruned_weights(subject) & set(moved)
    parts = [(len(pruned), "pruned"), (len(moved) - len(pruned), "trained")]
    return "".join(f"{count} {what}, " for count, what in parts if count or (what == "trained" and subject.trained))


def _is_a_rounding_off(subject: Subject, name: str) -> bool:
    """Say whether no number differs by more than its last place: a sum of many products, taken in another order."""
    base, found = subject.base.tensor(name), subject.compressed.tensor(name)
    before, after = base.double(), found.double()
    room = torch.finfo(base.dtype).eps * torch.maximum(before.abs(), after.abs()) + 1e-12 * before.abs().max()
    return bool(((after - before).abs() <= room).all())


def _same_form(subject: Subject, name: str) -> bool:
    old, new = subject.base.entries[name], subject.compressed.entries[name]
    return old.dtype == new.dtype and old.shape == new.shape


def _is_widened(subject: Subject, name: str) -> bool:
    """Whether the same numbers are there in float32, in which the model's class keeps them whatever the file says."""
    import transformers

    old, new = subject.base.entries[name], subject.compressed.entries[name]
    if new.dtype is not torch.float32 or old.dtype not in (torch.bfloat16, torch.float16) or old.shape != new.shape:
        return False
    classes = [getattr(transformers, str(one), None) for one in subject.base_config.get("architectures") or ()]
    keeping = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = {part for one in classes for attribute in keeping for part in getattr(one, attribute, None) or ()}
    return not kept.isdisjoint(name.split(".")) and torch.equal(subject.base.tensor(name).float(), subject.compressed.tensor(name))


def _change(subject: Subject, name: str) -> str | None:
    old, new = subject.base.entries[name], subject.compressed.entries[name]
    if not _same_form(subject, name):
        if _is_widened(subject, name):
            return None
        return f"{name}: {old.dtype} {list(old.shape)} became {new.dtype} {list(new.shape)}"
    if isinstance(subject.base, TransformedCheckpoint) and name in subject.base.turned and _is_a_rounding_off(subject, name):
        return None
    differing = np.flatnonzero(subject.base.raw(name) != subject.compressed.raw(name))
    return f"{name}: {len(differing)} bytes differ, first at {differing[0]}" if len(differing) else None
