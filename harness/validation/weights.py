"""Checks of the quantized weights: parameters sane, decoded as loaded, really changed, and close enough to the base.

What was found about each module comes from `inspection`; here it is held against the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.inspection import ModuleInspection
from harness.validation.policy import Policy
from harness.validation.rows import some_columns
from harness.validation.subject import Subject

QPARAMS = Claim("weights.qparams", "Scales are finite and positive, zero points and codes in range, shapes fit the groups, no fp8 NaN")
DECODED = Claim("weights.decoded", "An independent decoder of the file gives bitwise the weights that transformers loads")
CHANGED = Claim("weights.changed", "Every targeted weight really differs from the base")
SQNR = Claim("weights.sqnr", "Every decoded weight is close to the base's weight, and no decoy would be")
SCALES = Claim("weights.scales", "Every scale belongs to its group: no group is stretched or shrunk")
ROWS = Claim("weights.rows", "No row or column is dead, random or another's, no code is shifted, and no run of weights is spoilt")

_GROUP_GAINS, _GROUP_DEVIATION = {"int2": (0.0, 1.75), "other": (0.75, 1.25)}, 8.0
"""A single group is out of place when its gain is outside of this range and off by that many standard deviations. Of 2 bits a group that
holds an outlier keeps little else: on the reference model sound groups have gains of 0.30 to 1.5."""

_ROWS_SHOWN = 8
"""Rows of one module that are named; the others are counted."""


def check_weights(
    subject: Subject, inspections: Sequence[ModuleInspection], policy: Policy, *, is_as_written: bool = False
) -> list[CheckRecord]:
    """Run every check of this family.

    Args:
        subject: both folders.
        inspections: what was found, module by module.
        policy: least SQNR and greatest scale mismatch.
        is_as_written: every tensor has the digest that was noted when it was written.
    Returns:
        One record per check.
    """
    kept = _kv_problems(subject)
    if not subject.modules:
        if kept:
            return [QPARAMS.found(kept, ""), *(claim.skipped("no weight is quantized") for claim in (DECODED, CHANGED, SQNR, SCALES, ROWS))]
        why = "no weight is quantized" + (", see files.tensors" if subject.quantizes_weights else "")
        return [claim.skipped(why) for claim in (QPARAMS, DECODED, CHANGED, SQNR, SCALES, ROWS)]
    unread = [f"{name}: {group.reason}" for name, group in subject.modules.items() if group.scheme is None]
    records = [
        _qparams_record(inspections, kept),
        _decoded_record(inspections),
        _changed_record(inspections),
        *_nearness_records(subject, inspections, policy, is_as_written),
    ]
    return [_with_unread(record, unread) for record in records]


def _nearness_records(subject: Subject, inspections: Sequence[ModuleInspection], policy: Policy, is_as_written: bool) -> list[CheckRecord]:
    if subject.trained:
        why = "the weights were trained, so the base's say nothing of them; behaviour decides"
        return [claim.skipped(why) for claim in (SQNR, SCALES, ROWS)]
    moved = [module for module in inspections if subject.pruned.get(module.name)]
    if len(moved) == len(inspections):
        why = "pruning changed the weights that it kept, so the base's say nothing of them; behaviour and record.tensors decide"
        return [claim.skipped(why) for claim in (SQNR, SCALES, ROWS)]
    near = [module for module in inspections if not subject.pruned.get(module.name)]
    rows = _rows_record(near, policy, is_as_written, has_layer_norms=not is_as_written and _has_layer_norms(subject))
    return [_sqnr_record(near, policy), _scales_record(near, policy), rows]


def _has_layer_norms(subject: Subject) -> bool:
    """Say whether a module of the base has a weight and a bias of one dimension, as norms have that take the mean away."""
    entries = subject.base.entries
    vectors = {name for name, entry in entries.items() if len(entry.shape) == 1}
    return any(f"{name.removesuffix('bias')}weight" in vectors for name in vectors if name.endswith("bias"))


def _with_unread(record: CheckRecord, unread: list[str]) -> CheckRecord:
    """Turn a pass into an inconclusive result where modules are stored in a format that the decoder does not read."""
    if not unread or record.outcome is Outcome.FAIL:
        return record
    claim = Claim(record.name, record.title)
    summary = f"{len(unread)} modules are stored in a format that this decoder does not read"
    return claim.record(Outcome.INCONCLUSIVE, summary, limit=record.limit, evidence=record.evidence, findings=[*unread, *record.findings])


def _kv_problems(subject: Subject) -> list[str]:
    """Say which scales of queries, keys and values cannot be."""
    names = [
        name for name in subject.compressed.entries if name.endswith(("q_scale", "k_scale", "v_scale")) and name not in subject.base.entries
    ]
    scales = {name: subject.compressed.tensor(name).double() for name in names}
    return [
        f"{name}: is not finite and above 0 everywhere"
        for name, scale in scales.items()
        if not bool((scale.isfinite() & (scale > 0)).all())
    ]


def _qparams_record(inspections: Sequence[ModuleInspection], kept: Sequence[str]) -> CheckRecord:
    findings = [*kept] + [f"{module.name}: {problem}" for module in inspections for problem in module.problems]
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


def _sqnr_record(inspections: Sequence[ModuleInspection], policy: Policy) -> CheckRecord:
    decoded = [module for module in inspections if module.closeness is not None]
    if not decoded:
        return SQNR.skipped("no module could be decoded")
    limits = policy.min_sqnr_db.model_dump()
    ranked = sorted(decoded, key=lambda module: (_sortable(module.sqnr_db), module.name))
    bad = [module for module in ranked if _sortable(module.sqnr_db) < limits[module.limit_name]]
    finite = [value for module in decoded if math.isfinite(value := _sortable(module.sqnr_db))]
    fooled = [f"{module.name}: {kind} would pass with {decoy.sqnr_db:.1f} dB"
              for module in decoded for kind, decoy in module.decoys.items()
              if decoy.sqnr_db >= limits[module.limit_name] and decoy.mismatch <= policy.max_scale_mismatch]  # fmt: skip
    evidence = {
        "median dB": float(np.median(finite)) if finite else None,
        "best decoy dB": max((decoy.sqnr_db for module in decoded for decoy in module.decoys.values()), key=_sortable, default=None),
        "worst modules": [f"{module.name} {_decibels(module.sqnr_db)}" for module in ranked[:5]],
    }
    limit = ", ".join(f">= {limits[name]:g} dB for {name}" for name in sorted({module.limit_name for module in decoded}))
    worst = f"worst {_decibels(ranked[0].sqnr_db)}, {ranked[0].name}"
    if bad:
        findings = [f"{module.name}: {_decibels(module.sqnr_db)} is below {limits[module.limit_name]:g} dB" for module in bad]
        return SQNR.record(Outcome.FAIL, f"{len(bad)} modules below the limit; {worst}", limit=limit, evidence=evidence, findings=findings)
    if fooled:
        summary = f"the limit measures nothing: {len(fooled)} decoys pass it too"
        return SQNR.record(Outcome.INCONCLUSIVE, summary, limit=limit, evidence=evidence, findings=fooled)
    return SQNR.record(Outcome.PASS, worst, limit=limit, evidence=evidence)


def _scales_record(inspections: Sequence[ModuleInspection], policy: Policy) -> CheckRecord:
    found = {module.name: module.closeness for module in inspections if module.closeness is not None}
    if not found:
        return SCALES.skipped("no module could be decoded")
    within = {module.name: _GROUP_GAINS.get(module.limit_name, _GROUP_GAINS["other"]) for module in inspections}
    findings = [f"{name}: mismatch {close.mismatch:.1f}, its scales do not belong to their groups"
                for name, close in found.items() if not close.mismatch <= policy.max_scale_mismatch]  # fmt: skip
    for name, close in found.items():
        if not within[name][0] <= close.worst_gain <= within[name][1] and close.worst_deviation > _GROUP_DEVIATION:
            row, group = close.worst_group
            findings.append(f"{name}: row {row}, group {group} is stretched by {close.worst_gain:.2f}")
    worst = max(found, key=lambda name: found[name].mismatch)
    gains = [close.gain for close in found.values()]
    evidence = {
        "gain of whole weights": {"least": min(gains), "greatest": max(gains)},
        "worst mismatch": found[worst].mismatch,
        "there": worst,
    }
    return SCALES.found(
        findings,
        f"worst mismatch {found[worst].mismatch:.2f}, {worst}",
        limit=f"mismatch <= {policy.max_scale_mismatch:g}",
        evidence=evidence,
    )


def _rows_record(inspections: Sequence[ModuleInspection], policy: Policy, is_as_written: bool, *, has_layer_norms: bool) -> CheckRecord:
    found = {module.name: module.rows for module in inspections if module.rows is not None}
    if not found:
        return ROWS.skipped("no module could be decoded")
    findings = []
    for name, rows in found.items():
        lines = (
            rows.dead_or_foreign(policy.max_row_gain_error, policy.max_row_error)
            or rows.columns.foreign(policy.max_row_gain_error)
            or rows.columns.shifted(singly=not is_as_written and not has_layer_norms)
            or rows.columns.biased()
            or rows.spoilt_runs(policy.max_run_noise)
        )
        findings += [f"{name}: {line}" for line in lines[:_ROWS_SHOWN]]
        findings += [f"{name}: {len(lines) - _ROWS_SHOWN} more"] if len(lines) > _ROWS_SHOWN else []
    sees_words = sum(rows.noise_of_zeros > policy.max_run_noise for rows in found.values())
    total = sum(len(rows.gains) for rows in found.values())
    evidence = {
        "rows": total,
        "worst gain error": max(rows.worst_gain_error for rows in found.values()),
        "left to chance": max(rows.least_error for rows in found.values()),
        "noisiest run": max(float(rows.noise.max()) for rows in found.values()),
        "modules in which eight zeroed weights of middling size would show": f"{sees_words} of {len(found)}",
    }
    limit = f"|gain - 1| <= {policy.max_row_gain_error:g} or what chance leaves, noise <= {policy.max_run_noise:g}"
    blind = [f"{name}: rows of {rows.num_columns} columns are too short for this format" for name, rows in found.items() if rows.is_blind]
    if blind and not findings:
        summary = f"in {len(blind)} modules a dead row would pass"
        return ROWS.record(Outcome.INCONCLUSIVE, summary, limit=limit, evidence=evidence, findings=blind)
    zeroed = {name: places for name, rows in found.items() if (places := rows.columns.zeroed(policy.max_row_gain_error))}
    if zeroed and not findings:
        summary = "columns are zero that the base's are not: damage, or inputs that no calibration token reached and that the writer zeroed"
        lines = [f"{name}: zero columns: {some_columns(places)}" for name, places in zeroed.items()]
        return ROWS.record(Outcome.INCONCLUSIVE, summary, limit=limit, evidence=evidence, findings=lines)
    moved = [f"{name}: {line}" for name, rows in found.items() for line in rows.columns.shifted(singly=has_layer_norms)[:_ROWS_SHOWN]]
    if moved and not findings:
        summary = "groups of codes are off by a step: damage, or GPTQ behind a LayerNorm, whose outputs sum to zero and let it"
        return ROWS.record(Outcome.INCONCLUSIVE, summary, limit=limit, evidence=evidence, findings=moved)
    seen = f"{total} rows; eight zeroed weights of middling size would show in {sees_words} of {len(found)} modules, smaller damage may not"
    return ROWS.found(findings, seen, limit=limit, evidence=evidence, noun="place")


def _sortable(decibels: float | None) -> float:
    return -math.inf if decibels is None or math.isnan(decibels) else decibels


def _decibels(decibels: float | None) -> str:
    return "undefined" if decibels is None or math.isnan(decibels) else f"{decibels:.1f} dB"
