"""Writes the report folder, whole or not at all: report.html for people, report.json for programs, junit.xml for CI."""

from __future__ import annotations

from pathlib import Path

from compressor.model.atomic_folder import check_output_dir, whole_or_nothing
from harness.validation.compare import ValidationReport
from harness.validation.page import render_page
from harness.verdict import to_json, to_junit

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
