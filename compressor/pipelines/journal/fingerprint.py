"""What the result of a run depends on, and in which words two runs differ."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import compressor
from compressor.algorithms.babai import rounding_kernel
from compressor.data import CalibrationData
from compressor.data.collate import hash_batches
from compressor.data.layouts import dense_parts, shape_of
from compressor.lifecycle import Report
from compressor.model.folder import folder_of_code, weight_files
from compressor.model.loading.load import LoadedModel
from compressor.model.side_files import side_files
from compressor.numerics.precision import matmul_precision, slow_dtypes
from compressor.pages import HASHERS, raw_bytes
from compressor.pipelines.settings import SequentialSettings

Fingerprint = dict[str, Any]

# What a user may choose otherwise in a resumed run: where activations wait, and how much of the plan is proven.
_CHANGE_NOTHING = {"activation_memory", "activation_device_memory", "offload_dir", "verify"}
_SHOWN_CHANGES = 6
_SHOWN_CHARS, _LEFT_ALIKE = 60, 20
# Files of a model's folder that end up in the result, or decide about it, beside its weights.
_TEXT_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".py", ".tiktoken", ".bpe"}


def versions() -> dict[str, str]:
    """Return the versions of what takes part in a run, as they stand in compression.json."""
    return {
        "compressor": compressor.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def file_hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Hash files.

    Args:
        folder: that holds them.
        names: of the files.

    Returns:
        Name to sha256.
    """

    def digest_of(name: str) -> str:
        with (folder / name).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor(HASHERS) as pool:
        return dict(zip(names, pool.map(digest_of, names), strict=True))


def base_hashes(folder: Path | None) -> dict[str, str]:
    """Hash what a model is loaded from.

    Args:
        folder: of the model; None for a model from memory.

    Returns:
        sha256 of the config and the weight files; empty for a model from memory.
    """
    return {} if folder is None else file_hashes(folder, (*weight_files(folder), "config.json"))


def model_identity(loaded: LoadedModel, base: Mapping[str, str], tokenizer: Any) -> dict[str, Any]:
    """Identify a model before anything is done to it.

    Args:
        loaded: the model as loaded.
        base: its `base_hashes`.
        tokenizer: the one that the user gave; None for that of the folder.

    Returns:
        Hashes by file; of a model from memory by its class, its config and all its tensors.
    """
    identity: dict[str, Any] = {"class": f"{type(loaded.model).__module__}.{type(loaded.model).__qualname__}"}
    if loaded.source_dir is None:
        identity |= {"config": _config_hash(loaded.model), "tensors": _tensor_hash(loaded.model)}
    else:
        folder = loaded.source_dir
        found = [path for path in folder.iterdir() if path.suffix in _TEXT_SUFFIXES and path.name not in base] + [*folder.glob("*/*.jinja")]
        texts = {path.relative_to(folder).as_posix() for path in found if path.is_file()}
        code = folder_of_code(folder, loaded.model, loaded.tokenizer)
        beside = [] if code is None else side_files(code)[0]
        identity["files"] = {**base, **file_hashes(folder, sorted({*texts, *beside}))}
    return identity if tokenizer is None else {**identity, "tokenizer": _tokenizer_hash(tokenizer)}


def data_identity(data: CalibrationData | None) -> dict[str, Any] | None:
    """Identify calibration data.

    Args:
        data: the batches; None where none are needed.

    Returns:
        Hashes of the tokens and of the batches that they form, and counts; None without data.
    """
    if data is None:
        return None
    counts = {"num_samples": data.num_samples, "num_tokens": data.num_tokens, "num_batches": len(data.batches)}
    return {**counts, "tokens": data.sha256, "batches": hash_batches(data.batches)}


def run_fingerprint(
    model: Mapping[str, Any],
    recipe: str,
    data: CalibrationData | None,
    seed: int,
    choices: Mapping[str, Any],
    settings: SequentialSettings,
    device: torch.device,
    weights_wait: bool = False,
) -> Fingerprint:
    """Put together what the result of a run depends on.

    Args:
        model: what `model_identity` gave.
        recipe: the recipe as text.
        data: the batches; None where none are needed.
        seed: of everything random.
        choices: what else the user chose that changes the result; JSON types.
        settings: of the sequential pipeline.
        device: where the run takes place.
        weights_wait: in main memory, where what is done to them before their turn is done.

    Returns:
        JSON types.
    """
    sequential = {name: value for name, value in asdict(settings).items() if name not in _CHANGE_NOTHING}
    packages = {name: importlib.metadata.version(name) for name in ("compressed-tensors", "safetensors", "tokenizers")}
    content = {
        "model": model,
        "recipe": recipe,
        "data": data_identity(data),
        "seed": seed,
        "settings": {**choices, **sequential},
        "versions": {**versions(), **packages},
        # A run that went on elsewhere would mix two orders of summation; a finished result does not tell it, see `digest`.
        "machine": machine(device) | ({"sequential_offload_device": "cpu"} if weights_wait else {}),
    }
    return dict(json.loads(json.dumps(content)))  # as it will be read back


