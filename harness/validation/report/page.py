"""The report as one page that needs nothing else: verdict and key numbers, plots, every check with its evidence, provenance."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.atomic import check_output_dir, whole_or_nothing
from harness.reporting.record import html_badge, html_pairs, html_record, to_json, to_junit
from harness.reporting.verdict import Outcome, Verdict
from harness.validation.behaviour.metrics import perplexity, shown
from harness.validation.compare import ValidationReport
from harness.validation.report.plots import plot_kl, plot_nll, plot_sqnr, plot_tokens

# The style sheet of the report page. Text, because the page must stand alone in one file.

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --card: #ffffff; --ink: #1c1d21; --muted: #646974; --rule: #e3e4e0; --accent: #2b63c4;
  --good: #1b7a43; --good-bg: #e3f3e8; --bad: #b3261e; --bad-bg: #fbe6e3; --warn: #8a5a00; --warn-bg: #fdf0d5; --none-bg: #eeeeec;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #141518; --card: #1b1d21; --ink: #e8e9ec; --muted: #9da2ad; --rule: #30333a; --accent: #82aaff;
    --good: #6fd396; --good-bg: #16301f; --bad: #ff8f85; --bad-bg: #3a1a18; --warn: #f0be62; --warn-bg: #362a12; --none-bg: #26282d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header { border-bottom: 1px solid var(--rule); padding-bottom: 1.5rem; }
.kicker { margin: 0; color: var(--muted); font-size: .875rem; }
h1 { margin: .15rem 0 1rem; font-size: clamp(1.5rem, 3.5vw, 2.1rem); line-height: 1.2; font-weight: 650; letter-spacing: -.015em;
  overflow-wrap: anywhere; }
h2 { margin: 2.75rem 0 .75rem; font-size: 1.2rem; font-weight: 650; letter-spacing: -.005em; }
h3 { margin: 1.5rem 0 .5rem; font-size: .95rem; font-weight: 600; }
.verdict { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; margin: 0; font-size: 1.05rem; }
.verdict .badge { font-size: 1.25rem; padding: .2rem .8rem; }
.open { margin: .75rem 0 0; padding-left: 1.1rem; }
a { color: var(--accent); }
.badge { display: inline-block; justify-self: start;
  padding: .05rem .5rem; border-radius: .4rem; font-size: .8rem; font-weight: 650; line-height: 1.5;
  background: var(--none-bg); color: var(--muted); white-space: nowrap; }
.badge.pass { background: var(--good-bg); color: var(--good); }
.badge.fail, .badge.regression { background: var(--bad-bg); color: var(--bad); }
.badge.inconclusive { background: var(--warn-bg); color: var(--warn); }
.tile { margin: 0; }
.tile dt { color: var(--muted); font-size: .85rem; }
.tile .pair { white-space: nowrap; }
dd { margin: 0; }
.tile .number { font-size: 1.3rem; font-weight: 600; line-height: 1.35; letter-spacing: -.02em;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.tile .note { color: var(--muted); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 2rem 2.5rem; }
figure { margin: 0; }
figcaption { margin-bottom: .4rem; font-weight: 600; font-size: .95rem; }
figcaption span { display: block; font-weight: 400; color: var(--muted); font-size: .875rem; }
svg { display: block; width: 100%; height: auto; font-family: inherit; overflow: visible; }
.check { border-top: 1px solid var(--rule); }
.check:last-child { border-bottom: 1px solid var(--rule); }
.check summary { display: grid; grid-template-columns: 7.5rem 1fr; gap: .5rem; padding: .6rem 0; cursor: pointer; align-items: start;
  list-style: none; }
.check summary::-webkit-details-marker { display: none; }
.check summary:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.check summary:hover strong { color: var(--accent); }
.what strong { display: block; font-weight: 550; }
.what span { display: block; color: var(--muted); font-size: .92rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.evidence { margin: 0 0 1rem 8rem; font-size: .9rem; }
.limit { margin: 0 0 .5rem; color: var(--muted); }
code, pre, td.name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .85em; }
code { background: var(--none-bg); border-radius: .3rem; padding: .1rem .35rem; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .15rem 1.25rem; margin: 0;
  font-variant-numeric: tabular-nums; }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1.5rem; margin-top: 1.75rem; }
.evidence dt, .facts dt { color: var(--muted); }
.pair { white-space: nowrap; }
dd { margin: 0; overflow-wrap: anywhere; }
.evidence ul { margin: .75rem 0 0; padding-left: 1.1rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { color: var(--muted); font-weight: 550; }
.count { text-align: right; }
td.hash { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .78rem; overflow-wrap: anywhere; }
pre { overflow: auto; max-height: 28rem; margin: .5rem 0; padding: .9rem 1rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: .5rem; line-height: 1.45; }
.more > summary { cursor: pointer; color: var(--accent); padding: .35rem 0; }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--rule); color: var(--muted); font-size: .85rem; }
@media (max-width: 40rem) {
  main { padding-top: 1.5rem; }
  .check summary { grid-template-columns: 1fr; gap: .25rem; }
  .evidence { margin-left: 0; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dl dt { margin-top: .4rem; }
}
@media print { body { background: #fff; } .check, figure { break-inside: avoid; } pre { max-height: none; } }
""".strip()

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
    with whole_or_nothing(target, num_bytes=sum(len(text.encode()) for text in files.values())) as folder:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    return target / "report.html"
