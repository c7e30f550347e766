"""Tensors that a file holds in a wider dtype than the model that was loaded from it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from compressor.model.folder import some, weight_files

_WIDE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def rounding_notes(model: nn.Module, folder: Path) -> list[str]:
    """Say which tensors have lost bits because the model has one dtype and its files have several.

    transformers loads all tensors in the dtype that config.json names, also norms or routers that the files hold in float32.

    Args:
        model: as it was loaded.
        folder: what it was loaded from.

    Returns:
        A sentence, or none; of tensors that have other names in the model than in the files, nothing is known.
    """
    state = model.state_dict()
    prefix = getattr(model, "base_model_prefix", "")
    lost: dict[str, str] = {}
    for file_name in weight_files(folder):
        with safe_open(folder / file_name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                loaded = state.get(key, state.get(f"{prefix}.{key}"))
                stored = _WIDE.get(file.get_slice(key).get_dtype())
                if loaded is None or stored is None or torch.promote_types(stored, loaded.dtype) == loaded.dtype:
                    continue
                value = file.get_tensor(key)
                if bool(((value.to(loaded.dtype).to(stored) != value) & ~value.isnan()).any()):
                    lost[key] = f"{_name(stored)} in the files and {_name(loaded.dtype)} in the model"
    if not lost:
        return []
    return [
        f"{len(lost)} tensors ({some(lost)}) were rounded when they were loaded: {next(iter(lost.values()))}, whose dtype config.json "
        "names; a wider dtype= keeps them"
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
