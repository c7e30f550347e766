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
_SHARE = r", (?:(?P<percent>\d+(?:\.\d+)?)% zeros(?: of all together|, by outliers)?|[\d.e-]+ to [\d.e-]+ zeros)$"
_PATTERN = re.compile(rf"^(\d+):(\d+){_SHARE}")
_WHOLE = re.compile(rf"^(channel|filter|block_(\d+),(\d+)){_SHARE}")
_ANYWHERE = re.compile(rf"^(unstructured{_SHARE})?$")
_ROUNDED = 1e-4  # of a share in percent with four digits
_ROUNDING = 1e-6  # of a share that was written as a decimal number


def check_sparsity(subject: Subject) -> CheckRecord:
    """Count the zeros of every module for which the record names a share.

    Args:
        subject: both folders.
    Returns:
        The record; skipped where nothing was promised.
    """
    record = read_record(subject.compressed.folder)
    if record is not None and "modules" not in record:
        return SPARSITY.record(Outcome.INCONCLUSIVE, f"{RECORD_FILE} lists no modules, though every run does; compress again")
    modules = (record or {}).get("modules", {})
    odd = _unreadable(modules)
    promised = {} if odd else dict(_promises(modules))
    if not promised and not odd:
        return SPARSITY.skipped(f"{RECORD_FILE} promises no zeros")
    findings, zeros, total = odd, 0, 0
    for name, (share, structures) in sorted(promised.items()):
        weight = _weight(subject, name)
        if weight is None:
            findings.append(f"{name}: its weight cannot be read")
            continue
        zeros, total = zeros + int((weight == 0).sum()), total + weight.numel()
        findings += [f"{name}: {text}" for text in _faults(weight, share, structures)]
    evidence = {"modules": len(promised), "share of zeros": zeros / total if total else None}
    summary = f"{zeros / max(total, 1):.1%} of {total:,} weights in {len(promised)} modules are zero"
    return SPARSITY.found(findings, summary, evidence=evidence, noun="broken promise")


def _unreadable(modules: Any) -> list[str]:
    """Parts that are no tables, in which a promise may have stood."""
    if not isinstance(modules, Mapping):
        return [f"modules: {RECORD_FILE} holds no table of them"]
    odd = [name for name, entry in modules.items() if not (isinstance(entry, Mapping) and isinstance(entry.get("details", {}), Mapping))]
    return [f"{name}: {RECORD_FILE} holds no details of it that can be read" for name in odd]


def _promises(modules: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, list[str]]]]:
    for name, entry in modules.items():
        details = entry.get("details", {})
        share, pruned = details.get("sparsity", 0), details.get("pruned", "")
        if share != 0 or pruned:
            yield name, (share, str(pruned).split("; "))


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


def _faults(weight: torch.Tensor, share: Any, structures: list[str]) -> Iterator[str]:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        yield f"{RECORD_FILE} says sparsity={share!r}, which is no share"
        return
    found, wanted = int((weight == 0).sum()), round(share * weight.numel())
    if found != wanted:  # the record counts what was written: more zeros are damage, too
        yield f"{found:,} of its weights are zero, and {RECORD_FILE} counts {wanted:,} ({share:.2%})"
    for structure in structures:
        yield from _faults_of(weight, structure)


def _faults_of(weight: torch.Tensor, structure: str) -> Iterator[str]:
    pattern, whole = _PATTERN.match(structure), _WHOLE.match(structure)
    if pattern is not None and 0 < int(pattern[1]) < int(pattern[2]) <= weight.shape[-1] and _is_share_of(pattern):
        yield from _broken_runs(weight, int(pattern[1]), int(pattern[2]))
    elif whole is not None and (size := _block_size(weight, whole)):
        yield from _missing_blocks(weight, whole, size)
    elif _ANYWHERE.match(structure) is None:
        yield f"{RECORD_FILE} says pruned={structure!r}, which is nothing that a weight {list(weight.shape)} can be"


def _is_share_of(pattern: re.Match[str]) -> bool:
    """Whether the share beside a pattern N:M is the one that it leaves."""
    return pattern["percent"] is None or abs(float(pattern["percent"]) / 100 - (1 - int(pattern[1]) / int(pattern[2]))) < _ROUNDED


def _broken_runs(weight: torch.Tensor, kept: int, block: int) -> Iterator[str]:
    if weight.shape[-1] % block:
        yield f"rows of {weight.shape[-1]} do not divide into blocks of {block}"
        return
    full = int((weight.unflatten(-1, (-1, block)).ne(0).sum(-1) > kept).sum())
    if full:
        yield f"{full} blocks of {block} keep more than {kept} weights, so the pattern {kept}:{block} is broken"


def _block_size(weight: torch.Tensor, structure: re.Match[str]) -> tuple[int, int] | None:
    """Rows and columns of what goes as a whole; None where the weight has not as many."""
    rows, columns = weight.shape[:2]
    size = {"channel": (1, columns), "filter": (rows, 1)}.get(structure[1]) or (int(structure[2]), int(structure[3]))
    return size if 0 < size[0] <= rows and 0 < size[1] <= columns else None


def _missing_blocks(weight: torch.Tensor, structure: re.Match[str], size: tuple[int, int]) -> Iterator[str]:
    """Count the rows, columns or blocks of nothing but zeros; others may hold zeros, too, as rounding makes them."""
    zero = (weight == 0).flatten(2).all(-1) if weight.dim() > 2 else weight == 0
    empty = zero.unfold(0, size[0], size[0]).unfold(1, size[1], size[1]).all(-1).all(-1)
    found, wanted = int(empty.sum()), int(float(structure["percent"] or 0) / 100 * empty.numel() + _ROUNDING)
    if found < wanted:
        yield f"{found} of {empty.numel()} are zero as a whole ({structure[1]}), and {wanted} were promised"
