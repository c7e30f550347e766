"""What two signatures differ in is said in words."""

from __future__ import annotations

import pytest

from compressor.training import drift, signature_hash

LINES = [
    "forward   aten.mm.default(in:['x']:f32[2,3], param:w:f32[3,4]) -> %0:f32[2,4]",
    "forward   aten.mul.Tensor(%0:f32[2,4], 0.5) -> %1:f32[2,4]",
    "loss      aten.sum.default(%1:f32[2,4], outside:12ab34cd:f32[]) -> %2:f32[]",
]


@pytest.mark.parametrize(
    ("index", "old", "new", "hint"),
    [
        (1, "0.5", "0.25", "only a Python number differs"),
        (2, "outside:12ab34cd", "outside:99999999", "neither parameter, buffer"),
        (0, "f32[2,4]", "f32[2,4](1,2)", "another shape or layout"),
        (1, "aten.mul.Tensor", "aten.div.Tensor", "another operator runs here"),
        (2, "%1:", "%0:", "the same operators on other aliases from op 2"),
    ],
)
def test_each_kind_of_difference_has_its_hint(index, old, new, hint):
    changed = [line.replace(old, new) if k == index else line for k, line in enumerate(LINES)]
    text = drift(LINES, changed)
    assert text is not None and hint in text and LINES[index] in text
    assert signature_hash(LINES) != signature_hash(changed)


def test_an_inserted_op_does_not_shift_the_rest():
    shifted = [LINES[0], "forward   aten.neg.default(%0:f32[2,4]) -> %1:f32[2,4]", *[line.replace("%1", "%2") for line in LINES[1:]]]
    text = drift(LINES, shifted)
    assert text is not None and "1 differ" in text and "in one of the two only" in text


def test_equal_signatures_have_no_drift():
    assert drift(LINES, list(LINES)) is None


def test_the_signature_of_a_step_is_free_of_addresses(new_trainer, cases):
    hashes = set()
    for _ in range(2):
        trainer = new_trainer(cases["llama"], "replay")
        keep = [trainer.train_step(cases["llama"].batch_at(number)) for number in range(3)]
        hashes.add(signature_hash(trainer.plans[0].captured.lines))
        assert len(keep) == 3
    assert len(hashes) == 1
