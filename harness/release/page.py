"""Writes the folder of a sign-off, whole or not at all: release.html to sign, release.json, statement.json and junit.xml."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.atomic import check_output_dir
from compressor.json_text import to_json
from harness.release.report import ReleaseReport
from harness.release.statement import statement_of
from harness.reporting.junit import to_junit
from harness.reporting.pages import by_family, render, write_texts
from harness.reporting.record import MAX_SHOWN_FINDINGS
from harness.reporting.verdict import Outcome, Verdict

_SENTENCES = {
    Verdict.PASS: "Nothing that the policy asks for speaks against a release.",
    Verdict.REGRESSION: "Not to be released: at least one check failed.",
    Verdict.INCONCLUSIVE: "Not to be signed yet: nothing failed, but at least one check could not tell.",
}
_TALLY = {Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "inconclusive", Outcome.PASS: "passed", Outcome.SKIP: "not looked at"}
_FAMILIES = {
    "policy": "The policy",
    "files": "Files",
    "record": "Record of the compression",
    "format": "Format",
    "serving": "The server's loader",
    "weights": "Weights",
    "behaviour": "Behaviour on held-out data",
    "tokenizer": "Tokenizer",
    "generation": "Generation",
    "invariance": "Padding, batch, cache, dtype",
    "device": "Devices",
    "reload": "Saved and loaded again",
    "environment": "Other versions",
    "served": "In the server",
    "command": "Commands of the policy",
    "tasks": "Tasks",
}


def render_page(report: ReleaseReport) -> str:
    """Return the whole HTML document.

    Args:
        report: what to show.

    Returns:
        A document without any reference outside of itself.
    """
    names = report.provenance["names"]
    open_records = [one for one in report.records if one.outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE) and one.name not in report.waived]
    not_run = [one for one in report.records if one.outcome is Outcome.SKIP and one.name not in report.waived]
    counts = Counter(one.outcome for one in report.records if one.name not in report.waived)
    parts = [f"{counts[outcome]} {word}" for outcome, word in _TALLY.items() if counts[outcome]]
    data = {
        "report": report,
        "names": names,
        "sentence": _SENTENCES[report.verdict],
        "tally": ", ".join([*parts, *([f"{len(report.waived)} waived"] if report.waived else [])]),
        "open_records": open_records,
        "waived": [(one, report.waived[one.name]) for one in report.records if one.name in report.waived],
        "not_run": not_run,
        "tiles": _tiles(report.provenance),
        "gates": [(one.name, one.limit, _power(one.evidence["power"])) for one in report.records if "power" in one.evidence],
        "families": by_family(report.records, _FAMILIES),
        "max_findings": MAX_SHOWN_FINDINGS,
        "facts": {
            "data": f"{report.provenance['data']['source']}, {report.provenance['data']['num_tokens']:,} tokens",
            "data sha256": report.provenance["data"]["sha256"],
            "seed": report.provenance["seed"],
            "versions": report.provenance["versions"],
        },
        "policy_text": to_json(report.policy.model_dump(mode="json")),
        "digests": [(role, report.provenance[role]) for role in ("compressed", "base")],
    }
    return render("release.html.j2", data)


def _power(power: Mapping[str, float]) -> str:
    """How likely a loss at the limit shows, and the smallest that shows in 80 % of samples; the checks have different names for both."""
    chance, least = power.get("to detect the margin", power.get("power")), power.get("as perplexity ratio")
    smallest = f"a ratio of {least:.4f}" if least is not None else f"{power['smallest_detectable_difference']:.2%}"
    return f"a loss at the limit is seen with a power of {chance:.1%}; the smallest seen with 80 % is {smallest}"


def _tiles(provenance: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    old, new = (provenance["tensor_bytes"][role] for role in ("base", "compressed"))
    tiles = [("Tensors on disk", f"{new / 1e6:,.2f} MB", f"{new / old:.0%} of the base's {old / 1e6:,.2f} MB" if old else "")]
    metrics = provenance["metrics"]
    if metrics is None:
        return tiles
    ratio, kl, top1 = (metrics[name] for name in ("perplexity_ratio", "kl", "top1_agreement"))
    return [
        ("Perplexity", f"× {ratio['estimate']:.4f}", f"of the base's, [{ratio['low']:.4f}, {ratio['high']:.4f}]"),
        ("Mean KL", f"{kl['estimate']:.4f}", f"nats per token, [{kl['low']:.4f}, {kl['high']:.4f}]"),
        ("Same top token", f"{top1['estimate']:.1%}", f"[{top1['low']:.1%}, {top1['high']:.1%}]"),
        *tiles,
    ]


def write_release(report: ReleaseReport, output_dir: str | Path) -> Path:
    """Write the four files.

    Args:
        report: what was found.
        output_dir: folder to write; must not exist, or be empty.

    Returns:
        The path of release.html.

    Raises:
        OutputError: the folder cannot be used.
        CheckpointError: the disk is full or fails; nothing is left.
    """
    target = check_output_dir(output_dir)
    texts = {
        "release.html": render_page(report),
        "release.json": to_json(report.to_dict()),
        "statement.json": to_json(statement_of(report)),
        "junit.xml": to_junit(report.for_junit(), "release"),
    }
    write_texts(target, texts)
    return target / "release.html"
