"""HTML pages that need nothing else: templates with the style sheet inside. Every value is escaped unless a template says `safe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from compressor.atomic import whole_or_nothing
from compressor.json_text import encodable
from harness.reporting.record import MAX_SHOWN_FINDINGS, CheckRecord


def render(template: str, data: Mapping[str, Any]) -> str:
    """Fill a template.

    Args:
        template: name of a file in `templates`.
        data: what the template names; a name that is missing is an error.

    Returns:
        A document without any reference outside of itself.
    """
    return encodable(_environment().get_template(template).render(data))


def write_texts(target: Path, texts: Mapping[str, str]) -> None:
    """Write a folder of texts, whole or not at all.

    Args:
        target: folder; not there, or empty.
        texts: relative name of a file to what it holds.

    Raises:
        CheckpointError: the disk is full or fails; nothing is left.
    """
    with whole_or_nothing(target, num_bytes=sum(len(text.encode()) for text in texts.values())) as folder:
        for name, text in texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")


def by_family(records: Sequence[CheckRecord], titles: Mapping[str, str]) -> list[tuple[str, list[CheckRecord]]]:
    """Group records for a page that leaves none out.

    Args:
        records: all of them.
        titles: of families, in the order of the page; a family without one follows under its own name.

    Returns:
        A title and its records, in their order, for each family that has any.
    """
    groups: dict[str, list[CheckRecord]] = {family: [] for family in titles}
    for record in records:
        groups.setdefault(record.family, []).append(record)
    return [(titles.get(family, family), members) for family, members in groups.items() if members]


def record_html(record: CheckRecord) -> str:
    """Return one record as it stands on a page."""
    return str(_parts().record(record, MAX_SHOWN_FINDINGS))


def pairs_html(values: Mapping[str, Any]) -> str:
    """Return a mapping as a definition list; a mapping inside stands in one row."""
    return str(_parts().pairs(values))


def plot_html(view_box: str, description: str, drawing: str) -> str:
    """Return a plot as it stands on a page.

    Args:
        view_box: its size, as SVG says it.
        description: for those who cannot see it.
        drawing: what is inside; SVG of ours or of matplotlib, not escaped.

    Returns:
        An SVG element.
    """
    return str(_parts().plot(view_box, description, Markup(drawing)))


def heat_map_html(label: str, size: tuple[int, int], cell: int, cells: Sequence[tuple[int, int, float]]) -> str:
    """Return a heat map as it stands on a page.

    Args:
        label: for those who cannot see it.
        size: columns and rows.
        cell: width of one, in units of the picture.
        cells: column, row and opacity of those that are not empty.

    Returns:
        An SVG element.
    """
    return str(_parts().heat_map(label, size, cell, cells))


def _parts() -> Any:
    return _environment().get_template("parts.html.j2").module


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("harness.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update({"shown": _shown, "breakable": _breakable})
    return environment


def _shown(value: Any) -> str:
    """One piece of evidence as text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(item) for item in value) or "none"
    return str(value)


def _breakable(text: str) -> Markup:
    """Let a dotted name break after its dots only."""
    return escape(text) if " " in text else Markup(str(escape(text)).replace(".", ".<wbr>"))
