"""From the trained weights to the checkpoint: in the dtype of the checkpoint that was loaded, by the writer that oneshot uses."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from compressor.errors import UserInputError
from compressor.lifecycle import Modifier, Report
from compressor.model.checkpoints.online import rotation_notes
from compressor.model.checkpoints.save import save_checkpoint
from compressor.model.class_readers import check_readable, dtype_notes, reading_notes
from compressor.model.folder import weight_files
from compressor.model.loading.load import LoadedModel, check_float16
from compressor.modifiers.schemes.base import SchemeModifier
from compressor.nn import QuantizedLayer
from compressor.nn.fake_quant import FakeQuantizedLayer
from compressor.pipelines.journal.fingerprint import Fingerprint, digest

# What compression.json says of a training: everything that made the result, and how it went. No time, no path, no mode: equal runs give
# equal bytes, however often they were stopped.

_SHOWN_LOSSES = 256


def training_record(
    run: Fingerprint,
    base: Mapping[str, str],
    losses: Sequence[float],
    evaluations: Sequence[Mapping[str, Any]],
    sparsity: Mapping[str, float],
    report: Report,
    attention: str,
) -> dict[str, Any]:
    """Put together what compression.json holds.

    Args:
        run: what the result depends on.
        base: hashes of the files of the base model.
        losses: of every step.
        evaluations: on held-out data.
        sparsity: what `sparsities` gave.
        report: what the modifiers did.
        attention: where the attention mask came from.

    Returns:
        JSON types.
    """
    tokens_per_step = run["data"]["block_length"] * run["settings"]["batch_size"] * run["settings"]["accumulate"]
    training = {
        **run["settings"],
        "steps": run["steps"],
        "tokens": run["steps"] * tokens_per_step,
        "attention_mask": attention,
        "losses": _thinned(losses),
        "evaluations": [dict(entry) for entry in evaluations],
        "sparsity": dict(sparsity),
    }
    return {
        "base": dict(base),
        "data": run["data"],
        "eval_data": run["eval_data"],
        "recipe": run["recipe"],
        "seed": run["seed"],
        "versions": run["versions"],
        "fingerprint": digest(run),
        "training": training,
        **report.to_dict(),
    }


def sparsities(model: nn.Module) -> dict[str, float]:
    """Count the zeros of all matrices.

    Args:
        model: the trained model.

    Returns:
        Share of zeros: of all matrices together under `all`, and of each that has at least one in a hundred, by dotted module name.
    """
    shares, zeros, total = {}, 0, 0
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            weight = module.dequantized_weight()
        elif isinstance(found := module._parameters.get("weight"), nn.Parameter) and found.dim() >= 2:
            weight = found.detach()
        else:
            continue
        count = int((weight == 0).sum())
        zeros, total = zeros + count, total + weight.numel()
        if count * 100 >= weight.numel():
            shares[name] = count / weight.numel()
    return {"all": zeros / max(total, 1), **shares}


def _thinned(losses: Sequence[float]) -> dict[str, Any]:
    """At most 256 values, each the mean of an interval of steps."""
    every = max(1, -(-len(losses) // _SHOWN_LOSSES))
    parts = [losses[at : at + every] for at in range(0, len(losses), every)]
    return {"every": every, "means": [sum(part) / len(part) for part in parts]}


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def saved_dtype(loaded: LoadedModel, asked: str) -> torch.dtype | None:
    """Decide the dtype of the checkpoint.

    Args:
        loaded: the model.
        asked: `auto`, or one of bfloat16, float16, float32.

    Returns:
        The dtype; None leaves a model from memory as it is.

    Raises:
        UserInputError: no such dtype.
    """
    if asked in _DTYPES:
        return _DTYPES[asked]
    if asked != "auto":
        raise UserInputError(f"save_dtype: {asked!r} is not a dtype to save in; use auto, {', '.join(_DTYPES)}")
    sizes = Counter[torch.dtype]() if loaded.source_dir is None else _stored_values(loaded.source_dir)
    return sizes.most_common(1)[0][0] if sizes else None


def saving_notes(loaded: LoadedModel, asked: str) -> list[str]:
    """Say that weights of several dtypes will be of one in the checkpoint, or where it is loaded.

    Args:
        loaded: the model.
        asked: see `saved_dtype`.

    Returns:
        A sentence, or none: also where the user has named the dtype.
    """
    dtype = saved_dtype(loaded, asked)
    if dtype is None:
        return dtype_notes(loaded.model)
    if asked != "auto" or loaded.source_dir is None or all(one.itemsize <= dtype.itemsize for one in loaded.model.parameters()):
        return []
    wider = sorted(str(one).removeprefix("torch.") for one in _stored_values(loaded.source_dir) if one.itemsize > dtype.itemsize)
    kept = str(dtype).removeprefix("torch.")
    why = f"save_dtype: some weights of the base are {', '.join(wider)}, and the checkpoint holds all in {kept}, as most of them are"
    return [f"{why}; save_dtype={wider[0]} rounds none"] if wider else []


def _stored_values(folder: Path) -> Counter[torch.dtype]:
    """How many values the files hold of each dtype of floats."""
    sizes: Counter[torch.dtype] = Counter()
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(key)
                if part.get_dtype() in _STORED:
                    sizes[_STORED[part.get_dtype()]] += torch.Size(part.get_shape()).numel()
    return sizes


def cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Bring the parameters to a dtype; buffers, which models compute in float32 on purpose, stay. Changes the model.

    Layers in quantization-aware training become codes first, which come from the weights as they were trained.

    Args:
        model: the model.
        dtype: None changes nothing.

    Raises:
        ModelError: float16 has no room for a weight.
    """
    if dtype is None:
        return
    later = [module for module in model.modules() if isinstance(module, FakeQuantizedLayer)]
    for layer in later:
        layer.stored_dtype = dtype
    left_out = {id(parameter) for layer in later for parameter in layer.parameters()}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in left_out:
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float16:
        check_float16(model, "save_dtype")


