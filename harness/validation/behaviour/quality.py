"""Checks of behaviour: does the compressed model still predict what the base predicts, judged with intervals instead of point values?

Each quantity has a limit and a two-sided interval. The whole interval on the good side is a pass, the whole interval on the bad side a
failure; an interval that straddles the limit says that this much data cannot tell. What the sample can tell at all is printed as power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.behaviour.bootstrap import TARGET_POWER, Interval, mcnemar, percentile_interval, power_of, resample_sums
from harness.validation.behaviour.metrics import TokenScores, perplexity, shown
from harness.validation.behaviour.scoring import Scores
from harness.validation.policy import Policy

FINITE = Claim("behaviour.finite", "Every prediction of the compressed model is finite")
PERPLEXITY = Claim("behaviour.perplexity", "The perplexity on held-out data does not rise beyond the margin")
KL = Claim("behaviour.kl", "The predicted distributions stay close: KL(base || compressed) per token")
TOP1 = Claim("behaviour.top1", "Both models prefer the same next token")
ACCURACY = Claim("behaviour.accuracy", "The share of right next tokens does not drop beyond the margin")

_COLUMNS = ("nll_base", "nll_compressed", "kl", "agrees", "is_base_right", "is_compressed_right")


@dataclass(frozen=True)
class Quality:
    """Everything measured on the held-out data.

    Attributes:
        num_sequences: size of the sample that the intervals rest on.
        num_tokens: scored tokens.
        means: mean of each quantity per token.
        nll_difference: compressed minus base, nats per token.
        perplexity_ratio: exp of it.
        kl: mean per token.
        top1: share of equal preferences.
        accuracy_difference: compressed minus base.
        kl_p99: 99th percentile over tokens.
        resampled_nll: bootstrap distribution of nll_difference, for the plot.
    """

    num_sequences: int
    num_tokens: int
    means: dict[str, float]
    nll_difference: Interval
    perplexity_ratio: Interval
    kl: Interval
    top1: Interval
    accuracy_difference: Interval
    kl_p99: float
    resampled_nll: np.ndarray

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements as JSON types, without the bootstrap distribution."""
        return {
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "nll_base": self.means["nll_base"],
            "nll_compressed": self.means["nll_compressed"],
            "perplexity_base": perplexity(self.means["nll_base"]),
            "perplexity_compressed": perplexity(self.means["nll_compressed"]),
            "accuracy_base": self.means["is_base_right"],
            "accuracy_compressed": self.means["is_compressed_right"],
            "nll_difference": self.nll_difference.to_dict(),
            "perplexity_ratio": self.perplexity_ratio.to_dict(),
            "kl": self.kl.to_dict(),
            "kl_p99": self.kl_p99,
            "top1_agreement": self.top1.to_dict(),
            "accuracy_difference": self.accuracy_difference.to_dict(),
        }


def measure_quality(scores: Scores, policy: Policy, seed: int) -> Quality:
    """Turn token scores into means with intervals; one set of resamples serves all quantities.

    Args:
        scores: finite scores of at least two sequences.
        policy: confidence and number of resamples.
        seed: of the bootstrap.
    Returns:
        The measurements.
    """
    count = scores.num_sequences
    sums = [np.bincount(scores.sequence, minlength=count)]
    sums += [np.bincount(scores.sequence, weights=getattr(scores.tokens, name), minlength=count) for name in _COLUMNS]
    sums_NK = np.stack(sums, axis=1).astype(np.float64)
    totals, resampled = sums_NK.sum(0), resample_sums(sums_NK, policy.num_resamples, seed)
    means = dict(zip(_COLUMNS, totals[1:] / totals[0], strict=True))
    drawn = dict(zip(_COLUMNS, (resampled[:, 1:] / resampled[:, :1]).T, strict=True))

    def interval(value: Callable[[dict[str, Any]], Any]) -> Interval:
        return percentile_interval(float(value(means)), value(drawn), policy.confidence, count)

    return Quality(
        num_sequences=count,
        num_tokens=int(totals[0]),
        means={name: float(value) for name, value in means.items()},
        nll_difference=interval(lambda of: of["nll_compressed"] - of["nll_base"]),
        perplexity_ratio=interval(lambda of: perplexity(of["nll_compressed"] - of["nll_base"])),
        kl=interval(lambda of: of["kl"]),
        top1=interval(lambda of: of["agrees"]),
        accuracy_difference=interval(lambda of: of["is_compressed_right"] - of["is_base_right"]),
        kl_p99=float(np.quantile(scores.tokens.kl, 0.99)),
        resampled_nll=drawn["nll_compressed"] - drawn["nll_base"],
    )


