"""Checks 41 to 46 pass our oneshot and catch calibration that depends on what must not matter."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch

from compressor.modifiers.schemes.input_statistics import mask_of_input
from harness import check
from harness.checks.adapters.calibration import OurCalibration
from harness.reporting.verdict import Outcome

NVFP4 = {"scheme": "NVFP4A16", "targets": ["Linear"]}


def outcome(subject, number):
    record = check(subject, checks=[number]).records[0]
    assert "could not be completed" not in record.summary, record.summary
    return record.outcome, record.summary


@pytest.mark.nightly
def test_our_oneshot_passes():
    report = check(OurCalibration(), checks=[41, 42, 43, 44, 46, "calibration.every_token"])
    assert {record.outcome for record in report.records} == {Outcome.PASS}, report.to_text()


def test_our_fused_siblings_share_a_global_scale():
    assert outcome(OurCalibration(settings=NVFP4), 45) == (Outcome.PASS, "4 families, one scale each")
    assert outcome(OurCalibration(), 45)[0] is Outcome.SKIP


def test_rounding_passes_what_applies_to_it():
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    groups = {"all": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    report = check(OurCalibration("QuantizationModifier", {"config_groups": groups}), checks=[41, 44, 46])
    assert [record.outcome for record in report.records] == [Outcome.SKIP, Outcome.PASS, Outcome.PASS], report.to_text()


def test_padding_that_is_counted_is_caught():
    with mock.patch("compressor.modifiers.schemes.input_statistics.mask_of_input", return_value=None):
        assert outcome(OurCalibration(), 41)[0] is Outcome.FAIL


class Silent(OurCalibration):
    """Falls back without a word."""

    def run_starved(self, *, budget):
        return replace(super().run_starved(budget=budget), fallbacks={})


class NamesOneOnly(OurCalibration):
    """Says of one module only that it fell back."""

    def run_starved(self, *, budget):
        done = super().run_starved(budget=budget)
        return replace(done, fallbacks=dict(list(done.fallbacks.items())[:1]))


class NoBudget(OurCalibration):
    """Allows any number of fallbacks."""

    def run_starved(self, *, budget):
        return super().run_starved(budget=None)


class NoFallbacks(OurCalibration):
    """Allows none."""

    def run_starved(self, *, budget):
        return super().run_starved(budget=budget if budget is None else 0)


class StarvesDenseModels(OurCalibration):
    """A hook that never ran."""

    def run(self, rows, **options):
        done = super().run(rows, **options)
        return replace(done, num_tokens=dict.fromkeys(done.num_tokens, 0))


class CountsWhatIsCalled(Silent):
    """Silent, and modules that saw no token are not among the counts."""

    def run_starved(self, *, budget):
        done = super().run_starved(budget=budget)
        return replace(done, num_tokens={name: count for name, count in done.num_tokens.items() if count})


class SkipsDown(OurCalibration):
    """Rounds some modules to nearest, and says nothing."""

    def run(self, rows, **options):
        done = super().run(rows, **options)
        return replace(done, statistics={name: value for name, value in done.statistics.items() if "down_proj" not in name})


class NoneIsAny(OurCalibration):
    """Takes a budget of 0 for none."""

    def run_starved(self, *, budget):
        return super().run_starved(budget=budget or None)


class OneIsYes(OurCalibration):
    """Takes a budget of 1 for a yes."""

    def run_starved(self, *, budget):
        return super().run_starved(budget=None if budget == 1 else budget)


class ExactlyAll(OurCalibration):
    """Wants to be told how many there will be."""

    def run_starved(self, *, budget):
        done = super().run_starved(budget=budget)
        if budget not in (None, len(done.fallbacks)):
            raise ValueError("another number of fallbacks")
        return done


BUDGETS = [NoBudget, NoFallbacks, NoneIsAny, OneIsYes, ExactlyAll]


@pytest.mark.parametrize("subject", [Silent, NamesOneOnly, *BUDGETS, StarvesDenseModels, CountsWhatIsCalled, SkipsDown])
def test_silent_fallbacks_are_caught(subject):
    assert outcome(subject(), 42)[0] is Outcome.FAIL


class Fails(OurCalibration):
    """A run that works in this process only."""

    def command(self, rows, out):
        return [sys.executable, "-c", "raise SystemExit('no such module')"]


class AnotherSeed(OurCalibration):
    """A run that forgets its seed."""

    def command(self, rows, out):
        return OurCalibration(seed=1).command(rows, out)


@pytest.mark.nightly
def test_a_run_that_another_process_does_not_repeat_is_caught():
    assert "model.embed_tokens.weight differs in a new process" in outcome(AnotherSeed(), 43)[1]
    assert "exits with 1: no such module" in outcome(Fails(), 43)[1]


class FirstOfABatch(OurCalibration):
    """Looks at the first row of each batch."""

    def run(self, rows, *, batch_size=1, **options):
        return super().run(rows[::batch_size], batch_size=1, **options)


def test_codes_that_depend_on_the_batch_size_are_caught():
    assert outcome(FirstOfABatch(), 44)[0] is Outcome.FAIL


class LastBatchLost(OurCalibration):
    """Takes full batches only."""

    def run(self, rows, *, batch_size=1, **options):
        return super().run(rows[: len(rows) // batch_size * batch_size], batch_size=batch_size, **options)


class FirstTokenLost(OurCalibration):
    """Counts a row from its second token on."""

    def run(self, rows, **options):
        return super().run([row[len(row) > 1 :] for row in rows], **options)


class Shortest(OurCalibration):
    """Cuts every row to the shortest."""

    def run(self, rows, **options):
        return super().run([row[: min(map(len, rows))] for row in rows], **options)


class OneToken(OurCalibration):
    """Counts nothing of the middle, though it counts the tokens."""

    def run(self, rows, **options):
        return super().run(
            [torch.cat([row[:1], row[:1].expand(len(row) - 2), row[-1:]]) if len(row) > 2 else row for row in rows], **options
        )


class BeginsTwice(OurCalibration):
    """Puts a token in front of each row."""

    def run(self, rows, **options):
        return super().run([torch.cat([row.new_ones(1), row]) for row in rows], **options)


class FewTokens(OurCalibration):
    """Counts batches."""

    def run(self, rows, **options):
        done = super().run(rows, **options)
        return replace(done, num_tokens=dict.fromkeys(done.num_tokens, 1))


class NotANumber(OurCalibration):
    """Scales that are NaN."""

    def run(self, rows, **options):
        done = super().run(rows, **options)
        return replace(done, tensors={name: tensor * torch.nan for name, tensor in done.tensors.items()})


class Spoilt(OurCalibration):
    """One number of a statistic is NaN: in whatever it is held against there is one, too."""

    def run(self, rows, **options):
        done = super().run(rows, **options)
        for name, statistic in done.statistics.items():
            if name.endswith("v_proj"):
                statistic.view(-1)[3] = torch.nan
        return done


class LosesAScale(OurCalibration):
    """One of two fused modules has no global scale."""

    def run(self, rows, **options):
        done = super().run(rows, **options)
        scales = {name: scale for name, scale in done.global_scales.items() if not name.endswith("1.mlp.up_proj")}
        return replace(done, global_scales=scales)


class Uncompressed(OurCalibration):
    """Sees the first layer as it was."""

    def run(self, rows, *, sequential=True, **options):
        return super().run(rows, sequential=False, **options)


@pytest.mark.parametrize(
    ("subject", "number", "said"),
    [
        (LastBatchLost, 41, "padding has changed it"),
        (FirstTokenLost, "calibration.every_token", "token 0 of row 0 (6 tokens) counts for nothing"),
        (Shortest, "calibration.every_token", "saw 22 of 185 tokens"),
        (OneToken, "calibration.every_token", "token 4 of row 1 (9 tokens) counts for nothing"),
        (FewTokens, "calibration.every_token", "saw 1 of 185 tokens"),
        (BeginsTwice, "calibration.every_token", "where one row comes in two parts"),
        (SkipsDown, "calibration.every_token", "down_proj has codes of a dense model, and no statistic"),
        (NotANumber, 46, "not finite"),
        (Spoilt, 41, "v_proj: its statistic is not finite"),
        (Spoilt, "calibration.every_token", "v_proj: its statistic is not finite"),
        (lambda: LosesAScale(settings=NVFP4), 45, "1.mlp.up_proj has codes and no global scale, and is fused with"),
        (Uncompressed, 46, "calibrated on what the first gave uncompressed"),
    ],
)
def test_tokens_that_do_not_count_and_layers_that_are_not_followed_are_caught(subject, number, said):
    found = outcome(subject(), number)
    assert found[0] is Outcome.FAIL and said in found[1], found


@pytest.mark.parametrize(
    ("command", "said"),
    [(lambda *_: "python -c pass", "return its words in a list"), (lambda *_: [sys.executable, "-c", "pass"], "has written no tensors")],
)
def test_a_command_that_cannot_be_meant_is_told(command, said):
    subject = OurCalibration()
    with mock.patch.object(OurCalibration, "command", staticmethod(command)):
        assert said in outcome(subject, 43)[1]


def test_siblings_with_scales_of_their_own_are_caught():
    with mock.patch("compressor.modifiers.schemes.base.shared_global_scales", return_value={}):
        found, summary = outcome(OurCalibration(settings=NVFP4), 45)
    assert found is Outcome.FAIL
    assert "runtimes fuse them" in summary


class BasicSeesLess(OurCalibration):
    """A basic pipeline that drops its last batch."""

    def run(self, rows, *, sequential=True, **options):
        return super().run(rows if sequential else rows[:-1], sequential=sequential, **options)


class DropsARowOfOneLayer(OurCalibration):
    def run(self, rows, *, num_layers=2, **options):
        return super().run(rows[:-1] if num_layers == 1 and len(rows) > 1 else rows, num_layers=num_layers, **options)


def test_a_row_that_counts_for_nothing_in_one_layer_is_caught():
    found, summary = outcome(DropsARowOfOneLayer(), 46)
    assert found is Outcome.FAIL and "the last token of row 4 (50 tokens) of 5 counts for nothing" in summary


def test_pipelines_that_differ_on_one_layer_are_caught():
    assert outcome(BasicSeesLess(), 46)[0] is Outcome.FAIL


class Changed(OurCalibration):
    """Calibrates on other rows than it was given."""

    def change(self, rows):
        return rows

    def run(self, rows, **options):
        return super().run(self.change(list(rows)), **options)


def changed(change, hides=False):
    class Mine(Changed):
        def change(self, rows):
            return change(rows)

        def run(self, rows, **options):
            done = super().run(rows, **options)
            return replace(done, num_tokens={}) if hides else done

    return Mine()


def unique(rows):
    return [row for number, row in enumerate(rows) if not any(torch.equal(row, other) for other in rows[:number])]


def without(token):
    return lambda rows: [row[row != token] if (row != token).any() else row for row in rows]


LOST = {
    "after the third row": lambda rows: rows[:3],
    "after the eighth row": lambda rows: rows[:8],
    "the fourth row": lambda rows: rows[:3] + rows[4:],
    "every other row": lambda rows: rows[::2],
    "equal rows": unique,
    "rows that begin alike": lambda rows: list({tuple(row[:4].tolist()): row for row in rows}.values()),
    "first tokens of later rows": lambda rows: [*rows[:3], *(row[1:] for row in rows[3:])],
    "last tokens of short rows": lambda rows: [row[:-1] if len(row) == 4 else row for row in rows],
    "id 0": without(0),
    "id 1": without(1),
    "id 2": without(2),
    "the last id": without(95),
    "tokens from the 129th on": lambda rows: [row[:128] for row in rows],
    "tokens of id 0 at the end": lambda rows: [row[:-1] if row[-1] == 0 and len(row) > 1 else row for row in rows],
    "rows of a single token": lambda rows: [row for row in rows if len(row) > 1],
    "short rows": lambda rows: [row for row in rows if len(row) > 3],
}


ALWAYS = ("after the third row", "equal rows", "id 0", "tokens from the 129th on")
# Each takes a second or two; four are of all kinds.
CASES = [pytest.param(what, marks=[] if what in ALWAYS else [pytest.mark.nightly]) for what in LOST]


@pytest.mark.parametrize("hides", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["counted", "not counted"])
@pytest.mark.parametrize("what", CASES)
def test_tokens_that_are_lost_are_told(what, hides):
    found, summary = outcome(changed(LOST[what], hides), "calibration.every_token")
    assert found is Outcome.FAIL and ("counts for nothing" in summary or "count for nothing" in summary or "saw" in summary)


class DampsInSequence(OurCalibration):
    """A little more damping where layers come one after the other."""

    def run(self, rows, *, sequential=True, **options):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
        groups = {"all": {"targets": ["Linear"], "weights": weights}}
        settings = {"config_groups": groups, "ignore": ["lm_head"], "dampening_frac": 0.0105 if sequential else 0.01}
        return OurCalibration(settings=settings).run(rows, sequential=sequential, **options)


class LearnsInSequence(OurCalibration):
    """Other statistics, though the codes are the same."""

    def run(self, rows, *, sequential=True, **options):
        done = super().run(rows, sequential=sequential, **options)
        return replace(done, statistics={name: value * (1.5 if sequential else 1) for name, value in done.statistics.items()})


@pytest.mark.parametrize("subject", [DampsInSequence, LearnsInSequence])
def test_a_pipeline_that_is_another_one_is_caught(subject):
    assert outcome(subject(), 46)[0] is Outcome.FAIL


class AtOnce(OurCalibration):
    """Looks at other rows, or not at the mask, where all layers run at once."""

    def __init__(self, change=lambda rows, size: rows, mask=None, second=None):
        super().__init__()
        self.change, self.mask, self.second = change, mask or mask_of_input, second

    def run(self, rows, *, sequential=True, batch_size=1, **options):
        options |= {"sequential": sequential, "batch_size": batch_size}
        if sequential:
            return super().run(rows, **options)
        with mock.patch("compressor.modifiers.schemes.input_statistics.mask_of_input", self.mask):
            done = super().run(self.change(rows, batch_size), **options)
        if self.second is None:
            return done
        late = super().run(self.second(rows), **options).statistics
        return replace(done, statistics={name: (late if "layers.1" in name else done.statistics)[name] for name in late})


def unless_long(*args, **named):
    mask = mask_of_input(*args, **named)
    return None if mask is not None and mask.shape[-1] > 64 else mask


PADDING = [
    (AtOnce(mask=lambda *args, **named: None), "all layers at once, in batches of 2"),
    (AtOnce(mask=unless_long), "all layers at once, in batches of 2"),
    (AtOnce(lambda rows, size: rows[: 5 * size]), "all layers at once, in batches of 2"),
    (AtOnce(lambda rows, size: rows if size < 4 else rows[::-1][size:]), "all layers at once, in batches of 5"),
]


@pytest.mark.parametrize(("subject", "said"), PADDING, ids=["no mask", "no mask of long batches", "five batches", "batches of five"])
def test_padding_and_batches_are_looked_at_where_all_layers_run_at_once(subject, said):
    found = outcome(subject, 41)
    assert found[0] is Outcome.FAIL and said in found[1], found


def test_padding_decides_no_codes_of_who_keeps_no_statistics():
    class Hides(AtOnce):
        def run(self, rows, **options):
            return replace(super().run(rows, **options), statistics={}, num_tokens={})

    assert outcome(Hides(), 44) == (Outcome.PASS, "0 of 18432 codes")
    found = outcome(Hides(mask=lambda *args, **named: None), 44)
    assert found[0] is Outcome.FAIL and "all layers at once, 13 rows of 1 to 130 tokens" in found[1], found


TOKENS = [
    (AtOnce(lambda rows, size: rows[:-1]), "the first layer does not see"),
    (AtOnce(lambda rows, size: [row[row != 0] for row in rows]), "the first layer does not see"),
    (AtOnce(second=lambda rows: rows[-1:]), "the order of the rows decides"),
    (AtOnce(second=lambda rows: [row[: max(1, len(row) - 1)] for row in rows]), "the last token of row 0 (6 tokens) counts for nothing"),
    (AtOnce(second=lambda rows: [row[:129] for row in rows]), "the last token of row 9 (130 tokens) counts for nothing"),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("subject", "said"), TOKENS, ids=["rows", "an id", "the last row", "last tokens", "the last of 130"])
def test_every_token_counts_where_all_layers_run_at_once(subject, said):
    found = outcome(subject, "calibration.every_token")
    assert found[0] is Outcome.FAIL and "all layers at once: " in found[1] and said in found[1], found
