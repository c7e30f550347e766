"""A picture of one attention block: its projections, what lies between them and the softmax, and the layer that takes the result.

Drawn by graphviz where its `dot` is installed, else by matplotlib, in layers from top to bottom. Projections carry the colour of their
role; a layer that serves several roles is striped in words: `Q K V`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from harness.onnx_graph.census.census import ROLES, Block
from harness.onnx_graph.graph.view import GraphView, label

_COLOURS = {"q": "#cfe0f5", "k": "#fbdcc4", "v": "#d3ecd4", "fused": "#f3b9b9", "anchor": "#e4dcf3", "": "#f2f2f2"}
_MAX_NODES = 60


@dataclass(frozen=True)
class Box:
    """One node of the picture.

    Attributes:
        text: operator, and for a linear layer its shape and roles.
        kind: key of the colour.
        layer: from the top.
    """

    text: str
    kind: str
    layer: int


@dataclass(frozen=True)
class Picture:
    """Boxes and the edges between them, by index."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]


def picture_of(view: GraphView, block: Block) -> Picture:
    """Choose what to show of a block.

    Args:
        view: of the block's graph.
        block: of that graph's census.

    Returns:
        At most 60 boxes.
    """
    anchor = next(node for node in view.model.graph.all_nodes() if label(node) == block.anchor and node.op_type == block.operator)
    roles: dict[ir.Node, list[str]] = {layer.node: [] for layer in block.leading}
    for role in ROLES:
        for layer in block.projections[role]:
            roles.setdefault(layer.node, []).append(role)
    end = _end(view, anchor)
    inside = _descendants(roles or {anchor: []}) & _ancestors({end})
    nodes = [node for node in view.nodes if node in inside or node in roles or node in (anchor, end)][:_MAX_NODES]
    index = {node: number for number, node in enumerate(nodes)}
    edges = [(index[above], index[node]) for node in nodes for above in _producers(node) if above in index]
    layers = _layers(len(nodes), edges)
    shapes = {layer.node: layer.shape for several in (*block.projections.values(), block.leading) for layer in several}
    boxes = [_box(node, roles.get(node, []), shapes.get(node), node is anchor, layers[index[node]]) for node in nodes]
    return Picture(tuple(boxes), tuple(edges))


def to_svg(picture: Picture) -> str:
    """Draw.

    Args:
        picture: boxes and edges.

    Returns:
        An SVG document.
    """
    dot = shutil.which("dot")
    return _by_graphviz(dot, picture) if dot else _by_matplotlib(picture)


def to_dot(picture: Picture) -> str:
    """Write the picture in graphviz's language.

    Args:
        picture: boxes and edges.

    Returns:
        A digraph.
    """
    lines = ["digraph block {", 'node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=10];']
    for number, box in enumerate(picture.boxes):
        text = box.text.replace('"', "'").replace("\n", "\\n")
        lines.append(f'n{number} [label="{text}", fillcolor="{_COLOURS[box.kind]}"];')
    lines += [f"n{above} -> n{below};" for above, below in picture.edges]
    return "\n".join([*lines, "}"])


def _by_graphviz(dot: str, picture: Picture) -> str:
    done = subprocess.run([dot, "-Tsvg"], input=to_dot(picture), capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def _by_matplotlib(picture: Picture) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    from harness.reporting.plots import svg_of

    places = _places(picture)
    depth = 1 + max((box.layer for box in picture.boxes), default=0)
    breadth = max((abs(x) for x, _ in places), default=0.0) + 0.6
    figure = Figure(figsize=(max(3.0, 2.9 * breadth), 0.62 * depth + 0.4))
    axes = figure.add_axes((0, 0, 1, 1))
    for above, below in picture.edges:
        arrow = {"arrowstyle": "-|>", "color": "#777777", "lw": 0.8}
        axes.annotate("", xy=_edge(places[below], 0.27), xytext=_edge(places[above], -0.27), arrowprops=arrow)
    for box, (x, y) in zip(picture.boxes, places, strict=True):
        style: dict[str, Any] = {"boxstyle": "round,pad=0.35", "facecolor": _COLOURS[box.kind], "edgecolor": "#666666", "linewidth": 0.7}
        axes.text(x, y, box.text, ha="center", va="center", fontsize=7.5, bbox=style)
    axes.set_xlim(-breadth, breadth)
    axes.set_ylim(-depth + 0.4, 0.6)
    axes.set_axis_off()
    with matplotlib.rc_context({"svg.hashsalt": "block", "svg.fonttype": "none"}):
        return svg_of(figure, {"Date": None})


def _places(picture: Picture) -> list[tuple[float, float]]:
    """Spread each layer around the middle, in the order of the middles of what lies above."""
    xs: dict[int, float] = {}
    above: dict[int, list[int]] = {}
    for source, target in picture.edges:
        above.setdefault(target, []).append(source)
    rows: dict[int, list[int]] = {}
    for number, box in enumerate(picture.boxes):
        rows.setdefault(box.layer, []).append(number)
    for layer in sorted(rows):
        wanted = {number: _mean([xs[source] for source in above.get(number, []) if source in xs]) for number in rows[layer]}
        row = sorted(rows[layer], key=lambda number: (wanted[number], number))
        for position, number in enumerate(row):
            xs[number] = wanted[number] if len(row) == 1 else position - (len(row) - 1) / 2
    return [(xs[number], -float(box.layer)) for number, box in enumerate(picture.boxes)]


def _layers(num_nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Longest way from the top; nodes come sorted."""
    layers = [0] * num_nodes
    for above, below in sorted(edges, key=lambda edge: edge[1]):
        layers[below] = max(layers[below], layers[above] + 1)
    return layers


def _box(node: ir.Node, roles: Sequence[str], shape: tuple[int, int] | None, is_anchor: bool, layer: int) -> Box:
    lines = [node.op_type]
    if shape is not None:
        lines.append(f"{' '.join(role.upper() for role in roles) or '?'}  {shape[0]} x {shape[1]}")
    kind = "anchor" if is_anchor else "" if not roles else roles[0] if len(roles) == 1 else "fused"
    return Box("\n".join(lines), kind, layer)


def _end(view: GraphView, anchor: ir.Node) -> ir.Node:
    """The layer that takes the block's result; the anchor itself if nothing does."""
    found = view.walk_forward(anchor.outputs[0], lambda node: _multiplies_constant(view, node), lambda node: True)
    return found[0][0] if found else anchor


def _multiplies_constant(view: GraphView, node: ir.Node) -> bool:
    return node.op_type in ("MatMul", "Gemm", "MatMulNBits", "FusedMatMul") and len(view.data_inputs(node)) == 1


def _producers(node: ir.Node) -> list[ir.Node]:
    return [above for value in node.inputs if value is not None and (above := value.producer()) is not None]


def _ancestors(start: set[ir.Node]) -> set[ir.Node]:
    found = set(start)
    waiting = list(start)
    while waiting:
        for above in _producers(waiting.pop()):
            if above not in found:
                found.add(above)
                waiting.append(above)
    return found


def _descendants(start: Mapping[ir.Node, object]) -> set[ir.Node]:
    found = set(start)
    waiting = list(start)
    while waiting:
        for output in waiting.pop().outputs:
            for below, _ in output.uses():
                if below not in found:
                    found.add(below)
                    waiting.append(below)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _edge(place: tuple[float, float], shift: float) -> tuple[float, float]:
    return place[0], place[1] + shift
