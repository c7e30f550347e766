"""Draws the picture of a trace or of mappings as SVG: with `dot` of graphviz where it is installed, else with matplotlib, in columns."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compressor.errors import OutputError
from compressor.tracing.flow import Stop, Value

# What a picture of a trace shows, whoever draws it: boxes in the order of the flow, and on each arrow what crosses there.
#
# Stages that are alike and follow each other become three boxes: the first, the ones between as one, the last. So a model of sixty equal
# layers is as easy to read as one of three.

_ALONE = 3  # so many alike are drawn one by one
_LONGEST_TURN = 16  # stages of different kinds that take turns
_SHOWN_NAMES = 4
_SHOWN_LINES = 6
_TITLE_WIDTH = 90
_WIDTH = 70  # characters of a line in a box


@dataclass(frozen=True)
class Box:
    """One box.

    Attributes:
        title: first line.
        lines: what stands below it.
        kind: `stage`, `stages` (several as one), `outside` or `ignored`.
        arrow: what crosses on the arrow into the box, a line each.
    """

    title: str
    lines: tuple[str, ...]
    kind: str
    arrow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """What is drawn.

    Attributes:
        title: above everything.
        boxes: in the order of the flow.
        ignored: the box beside the flow, or None.
        pairs: each a row with an arrow of its own, above the flow.
    """

    title: tuple[str, ...]
    boxes: list[Box] = field(default_factory=list)
    ignored: Box | None = None
    pairs: list[tuple[Box, Box]] = field(default_factory=list)


def make_picture(title: Sequence[str], batch: str, stops: Sequence[Stop], after: Sequence[str], ignored: Sequence[str]) -> Picture:
    """Decide what is drawn.

    Args:
        title: lines above the picture.
        batch: what goes in, in one line.
        stops: the stages.
        after: names of modules that run behind the last one.
        ignored: names of modules that stay as they are.

    Returns:
        The picture.
    """
    skipped = set(ignored)
    boxes = [Box("before the first target", (*textwrap.wrap(batch, _WIDTH), *_modules(stops[0].between)), "outside")]
    for run, period in _runs(stops):
        boxes.append(_stage(run[0]) if len(run) == 1 else _stages(run, period))
    last = stops[-1]
    ends = tuple(_modules([name for name in after if name not in skipped])) or ("nothing with weights",)
    boxes.append(Box(f"subgraph {len(stops) + 1}: after the last target", ends, "outside", _crossing(last.outputs, None)))
    left_out = Box("ignored: stays as it is", tuple(_few(ignored)), "ignored") if ignored else None
    lines = [part for line in title for part in textwrap.wrap(line, _TITLE_WIDTH)]
    return Picture(tuple(lines), boxes, left_out)


def size(num_bytes: int) -> str:
    """Spell a number of bytes.

    Args:
        num_bytes: the number.

    Returns:
        In B, kB, MB or GB.
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes} B"


def shortened(names: Sequence[str], shown: int = _SHOWN_NAMES) -> str:
    """Name the first few of many.

    Args:
        names: in their order.
        shown: how many.

    Returns:
        One line.
    """
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _modules(names: Sequence[str]) -> list[str]:
    return textwrap.wrap(f"runs {shortened(names)}", _WIDTH, break_long_words=False) if names else []


def _few(names: Sequence[str]) -> list[str]:
    return [*names[:_SHOWN_LINES], *([f"and {len(names) - _SHOWN_LINES} more"] if len(names) > _SHOWN_LINES else [])]


def _runs(stops: Sequence[Stop]) -> Iterator[tuple[list[Stop], int]]:
    """Stages that are drawn as one box each, with how many of them take turns there.

    Of a long row of equal ones the first, those between, and the last; where several kinds take turns, the first turn and all others.
    """
    kinds = [_kind(stop) for stop in stops]
    start = 0
    while start < len(stops):
        period, turns = _repetition(kinds[start:])
        row = list(stops[start : start + period * turns])
        start += len(row)
        if len(row) <= _ALONE or turns < _ALONE:
            yield from (([stop], 1) for stop in row)
        elif period == 1:
            yield from (([row[0]], 1), (row[1:-1], 1), ([row[-1]], 1))
        else:
            yield from (([stop], 1) for stop in row[:period])
            yield row[period:], period


