"""Looks at every quantized module once from all sides: decode, audit, compare with the base and with what was loaded. Judges nothing.

Each module is decoded and dropped again: memory holds one module at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from compressor.progress import Progress, SilentProgress
from harness.tolerance.bits import to_bytes
from harness.validation.behaviour.metrics import Closeness, compare_weights
from harness.validation.format.decoder import DecodedModule, decode_module, float8_values
from harness.validation.format.scheme import WeightScheme
from harness.validation.loading import modules_as_stored
from harness.validation.rows import RowNoise, row_noise
from harness.validation.subject import Subject


@dataclass
class ModuleInspection:
    """What was found about one quantized module.

    Attributes:
        name: dotted module name.
        label: its scheme in words.
        limit_name: the field of SqnrLimits that holds for it.
        num_weights: elements of the weight.
        problems: what is wrong with its parameters.
        closeness: decoded against base weight; None where it could not be decoded.
        is_unchanged: the decoded weight equals the base's and is not all zero.
        num_different: elements in which the loaded weight differs from the decoded one; None where it was not compared.
        decoys: wrong weights against the base's, by kind.
        clipped_frac: share of codes at the ends of the range.
        rows: its rows against the base's; None where it could not be decoded.
    """

    name: str
    label: str
    limit_name: str
    num_weights: int = 0
    problems: list[str] = field(default_factory=list)
    closeness: Closeness | None = None
    is_unchanged: bool = False
    num_different: int | None = None
    decoys: dict[str, Closeness] = field(default_factory=dict)
    clipped_frac: float = 0.0
    rows: RowNoise | None = None

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the decoded weight; None where it could not be decoded."""
        return self.closeness.sqnr_db if self.closeness else None


def inspect_modules(subject: Subject, loaded: torch.nn.Module | None, *, progress: Progress | None = None) -> list[ModuleInspection]:
    """Decode and inspect every quantized module that the decoder reads.

    Args:
        subject: both folders.
        loaded: the compressed model as transformers loaded it; None where it did not.
        progress: shows a bar.
    Returns:
        One inspection per module, in the order of the base's tensors.
    """
    loaded_modules = modules_as_stored(loaded) if loaded is not None else {}
    neighbours = _neighbours(subject)
    inspections = []
    with (progress or SilentProgress()).task("weights", len(subject.readable_modules)) as task:
        for name, group in subject.readable_modules.items():
            assert group.scheme is not None
            inspections.append(_inspect(subject, name, group.scheme, loaded_modules.get(name), neighbours.get(name)))
            task.advance(1, name)
    return inspections


