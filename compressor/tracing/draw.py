"""Draws the picture of a trace as SVG: with `dot` of graphviz where it is installed, else with matplotlib, in columns."""

from __future__ import annotations

import io
import itertools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import OutputError
from compressor.tracing.picture import Box, Picture

_FILL = {"stage": "#d6e6f7", "stages": "#b9d3ef", "outside": "#eeeeee", "ignored": "#ffffff"}
_EDGE = {"stage": "#3b6ea5", "stages": "#3b6ea5", "outside": "#777777", "ignored": "#999999"}
_PER_COLUMN = 9  # boxes
_DOT_SECONDS = 60
# Measures of the matplotlib drawing, in points.
_FONT, _LINE, _CHAR = 8.0, 11.0, 4.55
_PAD, _GAP, _SPACE, _MIN_WIDTH = 7.0, 26.0, 34.0, 200.0


def draw(picture: Picture, path: str | Path) -> str:
    """Write a picture as SVG.

    Args:
        picture: what to draw.
        path: of the file; its folder exists, and what was there is replaced.

    Returns:
        What drew it: `dot` or `matplotlib`.

    Raises:
        OutputError: the path does not end in .svg, or cannot be written.
    """
    path = check_path(path)
    drawn = _with_dot(picture)
    content, tool = (drawn, "dot") if drawn is not None else (_with_matplotlib(picture), "matplotlib")
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OutputError(f"draw: {str(path)!r} cannot be written ({error.strerror}); give another path") from error
    return tool


def check_path(path: str | Path) -> Path:
    """Refuse a path that cannot be drawn to.

    Args:
        path: of the file that will be written.

    Returns:
        The path.

    Raises:
        OutputError: it does not end in .svg, or its folder is not there.
    """
    path = Path(path)
    if path.suffix != ".svg":
        raise OutputError(f"draw: {path.name!r} is no .svg file; give a name that ends in .svg")
    if not path.parent.is_dir():
        raise OutputError(f"draw: the folder {str(path.parent)!r} is not there; make it first")
    return path


def dot_source(picture: Picture) -> str:
    """Write a picture in the language of graphviz.

    Args:
        picture: what to draw.

    Returns:
        The text of a .dot file.
    """
    font = 'fontname="Helvetica"'
    head = ["digraph trace {", f'  node [shape=box, style="filled", {font}, fontsize=11];', f"  edge [{font}, fontsize=10];"]
    head.append(f"  labelloc=t; label={_quoted(picture.title)};")
    nodes = [_dot_node(f"box{place}", box) for place, box in enumerate(picture.boxes)]
    edges = [f"  box{place} -> box{place + 1} [label={_quoted(box.arrow, left=True)}];" for place, box in enumerate(picture.boxes[1:])]
    if picture.ignored is not None:
        nodes.append(_dot_node("ignored", picture.ignored))
    return "\n".join([*head, *nodes, *edges, "}"]) + "\n"


def _dot_node(name: str, box: Box) -> str:
    style = "filled,dashed" if box.kind == "ignored" else "filled,bold" if box.kind == "stages" else "filled"
    label = _quoted((box.title, *box.lines))
    return f'  {name} [label={label}, style="{style}", fillcolor="{_FILL[box.kind]}", color="{_EDGE[box.kind]}"];'


def _quoted(lines: tuple[str, ...], *, left: bool = False) -> str:
    end = "\\l" if left else "\\n"
    text = end.join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'"{text}{end if left else ""}"'


