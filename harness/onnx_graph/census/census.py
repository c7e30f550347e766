"""The census: every attention block of a graph, and which linear layers its Q, K and V come from.

From each Softmax the walk goes back to the product of two activations (Q and K) and forward to the one with V; from Q, K and V back, each
to the first linear layer. No pattern of operators is matched: exporters and optimizers produce dozens of chains between these points.
Fused attention operators name their Q, K and V themselves. Three layers are SEPARATE, two (or one that holds a role of
another block, too) PARTLY_FUSED, one FUSED; an operator that holds
the packed weight itself has ABSORBED them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import onnx_ir as ir

from harness.onnx_graph.census.chains import Chains
from harness.onnx_graph.census.flow import PACKED_ATTENTION, PROJECTED_ATTENTION, FlowMap, Shapes, is_opaque, operands
from harness.onnx_graph.census.parts import shared_across_blocks, takes_a_part
from harness.onnx_graph.census.products import SOFTMAX, Products, is_matrix_product, shown
from harness.onnx_graph.census.projections import Projection, are_parts_of_copies, find_projection, share_a_weight
from harness.onnx_graph.census.score_axes import ScoreAxes
from harness.onnx_graph.census.streams import BlockPlace, Streams, block_places, find_unread
from harness.onnx_graph.graph.constants import Constants
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.graph.view import GraphView, domain, label
from harness.reporting.text import printable
from harness.reporting.verdict import Verdict

ROLES = ("q", "k", "v")
_INSIDE = "it lies inside a subgraph of If, Loop or Scan, which is not followed"


class Status(StrEnum):
    """What became of the three projections of one block."""

    SEPARATE = "SEPARATE"
    PARTLY_FUSED = "PARTLY_FUSED"
    FUSED = "FUSED"
    ABSORBED = "ABSORBED"
    MISSING = "MISSING"
    AMBIGUOUS = "AMBIGUOUS"
    UNKNOWN = "UNKNOWN"

    @property
    def verdict(self) -> Verdict:
        """What that means for who asks that Q, K and V are apart."""
        if self in (Status.MISSING, Status.AMBIGUOUS, Status.UNKNOWN):
            return Verdict.INCONCLUSIVE
        return Verdict.PASS if self is Status.SEPARATE else Verdict.REGRESSION


@dataclass(frozen=True, eq=False)
class Block:
    """One attention block.

    Attributes:
        index: position among the blocks of the graph.
        kind: `self`, or `cross` where K or V come from another activation than Q.
        operator: `Softmax`, the fused attention operator, or the last product of a block of unknown roles.
        anchor: name of that node.
        projections: the linear layers that each role comes from; exactly one where the graph is clear.
        status: how they lie.
        note: why a role is missing or not clear, or what is unusual; else empty.
        leading: the layers that lead to a block of unknown roles.
        place: in the data flow.
        taken: what the products of the block take for each role, computed from its layer.
    """

    index: int
    kind: str
    operator: str
    anchor: str
    projections: Mapping[str, tuple[Projection, ...]]
    status: Status
    note: str = ""
    leading: tuple[Projection, ...] = ()
    place: BlockPlace = field(default_factory=BlockPlace)
    taken: Mapping[str, ir.Value] = field(default_factory=dict)

    @property
    def runs_unknown_times(self) -> bool:
        """Whether it lies in the body of a Loop or Scan, which runs as often as it runs, or in a branch of an If."""
        return self.note == _INSIDE

    def projection(self, role: str) -> Projection | None:
        """Return the layer of a role, None where there is not exactly one."""
        found = self.projections[role]
        return found[0] if len(found) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the block as JSON types."""
        roles = {role: [one.to_dict() for one in layers] for role, layers in self.projections.items()}
        fixed = {"index": self.index, "kind": self.kind, "operator": self.operator, "anchor": self.anchor, "note": self.note}
        return {**fixed, "status": self.status.value, "roles": roles}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two activations combined to what only leaves the graph, as the logits of CLIP: it mixes nothing, and nobody says what it means.

    Attributes:
        operator: of the product.
        anchor: its name.
        layers: the linear layers that lead to it.
    """

    operator: str
    anchor: str
    layers: tuple[Projection, ...]

    def text(self) -> str:
        """Return one line, for people."""
        return f"{self.operator} {self.anchor} combines two activations and only leaves the graph; fed by {_shown(self.layers)}"


@dataclass(frozen=True, eq=False)
class Census:
    """All blocks of a graph, in its order; those of unknown roles come last.

    Attributes:
        blocks: may be empty: then there is no attention, which no contract takes for a pass.
        comparisons: products that are no attention and not read.
        notes: what is taken for granted about the graph.
        view: of the graph, in which the nodes and values of the blocks lie.
    """

    blocks: tuple[Block, ...]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    view: GraphView | None = None

    @property
    def read(self) -> tuple[Block, ...]:
        """Blocks that are known to be attention."""
        return tuple(block for block in self.blocks if block.status is not Status.UNKNOWN)

    @property
    def unknown(self) -> tuple[Block, ...]:
        """What mixes activations like attention and is not read."""
        return tuple(block for block in self.blocks if block.status is Status.UNKNOWN)

    @property
    def counts(self) -> Counter[str]:
        """How many blocks there are of each status."""
        return Counter(block.status.value for block in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Return the census as JSON types."""
        blocks = [block.to_dict() for block in self.blocks]
        comparisons = [{"operator": one.operator, "anchor": one.anchor} for one in self.comparisons]
        found = {"num_blocks": len(blocks), "counts": dict(sorted(self.counts.items())), "blocks": blocks, "comparisons": comparisons}
        return found | {"notes": list(self.notes)}

    def text(self) -> str:
        """Return one line per block, for people."""
        lines = []
        for block in self.blocks:
            roles = "; ".join(f"{role} {_shown(block.projections[role])}" for role in ROLES)
            shown_roles = {Status.ABSORBED: "packed in the operator", Status.UNKNOWN: "roles unknown"}.get(block.status, roles)
            note = f" ({block.note})" if block.note else ""
            lines.append(f"block {block.index} {block.kind:5} {block.operator:20} {block.status.value:12} {shown_roles}{note}")
        unread = [f"not read: {one.text()}" for one in self.comparisons]
        shown = [*(lines or ["no attention block was found"]), *unread, *(f"note: {note}" for note in self.notes)]
        return "\n".join(map(printable, shown))


