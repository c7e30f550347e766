"""Pictures of reports, as SVG: equal data gives equal bytes, for there is no pyplot, no global state and no date, and ids are seeded.

A plot on a page takes its colours from the page, so that one picture serves light and dark: matplotlib draws with marker colours that occur
nowhere else; afterwards each is replaced by a CSS variable of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from compressor.atomic import whole_file
from harness.errors import HarnessError
from harness.reporting.pages import plot_html

INK, MUTED, GRID, ACCENT, LIMIT, PAPER = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--rule", ACCENT: "--accent", LIMIT: "--bad", PAPER: "--paper"}
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
}


def svg_of(figure: Figure, metadata: Mapping[str, str | None]) -> str:
    """Return a figure as an SVG document; the settings that make its ids are the caller's.

    Args:
        figure: of matplotlib.
        metadata: what matplotlib writes into it; None leaves out what it would write by itself.

    Returns:
        The document.
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict(metadata))
    return stream.getvalue()


def save_figure(figure: Figure, path: Path, name: str) -> None:
    """Write a figure, whole or not at all.

    Args:
        figure: of matplotlib.
        path: an .svg or .png file; replaced.
        name: of the figure; ids are made from it.
    """
    with matplotlib.rc_context({"svg.hashsalt": name}), whole_file(path) as partial:
        figure.savefig(partial, metadata={"Date": None} if path.suffix == ".svg" else None)


def inline_plot(name: str, description: str, size: tuple[float, float], paint: Callable[[Axes], None]) -> str:
    """Paint one pair of axes.

    Args:
        name: of the plot, unique on its page.
        description: for those who cannot see it.
        size: width and height in inches.
        paint: draws on the axes, in the colours of this module.

    Returns:
        An SVG element for a page.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        axes.tick_params(length=3, width=0.8)
        paint(axes)
        return _inline(svg_of(figure, {"Date": None, "Creator": None}), name, description)


def _inline(svg: str, name: str, description: str) -> str:
    """What matplotlib wrote, as an element of a page, which gives it its colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    # ids must be unique on the page, where several plots stand
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", svg)
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    if view_box is None:
        raise HarnessError(f"plot {name}: what matplotlib wrote has no viewBox; report its version")
    return plot_html(view_box.group(1), description, svg[svg.index(">") + 1 :].strip().removesuffix("</svg>"))