def _neighbours(subject: Subject) -> dict[str, str]:
    """Give every quantized module another one of the same shape, where there is one."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in subject.readable_modules:
        by_shape.setdefault(subject.base.entries[f"{name}.weight"].shape, []).append(name)
    return {name: names[(i + 1) % len(names)] for names in by_shape.values() if len(names) > 1 for i, name in enumerate(names)}


def _inspect(subject: Subject, name: str, scheme: WeightScheme, loaded: torch.nn.Module | None, neighbour: str | None) -> ModuleInspection:
    found = ModuleInspection(name, scheme.label, f"{scheme.type}{scheme.num_bits}")
    base = subject.base.tensor(f"{name}.weight")
    parts = subject.compressed.parts(name)
    try:
        decoded = decode_module(parts, scheme)
    except ValueError as error:
        found.problems.append(str(error))
        return found
    if decoded.weight.shape != base.shape:
        found.problems.append(f"the weight has the shape {list(decoded.weight.shape)}, the base's {list(base.shape)}")
        return found
    if name in subject.pruned:  # what was pruned is for weights.sparsity; here the others count
        base = base.masked_fill(decoded.weight == 0, 0.0)
    found.num_weights = base.numel()
    found.problems += _qparam_problems(decoded, parts, scheme)
    found.clipped_frac = _clipped_frac(decoded, scheme)
    has_blocks = scheme.has_groups and "weight_g_idx" not in parts
    groups = None if scheme.strategy == "tensor" else scheme.num_groups(base.shape[1]) if has_blocks else 1
    found.closeness = compare_weights(base, decoded.weight, groups)
    found.rows = row_noise(base, decoded, scheme)
    if name in subject.pruned and not scheme.is_packed:  # zeroed bits are zeros, which weights.sparsity counts
        found.rows = replace(found.rows, noise_of_zeros=0.0)
    found.is_unchanged = found.closeness.sqnr_db == math.inf and bool(base.any())
    wrong = _decoys(decoded.weight, subject.base.tensor(f"{neighbour}.weight") if neighbour else None)
    found.decoys = {kind: compare_weights(base, weight, groups) for kind, weight in wrong.items()}
    if loaded is not None:
        found.num_different = _num_different(decoded.weight, loaded, scheme)
    return found


def _qparam_problems(decoded: DecodedModule, parts: Mapping[str, torch.Tensor], scheme: WeightScheme) -> list[str]:
    problems = _scale_problems("weight_scale", decoded.scale)
    low, high = scheme.code_range if scheme.type == "int" else (0, 255)
    if scheme.type == "float":
        num_nan = int(np.isnan(float8_values()[decoded.codes]).sum())
        problems += [f"weight holds {num_nan} fp8 NaN bytes"] if num_nan else []
    elif decoded.codes.min() < low or decoded.codes.max() > high:
        problems.append(f"codes span {decoded.codes.min()}..{decoded.codes.max()}, the format {low}..{high}")
    zero_point = decoded.zero_point
    if zero_point is not None and (zero_point.min() < low or zero_point.max() > high):
        problems.append(f"weight_zero_point spans {zero_point.min()}..{zero_point.max()}, the format {low}..{high}")
    if not decoded.has_clean_padding:
        problems.append("the bits behind the last packed value are not zero")
    if scheme.has_static_input:
        problems += _scale_problems("input_scale", parts["input_scale"].to(torch.float64).numpy())
    for key in ("weight_global_scale", "input_global_scale"):
        problems += _scale_problems(key, parts[key].to(torch.float64).numpy()) if key in parts else []
    return problems


def _scale_problems(name: str, scale: np.ndarray) -> list[str]:
    counts = {
        "NaN": int(np.isnan(scale).sum()),
        "infinite": int(np.isinf(scale).sum()),
        "zero": int((scale == 0).sum()),
        "negative": int((scale < 0).sum()),
    }
    return [f"{count} of {scale.size} values of {name} are {kind}" for kind, count in counts.items() if count]


def _clipped_frac(decoded: DecodedModule, scheme: WeightScheme) -> float:
    if scheme.type == "float":
        return float(np.mean((decoded.codes & 127) == scheme.largest_float))
    low, high = scheme.code_range
    return float(np.mean((decoded.codes == low) | (decoded.codes == high)))


def _decoys(decoded: torch.Tensor, neighbour: torch.Tensor | None) -> dict[str, torch.Tensor]:
    wrong = {"zeros": torch.zeros_like(decoded), "halved": decoded / 2, "shifted by a column": decoded.roll(1, dims=1)}
    if neighbour is not None:
        wrong["neighbour's weight"] = neighbour
    return wrong


def _num_different(decoded: torch.Tensor, loaded: torch.nn.Module, scheme: WeightScheme) -> int | None:
    unpack = getattr(loaded, "dequantized_weight", None)  # a runtime layer of ours, whose `weight` may hold codes
    weight = getattr(loaded, "weight", None) if unpack is None else unpack()
    if not isinstance(weight, torch.Tensor):
        return None
    if scheme.is_unpacked_to_bfloat16:
        decoded = decoded.to(weight.dtype)  # a loader of a float16 or float32 model goes the same way
    if weight.shape != decoded.shape or weight.dtype != decoded.dtype:
        return decoded.numel()
    return int((to_bytes(decoded.cpu()) != to_bytes(weight.cpu())).any(-1).sum())