_MAX_SHOWN = 6
_AFTER_SOFTMAX = frozenset(
    (
        *("Cast", "Dropout", "Identity", "Where", "Mul", "QuantizeLinear", "DequantizeLinear"),
        *("Reshape", "Transpose", "Expand", "Slice", "Squeeze", "Unsqueeze"),
    )
)


def census(model: Any) -> Census:
    """Find every attention block, and what mixes activations like attention and is not read.

    Not seen: recurrences (LSTM, GRU, RNN), a Loop, Scan or If without a matrix product, sorting, lookups of what a single layer chose
    (routers, detectors), messages along edges that are given, and sampling, Fourier transforms or repetition that other operators spell
    out.

    Args:
        model: path, bytes, ModelProto or onnx_ir Model.

    Returns:
        Blocks in the order of the graph.

    Raises:
        UserInputError: the model cannot be read.
    """
    return _Search(GraphView(load_graph(model))).run()


@dataclass(frozen=True, eq=False)
class _Role:
    """Where one of Q, K and V comes from.

    Attributes:
        layers: the first linear layers behind it.
        unread: nodes behind it that cannot be followed.
        value: what the product takes for this role.
    """

    layers: tuple[Projection, ...]
    unread: tuple[ir.Node, ...] = ()
    value: ir.Value | None = None


