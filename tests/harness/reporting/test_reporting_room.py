"""Reports have one home: who makes HTML, JUnit or an enumeration of outcomes elsewhere is told here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[3] / "harness"
MAKERS = {"jinja2": "reporting/pages.py", "markupsafe": "reporting/pages.py", "xml": "reporting/junit.py", "html": "nowhere"}
"""Module to the one file that may import it."""
WORDS = {"Outcome": "reporting/verdict.py", "Verdict": "reporting/verdict.py"}
TAG = re.compile(r"<(a|body|div|html|img|li|p|pre|rect|span|svg|table|td|tr|ul)( \w+=|>)")


def strays(root: Path) -> Iterator[str]:
    """Yield what is made outside of its home."""
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                found = [name for name in named if MAKERS.get(name.split(".")[0], place) != place]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = ["a tag"] if TAG.search(node.value) else []
            else:
                found = [node.name] if isinstance(node, ast.ClassDef) and WORDS.get(node.name, place) != place else []
            yield from (f"{place}:{getattr(node, 'lineno', 0)}: {one}" for one in found)


def test_reports_are_made_in_the_reporting_room_alone() -> None:
    assert list(strays(HARNESS)) == []


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from jinja2 import Environment", "jinja2"),
        ("import xml.etree.ElementTree", "xml.etree.ElementTree"),
        ("import html", "html"),
        ("page = f'<div class=\"x\">{1}'", "a tag"),
        ("class Outcome: ...", "Outcome"),
    ],
)
def test_what_is_made_elsewhere_is_told(code: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(code, encoding="utf-8")
    assert list(strays(tmp_path)) == [f"report.py:1: {told}"]
