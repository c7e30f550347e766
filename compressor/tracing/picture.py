"""What a picture of a trace shows, whoever draws it: boxes in the order of the flow, and on each arrow what crosses there.

Stages that are alike and follow each other become three boxes: the first, the ones between as one, the last. So a model of sixty equal
layers is as easy to read as one of three.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from compressor.tracing.flow import Stop, Value

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
    """A picture of one trace.

    Attributes:
        title: above everything.
        boxes: in the order of the flow.
        ignored: the box beside the flow, or None.
    """

    title: tuple[str, ...]
    boxes: list[Box] = field(default_factory=list)
    ignored: Box | None = None


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