def check_quality(scores: Scores, policy: Policy, seed: int, unread: Collection[str] = ()) -> tuple[list[CheckRecord], Quality | None]:
    """Run every check of this family.

    Args:
        scores: of both models; the base's are finite.
        policy: the limits.
        seed: of the bootstrap.
        unread: columns of the data that look like masks, and were not read.
    Returns:
        One record per check, and the measurements where there are any.
    """
    claims = (PERPLEXITY, KL, TOP1, ACCURACY)
    finite = check_finite(scores, unread)
    if finite.outcome is Outcome.FAIL:
        return [finite, *(claim.skipped("predictions are not finite") for claim in claims)], None
    if scores.num_sequences < policy.min_sequences:
        reason = f"too few sequences that differ for an interval: {scores.num_sequences}; give at least {policy.min_sequences}"
        return [finite, *(claim.record(Outcome.INCONCLUSIVE, reason) for claim in claims)], None
    quality = measure_quality(scores, policy, seed)
    records = [
        _perplexity_record(quality, scores.decoy, policy),
        _kl_record(quality, scores.decoy, policy),
        _top1_record(quality, scores.decoy, policy),
        _accuracy_record(quality, scores, policy),
    ]
    return [finite, *records], quality


def check_finite(scores: Scores, unread: Collection[str] = ()) -> CheckRecord:
    """Count tokens at which the compressed model gives NaN or an impossible distribution.

    Args:
        scores: of both models.
        unread: columns of the data that look like masks, and were not read.
    Returns:
        The record.
    """
    bad = int((~np.isfinite(scores.tokens.nll_compressed) | ~np.isfinite(scores.tokens.kl)).sum())
    if bad:
        return FINITE.record(Outcome.FAIL, f"{bad:,} of {len(scores.tokens):,} predictions are not finite")
    told = f"; {', '.join(sorted(unread))} of the data is not read, a loss_mask would say what is judged" if unread else ""
    return FINITE.record(Outcome.PASS, f"{len(scores.tokens):,} predictions{told}")


def held_against(interval: Interval, limit: float, *, is_upper: bool) -> Outcome:
    """Return whether a whole interval keeps a limit; inconclusive where the limit lies within.

    Args:
        interval: of what was measured.
        limit: of it.
        is_upper: whether it is the largest that is good enough; else the least.

    Returns:
        The outcome.
    """
    low, high = (interval.low - limit, interval.high - limit) if is_upper else (limit - interval.high, limit - interval.low)
    if high <= 0:
        return Outcome.PASS
    return Outcome.FAIL if low > 0 else Outcome.INCONCLUSIVE


def _guarded(outcome: Outcome, decoy_passes: bool, summary: str) -> tuple[Outcome, str]:
    """Say why it is inconclusive; a pass that the decoy would get too is no pass."""
    if outcome is Outcome.INCONCLUSIVE:
        return outcome, f"{summary}; the interval straddles the limit, more data would tell"
    if outcome is Outcome.PASS and decoy_passes:
        return Outcome.INCONCLUSIVE, f"{summary}; but predictions shifted by one token would pass too, so this measures nothing here"
    return outcome, summary


def _range(interval: Interval, digits: int = 4) -> str:
    return f"[{shown(interval.low, digits)}, {shown(interval.high, digits)}]"