def _repetition(kinds: Sequence[object]) -> tuple[int, int]:
    """How many stages at the beginning take turns, and how often: what covers most, and of those the shortest."""
    found = (1, 1)
    for period in range(1, min(_LONGEST_TURN, len(kinds) // 2) + 1):
        turns = 1
        while kinds[period * turns : period * (turns + 1)] == kinds[:period]:
            turns += 1
        if turns >= (2 if period == 1 else _ALONE) and period * turns > found[0] * found[1]:
            found = (period, turns)
    return found


def _kind(stop: Stop) -> tuple[object, ...]:
    return stop.classes, stop.num_parameters, stop.num_linears, tuple((value.name, value.shape, value.dtype) for value in stop.inputs)


def _stage(stop: Stop) -> Box:
    title = f"subgraph {stop.index + 1}: {_targets(stop)}"
    calls = (f"called {stop.num_calls} times",) if stop.num_calls > len(stop.targets) else ()
    return Box(title, (_content(stop), f"live here: {size(stop.live_bytes)}", *calls), "stage", _arrow(stop))


def _stages(run: list[Stop], period: int) -> Box:
    first, last = run[0], run[-1]
    alike = f"{len(run)} alike" if period == 1 else f"the {period} above, {len(run) // period} times more"
    names = f"{_targets(first)} to {_targets(last)}"
    content = (
        f"each {_content(first)}" if period == 1 else "in turn " + ", ".join(dict.fromkeys(" and ".join(s.classes) for s in run[:period]))
    )
    lines = (names, *textwrap.wrap(content, _WIDTH), f"live at each: up to {size(max(stop.live_bytes for stop in run))}")
    return Box(f"subgraphs {first.index + 1} to {last.index + 1}: {alike}", lines, "stages", _arrow(first))


def _targets(stop: Stop) -> str:
    names = [name or "the whole model" for name in stop.targets]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _content(stop: Stop) -> str:
    kinds = " and ".join(dict.fromkeys(stop.classes))
    many = f"{len(stop.targets)} x " if len(stop.targets) > 1 else ""
    return f"{many}{kinds}, {_number(stop.num_parameters)} parameters, {stop.num_linears} linear layers"


def _number(count: int) -> str:
    for word, scale in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {word}"
    return str(count)


def _arrow(stop: Stop) -> tuple[str, ...]:
    """What runs and what crosses between the stage before and this one."""
    runs = _modules(stop.between) if stop.index else []
    return (*runs, *_crossing(stop.inputs, stop.index))


def _crossing(values: Sequence[Value], stage: int | None) -> tuple[str, ...]:
    """New values in full; those that an earlier stage was handed too, by name."""
    fresh = [value for value in values if stage is None or value.since == stage]
    shared = [value for value in values if value not in fresh]
    lines = [_one_line(group) for group in _alike(fresh)]
    if shared:
        names = list(dict.fromkeys(_stem(value.name) for value in shared))
        lines.append(f"the same {shortened(names)} ({size(sum(value.num_bytes for value in shared))})")
    return tuple(lines)


def _alike(values: Sequence[Value]) -> Iterator[list[Value]]:
    groups: dict[tuple[object, ...], list[Value]] = {}
    for value in values:
        groups.setdefault((_stem(value.name), value.shape, value.dtype), []).append(value)
    yield from groups.values()


def _one_line(group: list[Value]) -> str:
    value = group[0]
    many = f"{len(group)} x " if len(group) > 1 else ""
    shape = " x ".join(map(str, value.shape)) or "one number"
    return f"{many}{_stem(value.name)}: {shape} {value.dtype}, {size(sum(one.num_bytes for one in group))}"


def _stem(name: str) -> str:
    return re.sub(r"\[\d+\]", "", name)


_FILL = {"stage": "#d6e6f7", "stages": "#b9d3ef", "outside": "#eeeeee", "ignored": "#ffffff"}
_EDGE = {"stage": "#3b6ea5", "stages": "#3b6ea5", "outside": "#777777", "ignored": "#999999"}
_PER_COLUMN = 9  # boxes
_DOT_SECONDS = 60
# Measures of the matplotlib drawing, in points.
_FONT, _LINE, _CHAR = 8.0, 11.0, 4.55
_PAD, _GAP, _SPACE, _MIN_WIDTH = 7.0, 26.0, 34.0, 200.0
_ARROW = {"arrowstyle": "-|>", "color": "#444444", "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}


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
    for place, pair in enumerate(picture.pairs):
        nodes += [_dot_node(f"{side}{place}", box) for side, box in zip(("from", "to"), pair, strict=True)]
        edges.append(f"  {{rank=same; from{place} -> to{place};}}")
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

    rows = _rows(picture)
    placed, width, height = _layout(picture, rows)
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
        for left, right in rows:
            y = left.y + left.height / 2
            axes.annotate("", (right.x, y), (left.x + left.width, y), arrowprops=_ARROW)
        for one in (*placed, *itertools.chain(*rows)):
            _draw_box(axes, one)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _rows(picture: Picture) -> list[tuple[_Placed, _Placed]]:
    """Place the pairs below each other, so that all left boxes are as wide, and all right ones."""
    left_width, right_width = (max((_width([pair[side]]) for pair in picture.pairs), default=0) for side in (0, 1))
    y = _top(picture) + _GAP
    rows = []
    for left, right in picture.pairs:
        height = max(_height(left), _height(right))
        x = _SPACE + left_width + 2 * _SPACE
        rows.append((_Placed(left, _SPACE, y, left_width, height), _Placed(right, x, y, right_width, height)))
        y += height + _GAP
    return rows


def _top(picture: Picture) -> float:
    return _SPACE + (len(picture.title) * 1.5 + 1) * _LINE


def _width(boxes: Sequence[Box]) -> float:
    longest = max((len(line) for box in boxes for line in (f"{box.title}   ", *box.lines, *box.arrow)), default=0)
    return max(_CHAR * longest + 4 * _PAD, _MIN_WIDTH)


def _height(box: Box) -> float:
    return (len(box.lines) + 1) * _LINE + 2 * _PAD


def _layout(picture: Picture, rows: Sequence[tuple[_Placed, _Placed]]) -> tuple[list[_Placed], float, float]:
    """Place the boxes in columns from left to right; the box of what is ignored comes below the last column."""
    top = max((one.y + one.height for one, _ in rows), default=_top(picture))
    num_columns = -(-len(picture.boxes) // _PER_COLUMN) or 1
    per_column = -(-len(picture.boxes) // num_columns) or 1
    placed: list[_Placed] = []
    x = _SPACE
    for start in range(0, len(picture.boxes) or 1, per_column):
        column = picture.boxes[start : start + per_column]
        extra = [picture.ignored] if picture.ignored is not None and start + per_column >= len(picture.boxes) else []
        width = _width([*column, *extra])
        y = top
        for box in (*column, *extra):
            y += _arrow_height(box) if box.kind != "ignored" else _SPACE
            placed.append(_Placed(box, x, y, width, _height(box)))
            y += _height(box)
        x += width + 2 * _SPACE
    title_width = max(_CHAR * (len(line) + 2) * (1.7 if place == 0 else 1.15) for place, line in enumerate(picture.title)) + 2 * _SPACE
    rightmost = max((right.x + right.width + _SPACE for _, right in rows), default=0.0)
    return placed, max(x - _SPACE, title_width, rightmost), max([top, *(one.y + one.height for one in placed)]) + _SPACE


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
    x = end.x + 3 * _PAD
    text_y = end.y - _arrow_height(end.box) + _GAP / 2
    if start.x == end.x:
        axes.annotate("", (x, end.y), (x, start.y + start.height), arrowprops=_ARROW)  # type: ignore[attr-defined]
    else:
        middle, above = end.x - _SPACE, end.y - _arrow_height(end.box) + 2
        bottom = start.y + start.height / 2
        axes.plot([start.x + start.width, middle, middle, x, x], [bottom, bottom, above, above, end.y - 6], color="#444444", linewidth=1.0)  # type: ignore[attr-defined]
        axes.annotate("", (x, end.y), (x, end.y - 8), arrowprops=_ARROW)  # type: ignore[attr-defined]
    for place, line in enumerate(end.box.arrow):
        axes.text(x + _PAD, text_y + place * _LINE, line, va="top", fontsize=_FONT - 0.5, color="#333333")  # type: ignore[attr-defined]
