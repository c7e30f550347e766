"""The report as one page that needs nothing else: verdict and key numbers, plots, every check with its evidence, provenance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.atomic import check_output_dir
from compressor.json_text import to_json
from harness.reporting.junit import to_junit
from harness.reporting.pages import by_family, render, write_texts
from harness.reporting.record import MAX_SHOWN_FINDINGS
from harness.reporting.verdict import Outcome, Verdict
from harness.validation.behaviour.metrics import perplexity, shown
from harness.validation.compare import ValidationReport
from harness.validation.report.plots import plot_kl, plot_nll, plot_sqnr, plot_tokens

_FAMILIES = {
    "files": "Files",
    "record": "Record of the compression",
    "format": "Format",
    "serving": "Where it is served",
    "weights": "Weights",
    "behaviour": "Behaviour on held-out data",
}
_SENTENCES = {
    Verdict.PASS: "Everything that could be checked is within the policy.",
    Verdict.REGRESSION: "At least one check failed.",
    Verdict.INCONCLUSIVE: "Nothing failed, but at least one check could not tell.",
}


_TALLY = {Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "inconclusive", Outcome.PASS: "passed", Outcome.SKIP: "skipped"}

_ENCODED = ("factors", "signs", "values", "diagonal")  # numbers of transforms, many of them


def render_page(report: ValidationReport) -> str:
    """Return the whole HTML document.

    Args:
        report: what to show.
    Returns:
        A document without any reference outside of itself.
    """
    counts = Counter(record.outcome for record in report.records)
    provenance = report.provenance
    record = to_json(_readable(provenance["compression"])) if provenance["compression"] else "There is no compression.json in the folder."
    data = {
        "report": report,
        "name": Path(provenance["compressed"]["path"]).name,
        "base": Path(provenance["base"]["path"]).name,
        "sentence": _SENTENCES[report.verdict],
        "tally": ", ".join(f"{counts[outcome]} {word}" for outcome, word in _TALLY.items() if counts[outcome]),
        # So that the reason is one step away.
        "not_passed": [record for record in report.records if record.outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE)],
        "tiles": _tiles(report),
        "figures": [figure for figure in _figures(report) if figure[-1]],
        "families": by_family(report.records, _FAMILIES),
        "max_findings": MAX_SHOWN_FINDINGS,
        "facts": {
            "base": provenance["base"]["path"],
            "compressed": provenance["compressed"]["path"],
            "data": {key: value for key, value in provenance["dataset"].items() if key != "sha256"},
            "data sha256": provenance["dataset"]["sha256"],
            "bootstrap seed": provenance["seed"],
            "versions": provenance["versions"],
        },
        "texts": [("Policy that was applied", to_json(report.policy.model_dump())), ("compression.json", record)],
        "files": [(role, provenance[role]["sha256"]) for role in ("base", "compressed")],
    }
    return render("validation.html.j2", data)


def _readable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without the numbers of its transforms, which are many and encoded."""
    transforms = record.get("transforms")
    if not isinstance(transforms, list):
        return dict(record)
    return {**record, "transforms": _without_encoded(transforms)}


def _without_encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: "..." if key in _ENCODED else _without_encoded(one) for key, one in value.items()}
    return [_without_encoded(one) for one in value] if isinstance(value, list) else value


def _tiles(report: ValidationReport) -> list[tuple[str, str, str]]:
    """The key numbers: label, number, note."""
    tiles: list[tuple[str, str, str]] = []
    if report.quality:
        quality = report.quality
        ratio, base, compressed = quality.perplexity_ratio, *(perplexity(quality.means[name]) for name in ("nll_base", "nll_compressed"))
        tiles += [
            (
                "Perplexity",
                f"{shown(base, 2)} → {shown(compressed, 2)}",
                f"ratio {shown(ratio.estimate)} [{shown(ratio.low)}, {shown(ratio.high)}]",
            ),
            ("Mean KL", f"{quality.kl.estimate:.4f}", f"nats per token, 99 % below {quality.kl_p99:.3f}"),
            ("Same top token", f"{quality.top1.estimate:.1%}", f"[{quality.top1.low:.1%}, {quality.top1.high:.1%}]"),
        ]
    finite = [module for module in report.modules if module.sqnr_db is not None and math.isfinite(module.sqnr_db)]
    if finite:
        worst = min(finite, key=lambda module: (module.sqnr_db or 0.0, module.name))
        tiles.append(("Lowest SQNR", f"{worst.sqnr_db:.1f} dB", worst.name))
    old, new = (report.provenance[role]["tensor_bytes"] for role in ("base", "compressed"))
    tiles.append(("Tensors on disk", f"{_megabytes(old)} → {_megabytes(new)} MB", f"{new / old:.0%} of the base" if old else ""))
    return tiles


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f}" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f}"


def _figures(report: ValidationReport) -> list[tuple[str, str, str]]:
    """The plots: title, note, SVG."""
    weights = plot_sqnr(report.modules, report.policy.min_sqnr_db.model_dump())
    figures = [
        (
            "Weights",
            "how close each weight is to the base's, and how far decoys would be (cut off at 0; halved ones at 6 dB fail by their gain)",
            weights,
        )
    ]
    if report.quality and report.scores:
        figures += [
            ("Perplexity", "the whole interval must lie left of the margin", plot_nll(report.quality, report.policy)),
            ("Distributions", "how far single predictions move", plot_kl(report.scores, report.quality, report.policy)),
            ("Tokens", "darker cells hold more tokens; above the diagonal the compressed model is worse", plot_tokens(report.scores)),
        ]
    return figures


# Writes the report folder, whole or not at all: report.html for people, report.json for programs, junit.xml for CI.

__all__ = ["check_output_dir", "write_report"]


def write_report(report: ValidationReport, output_dir: str | Path) -> Path:
    """Write the three files.

    Args:
        report: what was found.
        output_dir: folder to write; must not exist, or be empty.
    Returns:
        The path of report.html.
    Raises:
        OutputError: the folder cannot be used.
        CheckpointError: the disk is full or fails; nothing of the report is left.
    """
    target = check_output_dir(output_dir, source=report.provenance["compressed"]["path"])
    files = {
        "report.html": render_page(report),
        "report.json": to_json(report.to_dict()),
        "junit.xml": to_junit(report.records, "validate"),
    }
    write_texts(target, files)
    return target / "report.html"
