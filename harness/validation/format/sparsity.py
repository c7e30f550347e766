"""Check of pruned weights: are the zeros that compression.json promises in the file, and in the pattern that it names?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.format.decoder import decode_module
from harness.validation.format.record import RECORD_FILE, read_record
from harness.validation.subject import Subject

SPARSITY = Claim("weights.sparsity", "The zeros that the compressor's record promises are in the file, in their pattern")
_PATTERN = re.compile(r"^(\d+):(\d+)\b")
_WHOLE = re.compile(r"^(channel|filter|block_(\d+),(\d+)), ([\d.]+)% zeros")
_ROUNDING = 1e-6  # of a share that was written as a decimal number


def check_sparsity(subject: Subject) -> CheckRecord:
    """Count the zeros of every module for which the record names a share.

    Args:
        subject: both folders.
    Returns:
        The record; skipped where nothing was promised.
    """
    promised = dict(_promises(read_record(subject.compressed.folder) or {}))
    if not promised:
        return SPARSITY.skipped(f"{RECORD_FILE} promises no zeros")
    findings, zeros, total = [], 0, 0
    for name, (share, structures) in sorted(promised.items()):
        weight = _weight(subject, name)
        if weight is None:
            findings.append(f"{name}: its weight cannot be read")
            continue
        zeros, total = zeros + int((weight == 0).sum()), total + weight.numel()
        findings += [f"{name}: {text}" for text in _faults(weight, share, structures)]
    evidence = {"modules": len(promised), "share of zeros": zeros / total if total else None}
    summary = f"{zeros / max(total, 1):.1%} of {total:,} weights in {len(promised)} modules are zero"
    if findings:
        return SPARSITY.record(Outcome.FAIL, f"{len(findings)} modules: {findings[0]}", evidence=evidence, findings=findings)
    return SPARSITY.record(Outcome.PASS, summary, evidence=evidence)


def _promises(record: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, list[str]]]]:
    modules = record.get("modules")
    for name, entry in (modules if isinstance(modules, Mapping) else {}).items():
        details = entry.get("details") if isinstance(entry, Mapping) else None
        if not isinstance(details, Mapping):
            continue
        share = details.get("sparsity")
        if isinstance(share, int | float) and share > 0:
            yield name, (float(share), str(details.get("pruned", "")).split("; "))


def _weight(subject: Subject, name: str) -> torch.Tensor | None:
    """Return the weight as its users will have it, [out, in]; None where there is none or it cannot be decoded."""
    group = subject.modules.get(name)
    if group is None:
        key = f"{name}.weight"
        if key not in subject.compressed.entries:
            return None
        weight = subject.compressed.tensor(key)
        return weight.T if name in subject.transposed else weight
    if group.scheme is None:
        return None
    try:
        return decode_module(subject.compressed.parts(name), group.scheme).weight
    except ValueError:  # told by weights.qparams
        return None


def _faults(weight: torch.Tensor, share: float, structures: list[str]) -> Iterator[str]:
    found = float((weight == 0).double().mean())
    if found < share - _ROUNDING:
        yield f"{found:.2%} of its weights are zero, and {share:.2%} were promised"
    for structure in structures:
        pattern, whole = _PATTERN.match(structure), _WHOLE.match(structure)
        if pattern is not None:
            yield from _broken_runs(weight, int(pattern[1]), int(pattern[2]))
        elif whole is not None:
            yield from _missing_blocks(weight, whole)


def _broken_runs(weight: torch.Tensor, kept: int, block: int) -> Iterator[str]:
    if weight.shape[-1] % block:
        yield f"rows of {weight.shape[-1]} do not divide into blocks of {block}"
        return
    full = int((weight.unflatten(-1, (-1, block)).ne(0).sum(-1) > kept).sum())
    if full:
        yield f"{full} blocks of {block} keep more than {kept} weights, so the pattern {kept}:{block} is broken"


def _missing_blocks(weight: torch.Tensor, structure: re.Match[str]) -> Iterator[str]:
    """Count the rows, columns or blocks of nothing but zeros; others may hold zeros, too, as rounding makes them."""
    zero = (weight == 0).flatten(2).all(-1) if weight.dim() > 2 else weight == 0
    high, wide = {"channel": (1, zero.shape[1]), "filter": (zero.shape[0], 1)}.get(structure[1]) or (int(structure[2]), int(structure[3]))
    empty = zero.unfold(0, high, high).unfold(1, wide, wide).all(-1).all(-1)
    found, wanted = int(empty.sum()), int(float(structure[4]) / 100 * empty.numel() + _ROUNDING)
    if found < wanted:
        yield f"{found} of {empty.numel()} are zero as a whole ({structure[1]}), and {wanted} were promised"
