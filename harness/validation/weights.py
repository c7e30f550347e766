"""Checks of the quantized weights: parameters sane, decoded as loaded, really changed, and close enough to the base.

Each module is decoded once, looked at from every side, and dropped again: memory holds one module at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from compressor.progress import Progress, SilentProgress
from harness.validation.decoder import DecodedModule, WeightScheme, decode_module, float8_values
from harness.validation.metrics import sqnr_db
from harness.validation.policy import SqnrLimits
from harness.validation.subject import Subject
from harness.verdict import CheckRecord, Claim, Outcome

QPARAMS = Claim("weights.qparams", "Scales are finite and positive, zero points and codes in range, shapes fit the groups, no fp8 NaN")
DECODED = Claim("weights.decoded", "An independent decoder of the file gives bitwise the weights that transformers loads")
CHANGED = Claim("weights.changed", "Every targeted weight really differs from the base")
SQNR = Claim("weights.sqnr", "Every decoded weight is close to the base's weight, and no decoy would be")


@dataclass
class ModuleInspection:
    """What was found about one quantized module.

    Attributes:
        name: dotted module name.
        label: its scheme in words.
        limit_name: the field of SqnrLimits that holds for it.
        num_weights: elements of the weight.
        problems: what is wrong with its parameters; sqnr_db and the rest are None where it could not be decoded.
        sqnr_db: decoded against base weight; inf where equal.
        is_unchanged: the decoded weight equals the base's and is not all zero.
        num_different: elements in which the loaded weight differs from the decoded one; None where it was not compared.
        decoys_db: SQNR of wrong weights, by kind.
        clipped_frac: share of codes at the ends of the range.
    """

    name: str
    label: str
    limit_name: str
    num_weights: int = 0
    problems: list[str] = field(default_factory=list)
    sqnr_db: float | None = None
    is_unchanged: bool = False
    num_different: int | None = None
    decoys_db: dict[str, float] = field(default_factory=dict)
    clipped_frac: float = 0.0


def inspect_modules(subject: Subject, loaded: torch.nn.Module | None, *, progress: Progress | None = None) -> list[ModuleInspection]:
    """Decode and inspect every quantized module that the decoder reads.

    Args:
        subject: both folders.
        loaded: the compressed model as transformers loaded it; None where it did not.
        progress: shows a bar.
    Returns:
        One inspection per module, in the order of the base's tensors.
    """
    loaded_modules = dict(loaded.named_modules()) if loaded is not None else {}
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
    found.num_weights = base.numel()
    found.problems += _qparam_problems(decoded, parts, scheme)
    found.clipped_frac = _clipped_frac(decoded, scheme)
    found.sqnr_db = sqnr_db(base, decoded.weight)
    found.is_unchanged = math.isinf(found.sqnr_db) and found.sqnr_db > 0 and bool(base.any())
    found.decoys_db = _decoys(base, decoded.weight, subject.base.tensor(f"{neighbour}.weight") if neighbour else None)
    if loaded is not None:
        found.num_different = _num_different(decoded.weight, loaded)
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
        return float(np.mean((decoded.codes & 127) == 126))
    low, high = scheme.code_range
    return float(np.mean((decoded.codes == low) | (decoded.codes == high)))


def _decoys(base: torch.Tensor, decoded: torch.Tensor, neighbour: torch.Tensor | None) -> dict[str, float]:
    wrong = {"zeros": torch.zeros_like(decoded), "halved": decoded / 2, "shifted by a column": decoded.roll(1, dims=1)}
    if neighbour is not None:
        wrong["neighbour's weight"] = neighbour
    return {kind: sqnr_db(base, weight) for kind, weight in wrong.items()}


def _num_different(decoded: torch.Tensor, loaded: torch.nn.Module) -> int | None:
    weight = getattr(loaded, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    if weight.shape != decoded.shape or weight.dtype != decoded.dtype:
        return decoded.numel()
    size = decoded.dtype.itemsize
    left, right = (tensor.detach().cpu().contiguous().view(torch.uint8).reshape(-1, size) for tensor in (decoded, weight))
    return int((left != right).any(-1).sum())


def check_weights(subject: Subject, inspections: Sequence[ModuleInspection], limits: SqnrLimits) -> list[CheckRecord]:
    """Run every check of this family.

    Args:
        subject: both folders.
        inspections: what was found, module by module.
        limits: least SQNR by number format.
    Returns:
        One record per check.
    """
    if not subject.modules:
        return [claim.skipped("no weight is quantized, see files.tensors") for claim in (QPARAMS, DECODED, CHANGED, SQNR)]
    unread = [f"{name}: {group.reason}" for name, group in subject.modules.items() if group.scheme is None]
    records = [
        _qparams_record(inspections),
        _decoded_record(inspections),
        _changed_record(inspections),
        _sqnr_record(inspections, limits),
    ]
    return [_with_unread(record, unread) for record in records]


def _with_unread(record: CheckRecord, unread: list[str]) -> CheckRecord:
    """Turn a pass into an inconclusive result where modules are stored in a format that the decoder does not read."""
    if not unread or record.outcome is Outcome.FAIL:
        return record
    claim = Claim(record.name, record.title)
    summary = f"{len(unread)} modules are stored in a format that this decoder does not read"
    return claim.record(Outcome.INCONCLUSIVE, summary, limit=record.limit, evidence=record.evidence, findings=[*unread, *record.findings])


def _qparams_record(inspections: Sequence[ModuleInspection]) -> CheckRecord:
    findings = [f"{module.name}: {problem}" for module in inspections for problem in module.problems]
    worst = max(inspections, key=lambda module: module.clipped_frac, default=None)
    evidence: dict[str, Any] = {"modules": len(inspections), "weights": sum(module.num_weights for module in inspections)}
    if worst is not None:
        evidence |= {"largest share of clipped codes": worst.clipped_frac, "there": worst.name}
    return QPARAMS.found(findings, f"{len(inspections)} modules audited", evidence=evidence)


def _decoded_record(inspections: Sequence[ModuleInspection]) -> CheckRecord:
    compared = [module for module in inspections if module.num_different is not None]
    findings = [
        f"{module.name}: {module.num_different} of {module.num_weights} weights differ" for module in compared if module.num_different
    ]
    evidence = {"modules compared": len(compared), "weights compared": sum(module.num_weights for module in compared)}
    record = DECODED.found(findings, f"{evidence['weights compared']:,} weights equal bit for bit", evidence=evidence, noun="module")
    left = [f"{module.name}: not compared" for module in inspections if module.num_different is None]
    if left and record.outcome is Outcome.PASS:
        return DECODED.record(Outcome.INCONCLUSIVE, f"{len(left)} modules could not be compared", evidence=evidence, findings=left)
    return record


def _changed_record(inspections: Sequence[ModuleInspection]) -> CheckRecord:
    findings = [f"{module.name}: equals the base's weight" for module in inspections if module.is_unchanged]
    decoded = sum(module.sqnr_db is not None for module in inspections)
    if decoded == 0:
        return CHANGED.skipped("no module could be decoded")
    return CHANGED.found(findings, f"{decoded} weights differ from the base", noun="module")


def _sqnr_record(inspections: Sequence[ModuleInspection], limits: SqnrLimits) -> CheckRecord:
    decoded = [module for module in inspections if module.sqnr_db is not None]
    if not decoded:
        return SQNR.skipped("no module could be decoded")
    limit_of = {module.name: float(getattr(limits, module.limit_name)) for module in decoded}
    ranked = sorted(decoded, key=lambda module: (_sortable(module.sqnr_db), module.name))
    bad = [module for module in ranked if not _sortable(module.sqnr_db) >= limit_of[module.name]]
    finite = [value for module in decoded if math.isfinite(value := _sortable(module.sqnr_db))]
    fooled = [f"{module.name}: {kind} reach {decibels:.1f} dB, above the limit of {limit_of[module.name]:g} dB"
              for module in decoded for kind, decibels in module.decoys_db.items() if decibels >= limit_of[module.name]]  # fmt: skip
    evidence = {
        "median dB": float(np.median(finite)) if finite else None,
        "best decoy dB": max((value for module in decoded for value in module.decoys_db.values() if math.isfinite(value)), default=None),
        "worst modules": [f"{module.name} {_decibels(module.sqnr_db)}" for module in ranked[:5]],
    }
    limit = ", ".join(f">= {getattr(limits, name):g} dB for {name}" for name in sorted({module.limit_name for module in decoded}))
    worst = f"worst {_decibels(ranked[0].sqnr_db)}, {ranked[0].name}"
    if bad:
        findings = [f"{module.name}: {_decibels(module.sqnr_db)} is below {limit_of[module.name]:g} dB" for module in bad]
        return SQNR.record(Outcome.FAIL, f"{len(bad)} modules below the limit; {worst}", limit=limit, evidence=evidence, findings=findings)
    if fooled:
        summary = f"the limit measures nothing: {len(fooled)} decoys pass it too"
        return SQNR.record(Outcome.INCONCLUSIVE, summary, limit=limit, evidence=evidence, findings=fooled)
    return SQNR.record(Outcome.PASS, worst, limit=limit, evidence=evidence)


def _sortable(decibels: float | None) -> float:
    return -math.inf if decibels is None or math.isnan(decibels) else decibels


def _decibels(decibels: float | None) -> str:
    return "undefined" if decibels is None or math.isnan(decibels) else f"{decibels:.1f} dB"
