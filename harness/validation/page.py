"""The report as one page that needs nothing else: verdict and key numbers, plots, every check with its evidence, provenance."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.validation.compare import ValidationReport
from harness.validation.metrics import perplexity, shown
from harness.validation.page_style import STYLE
from harness.validation.plots import plot_kl, plot_nll, plot_sqnr, plot_tokens
from harness.verdict import Outcome, Verdict, html_badge, html_pairs, html_record, to_json

_FAMILIES = {
    "files": "Files",
    "record": "Record of the compression",
    "format": "Format",
    "weights": "Weights",
    "behaviour": "Behaviour on held-out data",
}
_SENTENCES = {
    Verdict.PASS: "Everything that could be checked is within the policy.",
    Verdict.REGRESSION: "At least one check failed.",
    Verdict.INCONCLUSIVE: "Nothing failed, but at least one check could not tell.",
}


def render_page(report: ValidationReport) -> str:
    """Return the whole HTML document.

    Args:
        report: what to show.
    Returns:
        A document without any reference outside of itself.
    """
    name = Path(report.provenance["compressed"]["path"]).name
    body = [_header(report, name), _plots(report), _checks(report), _modules(report), _provenance(report), _footer(report)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(name)}: {report.verdict.value}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _header(report: ValidationReport, name: str) -> str:
    counts = Counter(record.outcome for record in report.records)
    tally = ", ".join(f"{counts[outcome]} {word}" for outcome, word in _TALLY.items() if counts[outcome])
    base = html.escape(Path(report.provenance["base"]["path"]).name)
    return (
        f'<header>\n<p class="kicker">Validation against {base}</p>\n<h1>{html.escape(name)}</h1>\n'
        f'<p class="verdict" role="status">{html_badge(report.verdict.value)}<span>{_SENTENCES[report.verdict]} '
        f"{len(report.records)} checks: {tally}.</span></p>\n{_open_checks(report)}{_tiles(report)}\n</header>"
    )


def _open_checks(report: ValidationReport) -> str:
    """Link to every check that did not pass, so that the reason is one step away."""
    records = [record for record in report.records if record.outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE)]
    links = (f'<li><a href="#{html.escape(record.name)}">{html.escape(record.title)}</a></li>' for record in records)
    return f'<ul class="open">{"".join(links)}</ul>\n' if records else ""


_TALLY = {Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "inconclusive", Outcome.PASS: "passed", Outcome.SKIP: "skipped"}


def _tiles(report: ValidationReport) -> str:
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
    cells = (
        f'<div class="tile"><dt>{label}</dt><dd class="number">{html.escape(number)}</dd><dd class="note">{_breakable(note)}</dd></div>'
        for label, number, note in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _breakable(text: str) -> str:
    """Let a dotted name break after its dots only."""
    return html.escape(text).replace(".", ".<wbr>") if " " not in text else html.escape(text)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f}" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f}"


def _plots(report: ValidationReport) -> str:
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
    shown = [f"<figure><figcaption>{title}<span>{note}</span></figcaption>{svg}</figure>" for title, note, svg in figures if svg]
    return '<h2>At a glance</h2>\n<div class="plots">\n' + "\n".join(shown) + "\n</div>" if shown else ""


def _checks(report: ValidationReport) -> str:
    parts = ["<h2>Checks</h2>"]
    for family, title in _FAMILIES.items():
        records = [record for record in report.records if record.family == family]
        parts.append(f"<h3>{title}</h3>\n<div>\n" + "\n".join(html_record(record) for record in records) + "\n</div>")
    return "\n".join(parts)


def _modules(report: ValidationReport) -> str:
    if not report.modules:
        return ""
    rows = "\n".join(
        f'<tr><td class="name">{html.escape(module.name)}</td><td>{html.escape(module.label)}</td>'
        f'<td class="count">{module.num_weights:,}</td><td class="count">{_cell(module.sqnr_db, ".2f")}</td>'
        f'<td class="count">{module.clipped_frac:.2%}</td></tr>'
        for module in report.modules
    )
    return (
        f'<h2>Modules</h2>\n<details class="more"><summary>All {len(report.modules)} quantized modules</summary><div class="scroll"><table>'
        '<thead><tr><th scope="col">module</th><th scope="col">scheme</th><th scope="col" class="count">weights</th>'
        '<th scope="col" class="count">SQNR, dB</th><th scope="col" class="count">clipped</th></tr></thead>'
        f"<tbody>\n{rows}\n</tbody></table></div></details>"
    )


def _cell(value: float | None, spec: str) -> str:
    return "none" if value is None else format(value, spec)


def _provenance(report: ValidationReport) -> str:
    provenance = report.provenance
    facts = {
        "base": provenance["base"]["path"],
        "compressed": provenance["compressed"]["path"],
        "data": {key: value for key, value in provenance["dataset"].items() if key != "sha256"},
        "data sha256": provenance["dataset"]["sha256"],
        "bootstrap seed": provenance["seed"],
        "versions": provenance["versions"],
    }
    parts = [f'<h2>Provenance</h2>\n<div class="facts">{html_pairs(facts)}</div>']
    parts.append(_details("Policy that was applied", f"<pre>{html.escape(to_json(report.policy.model_dump()))}</pre>"))
    for role in ("base", "compressed"):
        parts.append(_details(f"sha256 of the files, {role}", _hashes(provenance[role]["sha256"])))
    record: Any = provenance["compression"]
    content = f"<pre>{html.escape(to_json(record))}</pre>" if record else "<p>There is no compression.json in the folder.</p>"
    parts.append(_details("compression.json", content))
    return "\n".join(parts)


def _details(title: str, content: str) -> str:
    return f'<details class="more"><summary>{html.escape(title)}</summary>{content}</details>'


def _hashes(hashes: Mapping[str, str]) -> str:
    rows = "".join(f'<tr><td class="name">{html.escape(name)}</td><td class="hash">{sha256}</td></tr>' for name, sha256 in hashes.items())
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'


def _footer(report: ValidationReport) -> str:
    run = report.run
    return (
        f"<footer>harness validate, {html.escape(str(run['started']))}, {run['seconds']:.1f} s on {html.escape(str(run['device']))} "
        f"({html.escape(str(run['machine']))}, {run['threads']} threads). The same content as data: report.json, junit.xml.</footer>"
    )
