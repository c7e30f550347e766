"""The plots of the report: weights, perplexity, distributions, tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from harness.reporting.plots import ACCENT, GRID, INK, LIMIT, MUTED, PAPER, inline_plot
from harness.validation.behaviour.bootstrap import Interval
from harness.validation.behaviour.quality import Quality
from harness.validation.behaviour.scoring import Scores
from harness.validation.inspection import ModuleInspection
from harness.validation.policy import Policy

_MAX_ROWS = 14


def plot_sqnr(modules: Sequence[ModuleInspection], limits: Mapping[str, float]) -> str:
    """Plot the SQNR of every module, a row per kind of module, with the limit and the decoys.

    Args:
        modules: the inspections; those without a finite SQNR are left away.
        limits: least SQNR by number format.
    Returns:
        An SVG element; empty where nothing can be shown.
    """
    rows: dict[str, list[float]] = {}
    for module in modules:
        if module.sqnr_db is not None and math.isfinite(module.sqnr_db):
            rows.setdefault(module.name.rpartition(".")[2], []).append(module.sqnr_db)
    if not rows:
        return ""
    kinds = sorted(rows, key=lambda kind: min(rows[kind]))[:_MAX_ROWS]
    decoys = [max(0.0, decoy.sqnr_db) for module in modules for decoy in module.decoys.values() if decoy.sqnr_db < math.inf]
    lines = sorted({limits[module.limit_name] for module in modules})

    def paint(axes: Axes) -> None:
        for height, kind in enumerate(reversed(kinds)):
            axes.plot(rows[kind], [height] * len(rows[kind]), "o", color=ACCENT, alpha=0.55, markersize=5.5, markeredgewidth=0)
            axes.plot([float(np.median(rows[kind]))], [height], "|", color=INK, markersize=11, markeredgewidth=1.4)
        if decoys:
            axes.plot(decoys, [-1] * len(decoys), "x", color=MUTED, alpha=0.5, markersize=4.5)
        for limit in lines:
            axes.axvline(limit, color=LIMIT, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.annotate(f"limit {limit:g} dB", (limit, 1.0), xycoords=("data", "axes fraction"), xytext=(4, 2),
                          textcoords="offset points", color=LIMIT, fontsize=8.5, va="bottom")  # fmt: skip
        axes.set_yticks(range(-1, len(kinds)), ["decoys", *reversed(kinds)])
        axes.set_ylim(-1.6, len(kinds) - 0.4)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_xlabel("SQNR of the decoded weight, dB; a dot per module, a bar at the median of its kind")

    worst = ", ".join(f"{kind} {min(rows[kind]):.1f} dB" for kind in kinds)
    return inline_plot("sqnr", f"Lowest SQNR by kind of module: {worst}", (6.4, 1.3 + 0.32 * len(kinds)), paint)


def plot_nll(quality: Quality, policy: Policy) -> str:
    """Plot the bootstrap distribution of the NLL difference with its interval and the margin.

    Args:
        quality: the measurements.
        policy: holds the margin.
    Returns:
        An SVG element.
    """
    margin, interval = math.log(policy.max_perplexity_ratio), quality.nll_difference

    def paint(axes: Axes) -> None:
        counts, edges = np.histogram(quality.resampled_nll, bins=48)
        heights = counts / max(1, counts.max())
        axes.fill_between(np.repeat(edges, 2)[1:-1], np.repeat(heights, 2), color=ACCENT, alpha=0.35, linewidth=0)
        _paint_interval(axes, interval, -0.12)
        axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.set_ylim(-0.28, 1.15)
        span = max(margin, interval.high) - min(0.0, interval.low)
        axes.set_xlim(min(0.0, interval.low) - 0.06 * span, max(margin, interval.high) + 0.06 * span)
        _mark(axes, margin, f"margin: ratio {policy.max_perplexity_ratio:g}", LIMIT, is_limit=True)
        axes.yaxis.set_visible(False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("NLL of compressed minus base, nats per token; bootstrap over sequences")

    description = f"NLL difference {interval.estimate:.4f}, interval {interval.low:.4f} to {interval.high:.4f}, margin {margin:.4f}"
    return inline_plot("nll", description, (6.4, 2.7), paint)


def _paint_interval(axes: Axes, interval: Interval, height: float) -> None:
    axes.plot([interval.low, interval.high], [height, height], color=INK, linewidth=1.8, solid_capstyle="butt")
    axes.plot([interval.low, interval.high], [height, height], "|", color=INK, markersize=8, markeredgewidth=1.4)
    axes.plot([interval.estimate], [height], "o", color=INK, markersize=5)


def _mark(axes: Axes, place: float, text: str, color: str, *, level: int = 0, is_limit: bool = False) -> None:
    """Draw a line across axes whose limits stand, and its label from there towards the middle, so that no text leaves the axes."""
    is_left = (axes.transScale + axes.transLimits).transform((place, axes.get_ylim()[0]))[0] < 0.5
    axes.axvline(place, color=color, linewidth=1.2, linestyle=(0, (4, 3)) if is_limit else "-")
    axes.annotate(text, (place, 1.0 - 0.11 * level), xycoords=("data", "axes fraction"), xytext=(4 if is_left else -4, -2),
                  textcoords="offset points", color=color, fontsize=8.5, ha="left" if is_left else "right", va="top", zorder=5,
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2, "alpha": 0.85})  # fmt: skip


def plot_kl(scores: Scores, quality: Quality, policy: Policy) -> str:
    """Plot how KL(base || compressed) spreads over the tokens.

    Args:
        scores: of both models.
        quality: the measurements.
        policy: holds the limit.
    Returns:
        An SVG element.
    """
    smallest = 1e-7  # what is less stands there, on a logarithmic axis
    values = np.maximum(scores.tokens.kl, smallest)
    marks = {"mean": (quality.kl.estimate, INK), "p99": (quality.kl_p99, MUTED), "limit of the mean": (policy.max_mean_kl, LIMIT)}
    places = [max(value, smallest) for value, _ in marks.values()]

    def paint(axes: Axes) -> None:
        edges = np.logspace(math.log10(values.min()), math.log10(max(values.max(), values.min() * 10)), 61)
        shares = np.histogram(values, bins=edges)[0] / len(values)
        axes.fill_between(np.repeat(edges, 2)[1:-1], np.repeat(shares, 2), color=ACCENT, alpha=0.35, linewidth=0)
        axes.set_xscale("log")
        axes.set_xlim(min(edges[0], *places), max(edges[-1], *places))
        for level, (place, (label, (value, color))) in enumerate(zip(places, marks.items(), strict=True)):
            _mark(axes, place, f"{label} {value:.3g}", color, level=level, is_limit=color == LIMIT)
        axes.set_ylim(0, shares.max() * 1.15)
        axes.yaxis.set_visible(False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("KL(base || compressed), nats; share of tokens, logarithmic axis")

    description = f"KL per token: mean {quality.kl.estimate:.4f}, 99th percentile {quality.kl_p99:.3f}, limit {policy.max_mean_kl:g}"
    return inline_plot("kl", description, (6.4, 2.7), paint)


def plot_tokens(scores: Scores) -> str:
    """Plot the NLL of every token under both models as a density; a good compression lies on the diagonal.

    Args:
        scores: of both models.
    Returns:
        An SVG element.
    """
    base, compressed = scores.tokens.nll_base, scores.tokens.nll_compressed
    top = float(np.quantile(np.concatenate([base, compressed]), 0.999)) or 1.0
    edges = np.linspace(0, top, 45)
    counts = np.histogram2d(base, compressed, bins=[edges, edges])[0]
    columns, rows = np.nonzero(counts)
    alphas = 0.08 + 0.92 * np.log1p(counts[columns, rows]) / np.log1p(counts.max())
    corners = [[(edges[i], edges[j]), (edges[i + 1], edges[j]), (edges[i + 1], edges[j + 1]), (edges[i], edges[j + 1])]
               for i, j in zip(columns, rows, strict=True)]  # fmt: skip

    def paint(axes: Axes) -> None:
        colors = [(*matplotlib.colors.to_rgb(ACCENT), round(float(alpha), 2)) for alpha in alphas]
        axes.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="none", linewidths=0))
        axes.plot([0, top], [0, top], color=INK, linewidth=0.7, alpha=0.6)
        axes.set_xlim(0, top)
        axes.set_ylim(0, top)
        axes.set_xlabel("NLL of the token, base, nats")
        axes.set_ylabel("compressed")

    correlation = float(np.corrcoef(base, compressed)[0, 1]) if len(base) > 1 and base.std() and compressed.std() else math.nan
    return inline_plot("tokens", f"Token NLL, base against compressed; correlation {correlation:.4f}", (6.4, 3.6), paint)