class _Search:
    """One walk over one graph."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._constants, self._flow, self._shapes = Constants(view), FlowMap(view), Shapes(view)
        self._products = Products(view, self._flow, self._shapes)
        self._streams = Streams(view, self._flow, self._products)
        self._projections: dict[ir.Node, Projection | None] = {}
        self._blocks: list[Block] = []
        self._anchors: list[ir.Node] = []
        self._read: set[ir.Node] = set()

    def run(self) -> Census:
        """Read every block, then what is left over."""
        softmaxes = [node for node in self._view.nodes if node.op_type in SOFTMAX and not is_opaque(node)]
        found = {node: triple for node in softmaxes if (triple := self._around(node)) is not None}
        mixes = Counter(mix for _, several in found.values() for mix in {mix for mix, _ in several})
        for node in self._view.nodes:
            is_microsoft = domain(node) == "com.microsoft"
            if is_microsoft and node.op_type in PACKED_ATTENTION:
                self._add(node, Status.ABSORBED)
            elif (is_microsoft and node.op_type in PROJECTED_ATTENTION) or (not domain(node) and node.op_type == "Attention"):
                self._add_fused(node)
            elif node in found:
                self._add_decomposed(node, *found[node], shared=any(mixes[mix] > 1 for mix, _ in found[node][1]))
        self._add_subgraphs()
        loose = find_unread(self._view, self._flow, self._products, self._read)
        for group in loose.blocks:
            self._add_unknown(group)
        places = block_places(self._view, self._anchors)
        blocks = tuple(replace(block, place=place) for block, place in zip(self._apart(), places, strict=True))
        comparisons = tuple(Comparison(node.op_type, label(node), self._leading_to([node])) for node in loose.comparisons)
        return Census(blocks, comparisons, self._view.notes, self._view)

    def _apart(self) -> list[Block]:
        """Give the blocks, of which none is SEPARATE whose layer holds a role of another one, too."""
        clear = [(block, role, one) for block in self._blocks for role in ROLES if (one := block.projection(role)) is not None]
        taken = {(block.index, role): (one, block.taken.get(role)) for block, role, one in clear}
        shared = shared_across_blocks(self._view, self._shapes, taken)
        held = Counter(one.node for one, _ in taken.values())
        apart = []
        for block in self._blocks:
            if block.status is Status.SEPARATE:
                parts = [role for role in ROLES if self._takes_a_part_alone(*taken[block.index, role], held)]
                beside = [f"{role.upper()} takes a part of {_shown(block.projections[role])}" for role in parts]
                status = Status.PARTLY_FUSED if block.index in shared else block.status
                block = replace(block, status=status, note="; ".join(filter(None, [block.note, *shared.get(block.index, ()), *beside])))
            apart.append(block)
        return apart

    def _takes_a_part_alone(self, layer: Projection, value: ir.Value | None, held: Mapping[ir.Node, int]) -> bool:
        """Whether the rest of a layer goes to what is no role of any block, such as a gate."""
        return held[layer.node] == 1 and takes_a_part(self._view, self._shapes, layer, value)

    def _around(self, softmax: ir.Node) -> tuple[list[ir.Node], list[tuple[ir.Node, int]]] | None:
        """The products before and behind a softmax; None for one of a classifier or a router."""
        scores = self._view.walk_back(softmax.inputs[0], self._products.__contains__, self._products.is_layer)
        mixes = self._view.walk_forward(softmax.outputs[0], self._products.__contains__, lambda node: node.op_type in _AFTER_SOFTMAX)
        readable = all(is_matrix_product(node) for node in (*scores, *(mix for mix, _ in mixes)))
        return (scores, mixes) if scores and mixes and readable else None

    def _add_fused(self, node: ir.Node) -> None:
        inputs = [*node.inputs, None, None][:3]
        for position in (1, 2):  # what is left out is packed in the one before
            inputs[position] = inputs[position] or inputs[position - 1]
        self._add_roles(node, {role: self._role(value) for role, value in zip(ROLES, inputs, strict=True)})

    def _add_decomposed(self, softmax: ir.Node, scores: list[ir.Node], mixes: list[tuple[ir.Node, int]], shared: bool) -> None:
        mix, position = mixes[0]
        weights = mix.inputs[position]
        self._read |= {*scores, *(node for node, _ in mixes)}
        values = [value for value in self._flow.factors(mix) if value is not weights]
        roles = {"q": _Role(()), "k": _Role(()), "v": self._role(values[0] if values else None)}
        if len(scores) > 1 or len(mixes) > 1 or shared:
            self._add(softmax, Status.AMBIGUOUS, _layers(roles), "several products of two activations meet at this softmax")
            return
        axes = ScoreAxes(scores[0], self._constants, self._shapes, self._carries)
        key, summed = axes.key(softmax), axes.summed(mix, weights) if weights is not None else None
        if key is None or summed is None or key != summed:
            why = "cannot be followed" if key is None or summed is None else "is not the one that the product with V sums over"
            self._add(softmax, Status.AMBIGUOUS, _layers(roles), f"the axis of the scores that this softmax runs over {why}")
            return
        factors = self._flow.factors(scores[0])
        roles["q"], roles["k"] = self._role(factors[1 - key]), self._role(factors[key])
        self._add_roles(softmax, roles)

    def _carries(self, value: ir.Value) -> bool:
        node = value.producer()
        return self._flow.is_activation(value) and node is not None and not self._products.ends_walk(node)

    def _add_roles(self, node: ir.Node, found: Mapping[str, _Role]) -> None:
        layers, notes = self._own(_layers(found))
        notes += [f"{role.upper()} comes out of {shown(found[role].unread)}, which is not read" for role in ROLES if found[role].unread]
        counts = [len(layers[role]) for role in ROLES]
        if not all(counts):
            status = Status.MISSING
            empty = [role for role in ROLES if not layers[role]]
            notes = notes or [f"no linear layer leads to {', '.join(empty)}"]
        elif max(counts) > 1 or any(role.unread for role in found.values()):
            status = Status.AMBIGUOUS
        elif (split := (chains := Chains.behind(layers, self._behind)).split(self._view, self._shapes)) is not None:
            status = Status.AMBIGUOUS
            notes.append(f"several roles take their parts of {_shown([split])}, and go through further layers")
        else:
            layers = {role: (chains.projection(role),) for role in ROLES}
            held = self._num_weights(layers, found)
            status = {3: Status.SEPARATE, 2: Status.PARTLY_FUSED, 1: Status.FUSED}[held]
            if held < len({layers[role][0].node for role in ROLES}):
                notes.append("products of their own, on one weight, equal copies of it, or what is computed from it")
            notes += self._told_reused(layers, found)
        self._add(node, status, layers, "; ".join(notes), taken={role: one.value for role, one in found.items() if one.value is not None})

    def _num_weights(self, layers: Mapping[str, tuple[Projection, ...]], found: Mapping[str, _Role]) -> int:
        """How many weights the roles have. Equal copies of which each role takes a part are one: a quantizer meets all of it in each."""
        held: dict[str, object] = {role: tuple(each.sources for each in (one, *one.beside)) for role, (one, *_) in layers.items()}
        for one, other in itertools.combinations(ROLES, 2):
            first, second = layers[one][0], layers[other][0]
            if held[one] != held[other] and (are_parts_of_copies(first, second) or share_a_weight(first, second)):
                held[other] = held[one]
            if held[one] != held[other] and first.marks == second.marks:
                parts = (takes_a_part(self._view, self._shapes, layers[role][0], found[role].value) for role in (one, other))
                held[other] = held[one] if all(parts) else held[other]
        return len(set(held.values()))

    def _own(self, layers: dict[str, tuple[Projection, ...]]) -> tuple[dict[str, tuple[Projection, ...]], list[str]]:
        """Keep the layers that are a role's own: not what feeds another layer of it, nor what another role is projected from."""
        direct = {role: self._nearest(layers[role]) for role in ROLES}
        passed = {role: [one for one in layers[role] if one not in direct[role]] for role in ROLES}
        notes = [
            f"{role.upper()} takes a part from {_shown(passed[role])}, past its own layer"
            for role in ROLES
            if passed[role] and not all(one.turns for one in direct[role])
        ]
        direct |= self._turned(direct, passed)
        own = dict(direct)
        for role in ROLES:
            past = self._reused(role, direct[role]) is None
            above = [other for other in ROLES if other != role and self._all_feed(direct[role], direct[other], past)]
            if above:
                own[role] = ()
                notes.append(f"{role.upper()} has no linear layer of its own: it is what {above[0].upper()} is projected from")
        return own, notes

    def _nearest(self, layers: Sequence[Projection]) -> tuple[Projection, ...]:
        return tuple(one for one in layers if not any(self._feeds(one, other) for other in layers))

    def _turned(
        self, direct: Mapping[str, tuple[Projection, ...]], passed: Mapping[str, Sequence[Projection]]
    ) -> dict[str, tuple[Projection, ...]]:
        """Roles that a rotation of positions turns behind a layer which another role shares: x cos + (x P) sin takes x past P as well."""
        behind = {role: self._nearest(passed[role]) for role in ROLES if passed[role] and all(one.turns for one in direct[role])}
        taken = {role: {one.node for one in behind.get(role, direct[role])} for role in ROLES}
        return {role: found for role, found in behind.items() if any(taken[role] & taken[other] for other in ROLES if other != role)}

    def _reused(self, role: str, layers: Sequence[Projection]) -> Block | None:
        """The first block that has the same layer in this role: a later one that attends with its K and V depends on them by its Q, too."""
        alike = (block for block in self._blocks if len(layers) == 1 and (one := block.projection(role)) and one.node is layers[0].node)
        return next(alike, None)

    def _told_reused(self, layers: Mapping[str, tuple[Projection, ...]], found: Mapping[str, _Role]) -> list[str]:
        """Say which roles are those of an earlier block. One that takes all roles of it, as its heads do, is not another block."""
        held = {role: self._reused(role, layers[role]) for role in ROLES}
        if all(held.values()):
            return []
        whole = [role for role in ROLES if not takes_a_part(self._view, self._shapes, layers[role][0], found[role].value)]
        return [f"{role.upper()} is shared with block {block.index}" for role in whole if (block := held[role]) is not None]

    def _all_feed(self, layers: Sequence[Projection], others: Sequence[Projection], past_products: bool) -> bool:
        return bool(layers) and all(any(self._feeds(one, other, past_products) for other in others) for one in layers)

    def _feeds(self, one: Projection, other: Projection, past_products: bool = True) -> bool:
        return one.node is not other.node and self._streams.leads(one.node, other.activation, past_products)

    def _add_subgraphs(self) -> None:
        attention = SOFTMAX | PROJECTED_ATTENTION | PACKED_ATTENTION
        nodes = list(self._view.subgraph_nodes())
        anchors = [node for node in nodes if node.op_type in attention or is_opaque(node)]
        for node in anchors or [node for node in nodes if self._multiplies_variables(node)]:
            self._add(node, Status.AMBIGUOUS, note=_INSIDE)

    def _multiplies_variables(self, node: ir.Node) -> bool:
        """Whether a node of a subgraph sums products of two values that are computed or given, as a matrix product or a convolution."""
        return sum(not self._view.is_constant_inside(value) for value in operands(node)) > 1

    def _add_unknown(self, group: Sequence[ir.Node]) -> None:
        layers = self._leading_to(group)
        fed = f", fed by {_shown(layers)}" if layers else ""
        self._add(group[-1], Status.UNKNOWN, note=f"it may mix activations in a way that is not read: {shown(group)}{fed}", leading=layers)

    def _leading_to(self, nodes: Sequence[ir.Node]) -> tuple[Projection, ...]:
        found = [one for node in nodes for value in node.inputs for one in self._role(value).layers]
        return tuple({one.node: one for one in found}.values())

    def _add(
        self,
        node: ir.Node,
        status: Status,
        layers: Mapping[str, tuple[Projection, ...]] | None = None,
        note: str = "",
        leading: tuple[Projection, ...] = (),
        taken: Mapping[str, ir.Value] | None = None,
    ) -> None:
        roles = layers or {role: () for role in ROLES}
        self._anchors.append(node)
        index, kind = len(self._blocks), self._kind(roles)
        self._blocks.append(Block(index, kind, node.op_type, label(node), roles, status, note, leading, taken=taken or {}))

    def _role(self, value: ir.Value | None) -> _Role:
        nodes = self._view.walk_back(value, self._products.ends_walk)
        read = [found for node in nodes if (found := self._projection(node)) is not None]
        unread = tuple(node for node in nodes if self._projection(node) is None and (self._flow.factors(node) or not operands(node)))
        behind = [self._role(one.activation) for one in read if one.selects]
        layers = [one for one in read if not one.selects] + [layer for role in behind for layer in role.layers]
        unread += tuple(node for role in behind for node in role.unread)
        return _Role(tuple({one.node: one for one in layers}.values()), unread, value)

    def _behind(self, layer: Projection) -> Projection | None:
        role = self._role(layer.activation)
        return role.layers[0] if len(role.layers) == 1 and not role.unread else None

    def _kind(self, roles: Mapping[str, Sequence[Projection]]) -> str:
        streams = {self._streams.of(layer.activation) for role in ROLES for layer in roles[role]}
        return "self" if len(streams) <= 1 else "cross"

    def _projection(self, node: ir.Node) -> Projection | None:
        if node not in self._projections:
            self._projections[node] = find_projection(self._constants, node)
        return self._projections[node]


def _layers(roles: Mapping[str, _Role]) -> dict[str, tuple[Projection, ...]]:
    return {role: one.layers for role, one in roles.items()}


def _shown(layers: Sequence[Projection]) -> str:
    names = [f"{one.op} {one.name} {one.shape[0]}x{one.shape[1]}" for one in layers[:_MAX_SHOWN]]
    return (", ".join(names) or "-") + (f" and {len(layers) - _MAX_SHOWN} more" if len(layers) > _MAX_SHOWN else "")