def digest(of: Mapping[str, Any]) -> str:
    """Shorten a fingerprint to one hash; the machine does not count, for what a finished checkpoint holds does not tell it.

    Args:
        of: the fingerprint.

    Returns:
        The sha256 in hexadecimal.
    """
    content = {key: value for key, value in of.items() if key != "machine"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what differs.

    Args:
        before: an earlier fingerprint.
        now: another one.

    Returns:
        One line for each difference, such as "seed was 0 and is 1"; empty when they are equal.
    """
    old, new = dict(_flatten(before)), dict(_flatten(now))
    different = [key for key in {**old, **new} if old.get(key) != new.get(key) and not _follows_from_text(key)]
    lines = [_change(key, old.get(key), new.get(key)) for key in different]
    more = len(lines) - _SHOWN_CHANGES
    return lines if more <= 0 else [*lines[:_SHOWN_CHANGES], f"{more} more things changed"]


def _follows_from_text(key: str) -> bool:
    """Whether it is the marks of a text: digits that nobody can read, and the text's own digest differs with them."""
    return "data.marks." in key


def _change(key: str, old: Any, new: Any) -> str:
    was, now = "was", "is"
    if isinstance(old, str) and isinstance(new, str):
        if "\n" in old + new:
            diff = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[:1] in "+-"]
            old, new = ("; ".join(line[2:].strip() for line in diff if line[0] == sign) for sign in "-+")
            was, now = "said", "says"
        alike = next((place for place, pair in enumerate(zip_longest(old, new)) if pair[0] != pair[1]), 0)
        old, new = (f"...{text[alike - _LEFT_ALIKE :]}" if alike > _SHOWN_CHARS - _LEFT_ALIKE else text for text in (old, new))
    return f"{key} {was} {_short(old)} and {now} {_short(new)}"


def _short(value: Any) -> str:
    if value is None:
        return "not given"
    text = str(value)
    if len(text) == 64 and all(char in "0123456789abcdef" for char in text):
        return text[:12]
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...") if isinstance(value, str) else text


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


# What libraries read of the environment, and take another way for: instructions, and the order of sums.
_DECIDES_SUMS = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)


def machine(device: torch.device) -> dict[str, Any]:
    """Say what decides in which order sums are taken: on another machine the same run need not give the same bits.

    Args:
        device: where the run takes place.

    Returns:
        JSON types.
    """
    kernel = rounding_kernel(device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "kernel": "torch" if kernel is None else kernel.name,
        "half_products": "float32" if device.type == "cpu" and slow_dtypes() else "native",
        "float32_matmul_precision": matmul_precision(device),
        "environment": {name: os.environ[name] for name in _DECIDES_SUMS if name in os.environ},
    }


def _config_hash(model: nn.Module) -> str:
    config: Any = getattr(model, "config", None)
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else repr(config)
    generation = getattr(model, "generation_config", None)
    parts = [text, str(getattr(config, "_attn_implementation", None)), "" if generation is None else generation.to_json_string()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _tensor_hash(model: nn.Module) -> str:
    result = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        result.update(f"{name} {tensor.dtype} {shape_of(tensor)}\n".encode())
        for part in dense_parts(tensor):
            result.update(raw_bytes(part.cpu()).numpy().data)
    return result.hexdigest()


def _tokenizer_hash(tokenizer: Any) -> str:
    """Hash what would be saved of it."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        hashes = file_hashes(Path(folder), [path.relative_to(folder).as_posix() for path in paths])
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


# What compression.json says of a run: everything that made the result, and how well it fits.


def _data_record(data: CalibrationData) -> dict[str, Any]:
    counts = {"sha256": data.sha256, "num_samples": data.num_samples, "num_tokens": data.num_tokens}
    return {**counts, "marks": data.marks.record}


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
        "data": None if data is None else _data_record(data),
        "pipeline": choices["pipeline"],
        "recipe": recipe,
        "seed": seed,
        "versions": versions(),
        **({"calibrate_all_experts": True} if choices["calibrate_all_experts"] else {}),
        "kernel": run["machine"]["kernel"],
        "fingerprint": digest(run),
        **report.to_dict(),
    }
