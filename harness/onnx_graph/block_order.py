"""Which block feeds which, and which outputs of the graph it reaches: the place of a block in the data flow.

Optimizers change the order in which nodes are listed, never this; so weights that turn up at another place have been exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from harness.onnx_graph.graph import GraphView


@dataclass(frozen=True)
class BlockPlace:
    """Where a block lies.

    Attributes:
        above: indices of the blocks whose results flow into it.
        below: indices of the blocks that its result flows into.
        outputs: positions of the graph outputs that its result flows into.
    """

    above: frozenset[int] = frozenset()
    below: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    def is_like(self, other: BlockPlace) -> bool:
        """Whether two blocks of two graphs may be the same one: as many blocks before and behind, and the same outputs."""
        return (len(self.above), len(self.below), self.outputs) == (len(other.above), len(other.below), other.outputs)


def block_places(view: GraphView, anchors: Sequence[ir.Node]) -> list[BlockPlace]:
    """Follow the activations once through the graph.

    Args:
        view: of the graph.
        anchors: the node of each block; one inside of a subgraph has no place.

    Returns:
        A place per anchor.
    """
    index = {node: position for position, node in enumerate(anchors)}
    carried: dict[ir.Value, int] = {}  # a bit per block that the value comes from
    above: dict[int, int] = {}
    for node in view.nodes:
        mask = 0
        for value in view.data_inputs(node):
            mask |= carried.get(value, 0)
        if node in index:
            above[index[node]] = mask
            mask |= 1 << index[node]
        carried |= dict.fromkeys(node.outputs, mask)
    ends = [carried.get(value, 0) for value in view.model.graph.outputs]
    return [
        BlockPlace(
            frozenset(other for other in range(len(anchors)) if above.get(one, 0) >> other & 1),
            frozenset(other for other, mask in above.items() if mask >> one & 1),
            frozenset(position for position, mask in enumerate(ends) if mask >> one & 1),
        )
        for one in range(len(anchors))
    ]
