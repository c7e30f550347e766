"""Layers behind layers: which of those on the way to a role are its own, and which one its projection is.

A role's own layers are all that lead to it alone. They end where another role takes another way: at the layer of a bottleneck or of an
embedding, whose result several roles are projected from. One that only turns what it is given, as a Hadamard matrix or a rotation of
positions does, stands behind the projection and is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.onnx_graph.census.flow import Shapes
from harness.onnx_graph.census.parts import takes_a_part
from harness.onnx_graph.census.projections import Projection
from harness.onnx_graph.graph.view import GraphView

Chain = Sequence[Projection]
"""Layers on the way to a role, each alone on its way; the nearest to the role first."""


@dataclass(frozen=True)
class Chains:
    """The layers of every role of one block that has exactly one.

    Attributes:
        of: role to its layers, the nearest first.
    """

    of: Mapping[str, Chain]

    @classmethod
    def behind(cls, layers: Mapping[str, Sequence[Projection]], next_behind: Callable[[Projection], Projection | None]) -> Chains:
        """Follow each role from its layer.

        Args:
            layers: of each role; those with several, or none, are left out.
            next_behind: the one layer that leads to a layer, if it is one.

        Returns:
            The chains.
        """
        chains = {}
        for role, found in layers.items():
            if len(found) == 1:
                chains[role] = [found[0]]
                while (one := next_behind(chains[role][-1])) is not None:
                    chains[role].append(one)
        return cls(chains)

    def projection(self, role: str) -> Projection:
        """Return the layer of a role that is its projection, with the others that are its own.

        Args:
            role: that has exactly one layer.

        Returns:
            The first that does more than turn; the nearest where none does.
        """
        own = [self.of[role][0]]
        for taker, one in itertools.pairwise(self.of[role]):
            if self._other_takers(taker, one):
                break
            own.append(one)
        main = next((one for one in own if not one.turns), own[0])
        return replace(main, beside=tuple(one for one in own if one is not main))

    def split(self, view: GraphView, shapes: Shapes) -> Projection | None:
        """Find a layer of which several roles take different parts through layers of their own.

        Args:
            view: of the graph.
            shapes: of its values.

        Returns:
            The first one.
        """
        for chain in self.of.values():
            for taker, one in itertools.pairwise(chain):
                takers = self._other_takers(taker, one)
                apart = any(other.activation is not taker.activation for other in takers)
                if apart and all(takes_a_part(view, shapes, one, other.activation) for other in (taker, *takers)):
                    return one
        return None

    def _other_takers(self, taker: Projection, layer: Projection) -> list[Projection]:
        """The layers by which other roles take the result of a layer."""
        pairs = (pair for chain in self.of.values() for pair in itertools.pairwise(chain))
        return [one for one, above in pairs if above.node is layer.node and one.node is not taker.node]
