"""Check of scales and rotations that were put into the base before it was compressed: does it still predict what it predicted?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.behaviour.scoring import TokenBatch
from harness.validation.format.fused import fused_again
from harness.validation.format.record import RECORD_FILE
from harness.validation.format.rotations import Rotations
from harness.validation.format.transforms import TransformedCheckpoint, config_settings
from harness.validation.loading import LOADER_ERRORS, first_line, load_with_tensors
from harness.validation.subject import Subject

TRANSFORMS = Claim(
    "behaviour.transforms", "The scales and rotations that were moved into weights before compression leave what the base predicts as it is"
)
_TOKENS = 256  # a wrong pair shows on the first ones
_MOST = 1e-3  # root mean square of the difference of logits to that of logits; float32 leaves some 1e-6


def check_transforms(subject: Subject, base: nn.Module, batch: TokenBatch) -> CheckRecord:
    """Run the base with and without the moved scales in float32; rotations of the forward are no part of it, see `format.online`.

    Args:
        subject: its base has them moved.
        base: as it was loaded; changed to float32, on the CPU.
        batch: tokens.
    Returns:
        The record; skipped where none was moved.
    """
    if subject.unreadable:
        return TRANSFORMS.record(Outcome.FAIL, f"{RECORD_FILE}: {subject.unreadable[0]}", findings=list(subject.unreadable))
    if not isinstance(subject.base, TransformedCheckpoint):
        return TRANSFORMS.skipped(f"{RECORD_FILE} names none" if not subject.moved else "experts were taken out, and nothing moved")
    shown = replace(subject.base, moved=tuple(move.offline if isinstance(move, Rotations) else move for move in subject.base.moved))
    moves, source, settings = subject.base.moved, subject.base.source, config_settings(subject.moved)
    modifiers = sorted({move.modifier for move in moves})
    evidence = {"transforms": len(moves), "modifiers": modifiers}
    try:
        changed = load_with_tensors(base, fused_again({name: shown.exact(name) for name in shown.entries}, shown), settings)
        if settings:  # experts are gone, which is judged as a whole, by what it predicts
            base = load_with_tensors(base, fused_again({name: source.tensor(name) for name in source.entries}, source), settings)
    except LOADER_ERRORS as error:
        return TRANSFORMS.record(
            Outcome.FAIL, f"the base with scales and rotations moved does not load: {first_line(error)}", evidence=evidence
        )
    ids = batch.input_ids[:1, :_TOKENS]
    with torch.no_grad():
        expected, found = (model.to("cpu", torch.float32)(input_ids=ids, use_cache=False).logits.double() for model in (base, changed))
    difference = float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    evidence["relative difference"] = difference
    scales = f"{len(moves)} transforms ({', '.join(modifiers)})"
    said = f"{scales}: logits of {ids.shape[1]} tokens differ by {difference:.1e} relative, at most {_MOST:g}"
    return TRANSFORMS.record(Outcome.PASS if difference <= _MOST else Outcome.FAIL, said, evidence=evidence)
