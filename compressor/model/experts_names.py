"""What the files of an architecture call the projections of its experts, read off the table by which transformers converts files."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

_MERGES = (["MergeModulelist", "Concatenate"], ["MergeModulelist"])


class DiskNames(NamedTuple):
    """What the files of an architecture call the projections of one expert.

    Attributes:
        gate: name of the gate projection.
        up: name of the up projection.
        down: name of the down projection.
        is_converted: transformers merges per-expert tensors of these names while it loads.
    """

    gate: str
    up: str
    down: str
    is_converted: bool


VLLM_NAMES = DiskNames("gate_proj", "up_proj", "down_proj", False)


def disk_names(converters: list[Any], name: str) -> DiskNames:
    """Find what the files of a model call the projections of its experts.

    Args:
        converters: those of the model.
        name: dotted name of the module with the experts.

    Returns:
        The names, those of vLLM where files keep experts fused.
    """
    found = {fused: _merged_names(converters, f"{name}.{fused}") for fused in ("gate_up_proj", "up_proj", "down_proj")}
    gate_up, up, down = found["gate_up_proj"], found["up_proj"], found["down_proj"]
    first = gate_up if len(gate_up) == 2 else [VLLM_NAMES.gate, *up] if len(up) == 1 else []
    if len(first) != 2 or len(down) != 1:
        return VLLM_NAMES
    return DiskNames(gate=first[0], up=first[1], down=down[0], is_converted=True)


def weight_converters(model: nn.Module) -> list[Any]:
    """List how transformers converts the tensors of a model's files.

    Args:
        model: any model.

    Returns:
        Its WeightConverter objects; empty for what is no model of transformers.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not isinstance(model, PreTrainedModel):
        return []
    return [entry for entry in get_model_conversion_mapping(model, add_legacy=False) if isinstance(entry, WeightConverter)]


def _merged_names(converters: list[Any], fused_name: str) -> list[str]:
    """Names of the per-expert projections that transformers merges into a fused tensor; empty where it merges none."""
    for converter in converters:
        operations = [type(operation).__name__ for operation in converter.operations]
        if operations in _MERGES and any(re.search(f"{target}$", fused_name) for target in converter.target_patterns):
            return [source.replace("\\", "").removesuffix(".weight").rpartition(".")[2] for source in converter.source_patterns]
    return []
