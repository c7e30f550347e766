"""The measurements equal their definitions, and what they are to tell apart they tell apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.validation.behaviour import metrics
from harness.validation.behaviour.metrics import compare_weights, score_tokens


@pytest.fixture
def weight():
    return torch.rand(12, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_sqnr_is_its_definition(weight):
    noise = 0.01 * (torch.rand(12, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1)
    expected = 10 * math.log10(float(weight.double().square().sum() / ((weight + noise).double() - weight.double()).square().sum()))
    assert compare_weights(weight, weight + noise, 4).sqnr_db == pytest.approx(expected)
    assert compare_weights(weight, weight / 2, None).sqnr_db == pytest.approx(6.0206, abs=1e-4)


def test_limits_of_sqnr(weight):
    assert compare_weights(weight, weight, 4).sqnr_db == math.inf
    assert compare_weights(weight, torch.zeros_like(weight), 4).sqnr_db == 0.0
    assert compare_weights(weight * 0, weight, 4).sqnr_db == -math.inf
    assert compare_weights(weight * 0, weight * 0, 4).sqnr_db == math.inf
    assert math.isnan(compare_weights(weight, weight * math.nan, 4).sqnr_db)


def test_gain_finds_stretched_groups_and_forgives_noise(weight):
    noisy = weight + 0.2 * (torch.rand(12, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1)
    sane = compare_weights(weight, noisy, 4)
    assert sane.mismatch < 2
    assert sane.gain == pytest.approx(1, abs=0.02)
    stretched = noisy.clone()
    stretched[5, 16:32] *= 2
    found = compare_weights(weight, stretched, 4)
    assert found.worst_group == (5, 1)
    assert found.worst_gain == pytest.approx(2, abs=0.15)
    assert found.worst_deviation > 8
    assert compare_weights(weight, weight / 2, None).mismatch > 1e6
    assert compare_weights(weight, weight * math.nan, 4).mismatch == math.inf


def test_an_all_zero_group_is_no_mismatch(weight):
    weight[3] = 0
    assert compare_weights(weight, weight, 4).mismatch == 0


def test_blocks_of_rows_change_nothing(weight, monkeypatch):
    other = weight.roll(1, 0)
    whole = compare_weights(weight, other, 4), compare_weights(weight, other, None)
    monkeypatch.setattr(metrics, "ELEMENTS_AT_ONCE", 64)
    assert whole[0] == compare_weights(weight, other, 4)
    assert compare_weights(weight, other, None).sqnr_db == pytest.approx(whole[1].sqnr_db)


def reference_scores(base, compressed, targets):
    p, q = base.double().softmax(-1), compressed.double().softmax(-1)
    rows = torch.arange(len(targets))
    return -p[rows, targets].log(), -q[rows, targets].log(), (p * (p.log() - q.log())).sum(-1)


def test_token_scores_are_their_definitions(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    base, compressed = (torch.rand(50, 11, generator=generator) * 6 for _ in range(2))
    targets = torch.randint(11, (50,), generator=generator)
    monkeypatch.setattr(metrics, "ELEMENTS_AT_ONCE", 77)
    scores = score_tokens(base, compressed, targets)
    nll_base, nll_compressed, kl = reference_scores(base, compressed, targets)
    np.testing.assert_allclose(scores.nll_base, nll_base, rtol=1e-5)
    np.testing.assert_allclose(scores.nll_compressed, nll_compressed, rtol=1e-5)
    np.testing.assert_allclose(scores.kl, kl, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(scores.agrees, base.argmax(-1) == compressed.argmax(-1))
    np.testing.assert_array_equal(scores.is_base_right, base.argmax(-1) == targets)
    np.testing.assert_array_equal(scores.is_compressed_right, compressed.argmax(-1) == targets)
    assert len(scores) == 50


def test_equal_logits_have_no_divergence_and_masked_tokens_are_no_nan():
    logits = torch.tensor([[1.0, -math.inf, 2.0]])
    scores = score_tokens(logits, logits, torch.tensor([2]))
    assert scores.kl.tolist() == [0.0]
    assert scores.agrees.tolist() == [True]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_show(bad):
    good, spoiled = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, bad, 2.0]])
    scores = score_tokens(good, spoiled, torch.tensor([2]))
    assert math.isnan(scores.kl[0])
    assert math.isnan(scores.nll_compressed[0])
    assert score_tokens(good, torch.tensor([[1.0, 0.0, -math.inf]]), torch.tensor([2])).kl[0] == math.inf
