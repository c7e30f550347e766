"""What a node needs: its inputs, and writes to these that come before it, not those behind it"""

from __future__ import annotations

from torch import fx

from compressor.tracing.graph.replay import Needs


def test_writes_behind_a_node_are_none_of_its_needs() -> None:
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    before = graph.call_method("add_", (x, other))
    asked = graph.call_method("sum", (x,))
    behind = graph.call_method("mul_", (x, 2))
    last = graph.call_method("sum", (x,))
    for write in (before, behind):
        write.meta["effect"] = True
    needs = Needs(list(graph.nodes))
    assert needs.of([asked]) == [x, other, before, asked]
    assert needs.of([last, asked]) == [x, other, before, asked, behind, last]
    assert needs.of([other]) == [other] and needs.of([]) == []