def check_saveable(modifiers: Sequence[Modifier], model: nn.Module, dtype: torch.dtype | None) -> list[str]:
    """Refuse, before the first step, what transformers would not read back from the checkpoint, as oneshot does, and warn as it does.

    Args:
        modifiers: initialized.
        model: not yet changed by them.
        dtype: of the checkpoint; None for that of the weights.

    Returns:
        What it has warned of.

    Raises:
        SchemeError: see `check_readable`.
    """
    parts = [part for part in modifiers if isinstance(part, SchemeModifier)]
    schemes = {name: scheme for part in parts for name, scheme in part.schemes.items()}
    kv = next((part.kv_format for part in parts if part.kv_format is not None), None)
    check_readable(schemes, model, kv, dtype)
    notes = [*reading_notes(model, schemes, kv, queries=any(part.attention_patterns for part in parts)), *rotation_notes(model)]
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=4)
    return notes


def save_trained(loaded: LoadedModel, tokenizer: Any, output_dir: Path | None, record: dict[str, Any], token: str | None) -> Path | None:
    """Write the checkpoint.

    Args:
        loaded: the trained model.
        tokenizer: the one that the user gave; None for that of the folder.
        output_dir: the folder; None writes nothing.
        record: what compression.json is to say.
        token: part of the name of the temporary folder.

    Returns:
        The folder, or None.
    """
    if output_dir is None:
        return None
    schemes = {name: layer.scheme for name, layer in loaded.model.named_modules() if isinstance(layer, QuantizedLayer)}
    return save_checkpoint(
        loaded.model,
        output_dir,
        tokenizer=tokenizer or loaded.tokenizer,
        source_dir=loaded.source_dir if tokenizer is None else None,
        schemes=schemes,
        record=record,
        token=token,
    )
