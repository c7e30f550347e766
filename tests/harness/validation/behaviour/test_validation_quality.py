"""The quality checks judge by intervals: pass, fail, and 'cannot tell' each for the right reason; wrong predictions never pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from compressor.errors import DatasetError
from harness.validation.behaviour.bootstrap import mcnemar
from harness.validation.behaviour.metrics import score_tokens
from harness.validation.behaviour.quality import check_quality, measure_quality
from harness.validation.behaviour.scoring import Scores, TokenBatch, score_models
from harness.validation.policy import Policy

VOCAB = 32


def table_model(noise: float = 0.0, seed: int = 0, sharpness: float = 4.0):
    """Return a bigram model: logits of the next token from a table, plus noise that differs by seed."""
    table = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * sharpness * 2
    spoiled = table + noise * (torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed + 1)) - 0.5)
    return lambda ids, mask: spoiled[ids]


def sample(num_sequences: int = 60, length: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    model = table_model()
    ids = torch.randint(VOCAB, (num_sequences, 1), generator=generator)
    for _ in range(length - 1):
        probabilities = model(ids[:, -1:], None)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return ids


def score(compressed, ids=None, base=None) -> Scores:
    ids = sample() if ids is None else ids
    return score_models(base or table_model(), compressed, [TokenBatch(part) for part in ids.split(16)])


def outcomes(scores: Scores, policy: Policy | None = None) -> dict[str, str]:
    return {record.name.split(".")[1]: record.outcome.value for record in check_quality(scores, policy or Policy(), 0)[0]}


def test_a_faithful_model_passes_everything():
    assert set(outcomes(score(table_model(noise=0.05))).values()) == {"pass"}


def test_a_model_that_lost_a_lot_fails_everything_measured():
    found = outcomes(score(table_model(noise=8.0)))
    assert found == {"finite": "pass", "perplexity": "fail", "kl": "fail", "top1": "fail", "accuracy": "fail"}


def test_a_loss_about_as_large_as_the_margin_is_inconclusive():
    scores = score(table_model(noise=2.0))
    quality = measure_quality(scores, Policy(), 0)
    ratio = quality.perplexity_ratio.estimate
    assert ratio > 1.01
    records, _ = check_quality(scores, Policy(max_perplexity_ratio=ratio), 0)
    assert records[1].outcome == "inconclusive"
    assert "more data would tell" in records[1].summary


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_predictions_that_are_not_finite_fail_and_stop_the_rest(bad):
    def broken(ids, mask):
        logits = table_model()(ids, mask).clone()
        logits[0, 3, 7] = bad
        return logits

    records, quality = check_quality(score(broken), Policy(), 0)
    assert quality is None
    assert records[0].outcome == "fail"
    assert records[0].summary.startswith("4 of")  # one token in each of the four batches
    assert {record.outcome.value for record in records[1:]} == {"skip"}


def test_too_few_sequences_are_no_sample():
    found = outcomes(score(table_model(), sample(num_sequences=5)))
    assert found == {
        "finite": "pass",
        "perplexity": "inconclusive",
        "kl": "inconclusive",
        "top1": "inconclusive",
        "accuracy": "inconclusive",
    }


def test_data_that_nothing_predicts_proves_nothing():
    noise = torch.randint(VOCAB, (60, 24), generator=torch.Generator().manual_seed(9))
    records, _ = check_quality(score(table_model(), noise), Policy(), 0)
    by_name = {record.name: record for record in records}
    assert by_name["behaviour.perplexity"].outcome == "inconclusive"
    assert "shifted by one token would pass too" in by_name["behaviour.perplexity"].summary


def test_an_untrained_model_proves_nothing():
    flat = lambda ids, mask: torch.zeros(*ids.shape, VOCAB)  # noqa: E731
    found = outcomes(score(flat, base=flat))
    assert found["perplexity"] == found["kl"] == found["top1"] == "inconclusive"


def test_a_limit_that_lets_the_decoy_through_proves_nothing():
    policy = Policy(max_mean_kl=50.0, min_top1_agreement=0.0, max_perplexity_ratio=1e9, max_accuracy_drop=1.0)
    found = outcomes(score(table_model()), policy)
    assert set(found.values()) == {"pass", "inconclusive"}
    assert found["kl"] == found["top1"] == found["perplexity"] == found["accuracy"] == "inconclusive"


def test_measurements_are_means_over_tokens_and_mcnemar_counts_pairs():
    ids = sample()
    compressed = table_model(noise=1.0)
    scores = score(compressed, ids)
    flat = score_tokens(table_model()(ids[:, :-1], None).flatten(0, 1), compressed(ids[:, :-1], None).flatten(0, 1), ids[:, 1:].flatten())
    quality = measure_quality(scores, Policy(), 0)
    assert quality.num_tokens == ids[:, 1:].numel()
    assert quality.num_sequences == len(ids)
    assert quality.means["nll_base"] == pytest.approx(flat.nll_base.mean())
    assert quality.nll_difference.estimate == pytest.approx((flat.nll_compressed - flat.nll_base).mean())
    assert quality.kl.estimate == pytest.approx(flat.kl.mean())
    assert quality.kl_p99 == pytest.approx(np.quantile(flat.kl, 0.99))
    assert quality.top1.estimate == pytest.approx(flat.agrees.mean())
    assert quality.perplexity_ratio.low == pytest.approx(math.exp(quality.nll_difference.low))
    accuracy = check_quality(scores, Policy(), 0)[0][-1].evidence["McNemar"]
    only_base = int((flat.is_base_right & ~flat.is_compressed_right).sum())
    only_compressed = int((~flat.is_base_right & flat.is_compressed_right).sum())
    assert accuracy == {
        "right only in base": only_base,
        "right only in compressed": only_compressed,
        "p": mcnemar(only_base, only_compressed),
    }


def test_padding_is_never_scored():
    ids = sample(num_sequences=30)
    padded = torch.cat([ids, torch.zeros(30, 8, dtype=torch.long)], dim=1)
    mask = torch.arange(32)[None] < 24
    masked = score_models(table_model(), table_model(1.0), [TokenBatch(padded, mask.expand(30, -1))])
    plain = score_models(table_model(), table_model(1.0), [TokenBatch(ids)])
    np.testing.assert_allclose(masked.tokens.kl, plain.tokens.kl)
    np.testing.assert_array_equal(masked.sequence, plain.sequence)
    np.testing.assert_allclose(masked.decoy.kl, plain.decoy.kl)


def test_what_does_not_count_is_read_and_no_target():
    read: list[torch.Tensor | None] = []

    def model(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        read.append(mask)
        return table_model(1.0)(ids, mask)

    ids, places = sample(num_sequences=30), torch.arange(24)
    padding, counted = (places < 20).expand(30, -1), (places >= 8).expand(30, -1)
    all_tokens = score_models(table_model(), model, [TokenBatch(ids[:, :20])])
    some = score_models(table_model(), model, [TokenBatch(ids, padding.long(), counted)])
    assert read[0] is None and torch.equal(read[1].bool(), padding)
    due = (places[1:20] >= 8).repeat(30).numpy()  # of targets: the first that counts has a prediction, too
    np.testing.assert_array_equal(some.tokens.nll_compressed, all_tokens.tokens.nll_compressed[due])
    batch = TokenBatch(ids, padding.long(), counted)
    assert [int(row) for row in batch.predicting.sum(1)] == [13] * 30 and not batch.predicting[:, :7].any()
    with pytest.raises(DatasetError, match="of which a later one counts"):
        score_models(table_model(), model, [TokenBatch(ids, None, places.expand(30, -1) < 1)])


def test_the_decoy_is_the_prediction_of_one_token_before():
    ids = sample(num_sequences=20)
    scores = score_models(table_model(), table_model(1.0), [TokenBatch(ids)])
    logits = table_model(1.0)(ids, None)
    expected = score_tokens(table_model()(ids[:, 1:-1], None).flatten(0, 1), logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten())
    np.testing.assert_allclose(scores.decoy.kl, expected.kl)
    np.testing.assert_allclose(scores.decoy.nll_compressed, expected.nll_compressed)


def test_copies_of_a_sequence_count_once_wherever_they_are():
    """Thirty-two copies of one are no sample: their interval had no width, and the limit that it broke was kept."""
    ids = sample(num_sequences=1).repeat(32, 1)
    padded, mask = torch.nn.functional.pad(ids, (3, 0)), torch.arange(ids.shape[1] + 3).expand(32, -1) >= 3
    scores = score_models(table_model(), table_model(0.1), [TokenBatch(ids[:7]), TokenBatch(padded, mask), TokenBatch(ids[7:])])
    assert scores.num_sequences == 1 and len(scores.tokens) == 64 * (ids.shape[1] - 1)
    records, quality = check_quality(scores, Policy(), 0)
    assert quality is None and "too few sequences that differ for an interval: 1; give at least 20" in records[1].summary


def test_a_copy_moves_the_mean_and_narrows_no_interval():
    ids = sample(num_sequences=40)
    plain, twice = (measure_quality(score(table_model(0.1), one), Policy(), 0) for one in (ids, ids.repeat(2, 1)))
    assert (twice.num_sequences, twice.num_tokens) == (plain.num_sequences, 2 * plain.num_tokens) == (40, 2 * plain.num_tokens)
    np.testing.assert_allclose([twice.kl.low, twice.kl.high], [plain.kl.low, plain.kl.high])


def test_sequences_are_counted_over_batches_and_empty_ones_left_out():
    ids = torch.arange(12).reshape(4, 3) % VOCAB
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [False, False, False]])
    scores = score_models(table_model(), table_model(), [TokenBatch(ids, mask), TokenBatch(ids.flip(0))])
    assert scores.sequence.tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 4, 0, 0]
    assert scores.num_sequences == 5


def test_single_tokens_are_no_data():
    with pytest.raises(DatasetError, match="two real tokens"):
        score_models(table_model(), table_model(), [TokenBatch(torch.ones(8, 1, dtype=torch.long))])


def test_equal_seeds_give_equal_intervals_and_the_confidence_widens_them():
    scores = score(table_model(noise=1.0))
    first, again = (measure_quality(scores, Policy(), seed=3).to_dict() for _ in range(2))
    assert first == again
    assert measure_quality(scores, Policy(), seed=4).to_dict() != first
    wide = measure_quality(scores, Policy(confidence=0.99), seed=3).nll_difference
    narrow = measure_quality(scores, Policy(confidence=0.8), seed=3).nll_difference
    assert wide.low < narrow.low < narrow.high < wide.high


def test_the_power_is_printed_with_the_smallest_detectable_difference():
    record = check_quality(score(table_model(noise=1.0)), Policy(), 0)[0][1]
    power = record.evidence["power"]
    assert f"power to detect the margin {power['to detect the margin']:.1%}" in record.summary
    assert f"smallest detectable ratio {power['as perplexity ratio']:.4f}" in record.summary
