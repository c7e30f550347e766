"""A recipe holds the parts of a modifier in its place, and its followers behind it: those are what is read back."""

from __future__ import annotations

import pytest

from compressor.lifecycle import Modifier, State
from compressor.modifiers.gptq import GPTQModifier
from compressor.modifiers.quantization import QuantizationModifier
from harness.lifecycle.verify import verify
from harness.reporting.verdict import Outcome


class Willing(Modifier):
    def on_initialize(self, state: State) -> bool:
        return True


class First(Willing):
    share: float = 0.5


class Second(Willing):
    depth: int = 1


class InParts(Willing):
    share: float = 0.5
    is_deep: bool = False

    def parts(self) -> list[Modifier]:
        return [First(share=self.share), QuantizationModifier(scheme="W4A16", ignore=["lm_head"])]


class KeepsAPlace(Willing):
    share: float | None = 0.25

    def parts(self) -> list[Modifier]:
        share, self.share = self.share, None
        return [self] if share is None else [self, First(share=share)]


class Followed(Willing):
    depth: int = 2

    def followers(self) -> list[Modifier]:
        return [Second(depth=self.depth)]


class GrowsWithEachReading(Willing):
    def parts(self) -> list[Modifier]:
        return [self, First()]


@pytest.mark.parametrize(
    "modifier", [GPTQModifier(scheme="W4A16", mode="best"), InParts(), KeepsAPlace(), Followed()], ids=lambda one: one.label
)
def test_parts_and_followers_are_read_back(modifier: Modifier) -> None:
    report = verify(modifier, checks=["lifecycle.recipe"])
    assert report.passed, report.to_text()


def test_a_failure_of_a_part_stops_the_run_of_the_whole() -> None:
    report = verify(InParts(), checks=["lifecycle.rolls_back"])
    assert report.passed, report.to_text()


def test_a_modifier_with_followers_is_held_against_another_process_and_one_with_parts_is_not() -> None:
    record = verify(Followed(), checks=["lifecycle.new_process"]).records[-1]
    assert (record.outcome, record.summary) == (Outcome.PASS, "15 tensors are equal")
    record = verify(InParts(), checks=["lifecycle.new_process"]).records[-1]
    assert (record.outcome, record.summary) == (Outcome.SKIP, "a recipe holds the parts of InParts in its place; verify each of them")


def test_parts_that_come_again_with_each_reading_are_told() -> None:
    record = verify(GrowsWithEachReading(), checks=["lifecycle.recipe"]).records[-1]
    assert record.outcome is Outcome.FAIL
    assert "['GrowsWithEachReading', 'First'] were written" in record.summary