def _with_dot(picture: Picture) -> bytes | None:
    """The SVG that `dot` makes; None where it is not installed or fails."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-Tsvg"], input=dot_source(picture).encode(), capture_output=True, timeout=_DOT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise OutputError(f"draw: {program} failed ({type(error).__name__}); repair graphviz, or take it off the PATH") from error
    return done.stdout


@dataclass(frozen=True)
class _Placed:
    """A box with its place: x and y of its upper left corner, y downward."""

    box: Box
    x: float
    y: float
    width: float
    height: float


def _with_matplotlib(picture: Picture) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    placed, width, height = _layout(picture)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trace", "font.family": "sans-serif", "font.size": _FONT}):
        figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.set_axis_off()
        for place, line in enumerate(picture.title):
            larger = {"fontsize": _FONT + 5, "fontweight": "bold"} if place == 0 else {"fontsize": _FONT + 1}
            axes.text(_SPACE, _SPACE + place * 1.5 * _LINE, line, va="top", **larger)
        flow = [one for one in placed if one.box.kind != "ignored"]
        for left, right in itertools.pairwise(flow):
            _draw_arrow(axes, left, right)
        for one in placed:
            _draw_box(axes, one)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _layout(picture: Picture) -> tuple[list[_Placed], float, float]:
    """Place the boxes in columns from left to right; the box of what is ignored comes below the last column."""
    top = _SPACE + (len(picture.title) * 1.5 + 1) * _LINE
    num_columns = -(-len(picture.boxes) // _PER_COLUMN)
    per_column = -(-len(picture.boxes) // num_columns)
    placed: list[_Placed] = []
    x = _SPACE
    for start in range(0, len(picture.boxes), per_column):
        column = picture.boxes[start : start + per_column]
        extra = [picture.ignored] if picture.ignored is not None and start + per_column >= len(picture.boxes) else []
        longest = max(len(line) for box in (*column, *extra) for line in (f"{box.title}   ", *box.lines, *box.arrow))
        width = max(_CHAR * longest + 4 * _PAD, _MIN_WIDTH)
        y = top
        for box in (*column, *extra):
            y += _arrow_height(box) if box.kind != "ignored" else _SPACE
            height = (len(box.lines) + 1) * _LINE + 2 * _PAD
            placed.append(_Placed(box, x, y, width, height))
            y += height
        x += width + 2 * _SPACE
    title_width = max(_CHAR * (len(line) + 2) * (1.7 if place == 0 else 1.15) for place, line in enumerate(picture.title)) + 2 * _SPACE
    return placed, max(x - _SPACE, title_width), max(one.y + one.height for one in placed) + _SPACE


def _arrow_height(box: Box) -> float:
    return len(box.arrow) * _LINE + _GAP


def _draw_box(axes: object, one: _Placed) -> None:
    from matplotlib.patches import FancyBboxPatch

    box = one.box
    for shift in (6.0, 3.0, 0.0) if box.kind == "stages" else (0.0,):
        patch = FancyBboxPatch(
            (one.x + shift, one.y + shift),
            one.width,
            one.height,
            boxstyle="round,pad=0,rounding_size=4",
            facecolor=_FILL[box.kind],
            edgecolor=_EDGE[box.kind],
            linewidth=1.0,
            linestyle="--" if box.kind == "ignored" else "-",
        )
        axes.add_patch(patch)  # type: ignore[attr-defined]
    for place, line in enumerate((box.title, *box.lines)):
        y = one.y + _PAD + place * _LINE
        axes.text(one.x + _PAD, y, line, va="top", fontsize=_FONT, fontweight="bold" if place == 0 else None)  # type: ignore[attr-defined]


def _draw_arrow(axes: object, start: _Placed, end: _Placed) -> None:
    """Straight down inside a column; out of the bottom of one column, up between both and into the top of the next."""
    style = {"arrowstyle": "-|>", "color": "#444444", "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
    x = end.x + 3 * _PAD
    text_y = end.y - _arrow_height(end.box) + _GAP / 2
    if start.x == end.x:
        axes.annotate("", (x, end.y), (x, start.y + start.height), arrowprops=style)  # type: ignore[attr-defined]
    else:
        middle, above = end.x - _SPACE, end.y - _arrow_height(end.box) + 2
        bottom = start.y + start.height / 2
        axes.plot([start.x + start.width, middle, middle, x, x], [bottom, bottom, above, above, end.y - 6], color="#444444", linewidth=1.0)  # type: ignore[attr-defined]
        axes.annotate("", (x, end.y), (x, end.y - 8), arrowprops=style)  # type: ignore[attr-defined]
    for place, line in enumerate(end.box.arrow):
        axes.text(x + _PAD, text_y + place * _LINE, line, va="top", fontsize=_FONT - 0.5, color="#333333")  # type: ignore[attr-defined]