def _perplexity_record(quality: Quality, decoy: TokenScores, policy: Policy) -> CheckRecord:
    margin = math.log(policy.max_perplexity_ratio)
    outcome = held_against(quality.nll_difference, margin, is_upper=True)
    power = power_of(quality.nll_difference.standard_error, margin, policy.confidence)
    base, compressed = (perplexity(quality.means[name]) for name in ("nll_base", "nll_compressed"))
    ratio = quality.perplexity_ratio
    summary = (
        f"{shown(base, 3)} -> {shown(compressed, 3)}, ratio {shown(ratio.estimate)} {_range(ratio)}; "
        f"power to detect the margin {power.probability:.1%}, smallest detectable ratio {shown(perplexity(power.smallest_detectable))}"
    )
    decoy_difference = _mean(decoy.nll_compressed) - _mean(decoy.nll_base)
    outcome, summary = _guarded(outcome, not decoy_difference > margin, summary)
    evidence = {
        "perplexity": {"base": base, "compressed": compressed},
        "NLL per token": {"base": quality.means["nll_base"], "compressed": quality.means["nll_compressed"]},
        "NLL difference": quality.nll_difference.to_dict(),
        "perplexity ratio": ratio.to_dict(),
        "sample": {"sequences": quality.num_sequences, "tokens": quality.num_tokens, "resamples": policy.num_resamples},
        "power": {
            "to detect the margin": power.probability,
            f"smallest NLL difference detectable at {TARGET_POWER:.0%}": power.smallest_detectable,
            "as perplexity ratio": perplexity(power.smallest_detectable),
        },
        "decoy NLL difference": decoy_difference,
    }
    limit = f"ratio <= {policy.max_perplexity_ratio:g} for the whole {policy.confidence:.0%} interval"
    return PERPLEXITY.record(outcome, summary, limit=limit, evidence=evidence)


def _kl_record(quality: Quality, decoy: TokenScores, policy: Policy) -> CheckRecord:
    outcome = held_against(quality.kl, policy.max_mean_kl, is_upper=True)
    summary = f"mean {quality.kl.estimate:.4f} nats {_range(quality.kl)}, 99th percentile {quality.kl_p99:.3f}"
    outcome, summary = _guarded(outcome, not _mean(decoy.kl) > policy.max_mean_kl, summary)
    evidence = {"mean": quality.kl.to_dict(), "99th percentile": quality.kl_p99, "decoy mean": _mean(decoy.kl)}
    return KL.record(outcome, summary, limit=f"mean <= {policy.max_mean_kl:g} nats for the whole interval", evidence=evidence)


def _top1_record(quality: Quality, decoy: TokenScores, policy: Policy) -> CheckRecord:
    outcome = held_against(quality.top1, policy.min_top1_agreement, is_upper=False)
    summary = f"{quality.top1.estimate:.2%} [{quality.top1.low:.2%}, {quality.top1.high:.2%}]"
    outcome, summary = _guarded(outcome, not _mean(decoy.agrees) < policy.min_top1_agreement, summary)
    evidence = {"agreement": quality.top1.to_dict(), "decoy agreement": _mean(decoy.agrees)}
    return TOP1.record(outcome, summary, limit=f">= {policy.min_top1_agreement:.0%} for the whole interval", evidence=evidence)


def _accuracy_record(quality: Quality, scores: Scores, policy: Policy) -> CheckRecord:
    tokens, difference = scores.tokens, quality.accuracy_difference
    outcome = held_against(difference, -policy.max_accuracy_drop, is_upper=False)
    only_base = int((tokens.is_base_right & ~tokens.is_compressed_right).sum())
    only_compressed = int((~tokens.is_base_right & tokens.is_compressed_right).sum())
    power = power_of(difference.standard_error, policy.max_accuracy_drop, policy.confidence)
    base, compressed = quality.means["is_base_right"], quality.means["is_compressed_right"]
    summary = f"{base:.2%} -> {compressed:.2%}, change {difference.estimate:+.2%} [{difference.low:+.2%}, {difference.high:+.2%}]"
    decoy_drop = _mean(scores.decoy.is_base_right) - _mean(scores.decoy.is_compressed_right)
    outcome, summary = _guarded(outcome, not decoy_drop > policy.max_accuracy_drop, summary)
    evidence = {
        "difference": difference.to_dict(),
        "McNemar": {"right only in base": only_base, "right only in compressed": only_compressed, "p": mcnemar(only_base, only_compressed)},
        "power": power.to_dict(),
        "decoy drop": decoy_drop,
    }
    limit = f"drop <= {policy.max_accuracy_drop:.1%} for the whole interval"
    return ACCURACY.record(outcome, summary, limit=limit, evidence=evidence)


def _mean(values: np.ndarray) -> float:
    """Mean of the decoy; nan where there were no tokens for one."""
    return float(np.mean(values)) if len(values) else math.nan
