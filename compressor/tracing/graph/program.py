"""A recorded forward, cut into stages: one torch.fx graph before the first target, and one for each target with what follows it.

A stage begins where its target is called for the first time, or shortly before, where less is live: what a norm makes of its input costs
little to compute twice, and need not wait. Its graph goes on to where the next stage begins, so running all graphs one after another is the
forward. A target that is called again later keeps its one stage: to calibrate it, the graphs up to its last call
are run on copies.
"""

from __future__ import annotations

import linecache
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from torch import fx, nn

from compressor.errors import CalibrationError
from compressor.model.targets import outward
from compressor.tracing.graph.nodes import ROOT, Constant, Refusal, Unrepeatable
from compressor.tracing.graph.recorder import Recorder


@dataclass
class Segment:
    """The graph from one stage's beginning to the next one's.

    Attributes:
        targets: dotted names of the stage's targets; empty before the first stage.
        graph: placeholders are what it needs, its output what later segments need, by name; for the last one, the model's output.
        live_in: all values that cross into it, also those that only pass through.
        mutates: those of them that it writes to.
        live_bytes: memory of what crosses into it, of the batch that was recorded.
        own_bytes: of these, without what is live from the second stage to beyond the middle (masks, rotary tables).
        calls: names of the nodes that call the stage's targets.
        is_last: its output is the model's.
    """

    targets: tuple[str, ...]
    graph: fx.Graph
    live_in: tuple[str, ...]
    mutates: frozenset[str] = frozenset()
    live_bytes: int = 0
    own_bytes: int = 0
    calls: tuple[str, ...] = ()
    is_last: bool = False

    def graph_module(self, model: nn.Module) -> fx.GraphModule:
        """Make a module of the graph, for printing and running it alone.

        Args:
            model: the model that was recorded; its modules are shared.

        Returns:
            A module whose `print_readable` shows the graph with the model's source lines.
        """
        root: dict[str, Any] = {}
        for node in self.graph.nodes:
            if node.op == "call_module":
                root[node.target] = find_module(model, node.target)
            elif node.op == "get_attr":
                owner, _, name = node.target.rpartition(".")
                root[node.target] = getattr(model.get_submodule(owner), name)
        return fx.GraphModule(root, self.graph, "Segment")


@dataclass
class Program:
    """One recorded forward.

    Attributes:
        flat: the whole graph.
        segments: before the first stage, then one for each stage.
        output: encoded result of the forward.
        signature: what a batch must look like.
        spans: for each segment, the index of the segment that holds the last call of its targets.
        calls: calls of modules: name, target around it or None, and the segment in which it lies.
        busy: code of functions that call targets.
        reassigned: dotted names of attributes that the forward sets.
        reads: what a node's own code may hand on unseen: a Python value that it reads off the data, or a tensor; empty where nothing.
        readers: dotted names of all modules that do so.
        calls_seen: calls of modules: name, target around it or None, and the number of the node before which it began.
        order: number of each node when it was recorded.
        light: names of the modules that do nothing but scale and shift, such as norms.
        borrowed: targets that it does not call, and the weight of theirs that it uses.
        lent: targets whose weight another target has used, after they had been called.
        first_uses: dotted names of the modules that it calls and the tensors that it reads, and the first segment in which it does.
    """

    flat: fx.Graph
    segments: list[Segment]
    signature: Any
    spans: list[int]
    calls: list[tuple[str, str | None, int]]
    busy: set[Any] = field(default_factory=set)
    reassigned: frozenset[str] = frozenset()
    reads: str = ""
    readers: frozenset[str] = frozenset()
    calls_seen: tuple[tuple[str, str | None, int], ...] = ()
    order: Mapping[fx.Node, int] = field(default_factory=dict)
    light: frozenset[str] = frozenset()
    borrowed: tuple[tuple[str, str], ...] = ()
    lent: frozenset[str] = frozenset()
    first_uses: Mapping[str, int] = field(default_factory=dict)

    def cut(self, groups: Mapping[str, int]) -> None:
        """Cut the forward into segments, anew where it has been cut before.

        Args:
            groups: target to number of its group; the targets of a group share a stage.

        Raises:
            Refusal: the forward calls no target.
        """
        cutter = _Cutter(self.flat, groups, self.reassigned, self.light)
        if not cutter.stages:
            raise Refusal("trace: the forward calls none of the sequential targets; give a batch that reaches them, or other targets")
        self.segments = [cutter.build(index) for index in range(len(cutter.stages) + 1)]
        uses = [
            (node, index) for index, one in enumerate(self.segments) for node in one.graph.nodes if node.op in ("call_module", "get_attr")
        ]
        self.first_uses = {str(node.target): index for node, index in reversed(uses)}
        starts = sorted(self.order[node] for node in cutter.starts)
        self.calls = [(name, target, bisect_right(starts, number)) for name, target, number in self.calls_seen]
        self.spans = cutter.spans()
        staged = self.segments[1:]
        lasting = set(staged[min(1, len(staged) - 1)].live_in).intersection(staged[len(staged) // 2].live_in)
        shared = [node for node in self.flat.nodes if node.name in lasting]
        for segment in staged:
            segment.own_bytes = segment.live_bytes - _bytes([node for node in shared if node.name in segment.live_in])

    @property
    def least_bytes(self) -> int:
        """What is live of a sample where that is little: a quarter of the stages have no more."""
        sizes = sorted(segment.own_bytes for segment in self.segments[1:])
        return sizes[(len(sizes) - 1) // 4]

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets in the order of their stages."""
        return tuple(name for segment in self.segments for name in segment.targets)

    def called_late(self, watched: Collection[str]) -> tuple[str, ...]:
        """Find targets that are called, or read, again when a later stage has begun, on the way to a call from which such a stage learns.

        Args:
            watched: modules that learn from calls; of those outside of targets the last call counts.

        Returns:
            Their names.
        """
        stage_of = {name: index for index, segment in enumerate(self.segments) for name in segment.targets}
        calls = [node for node in self.flat.nodes if node.op == "call_module" and target_of(node) in stage_of]
        learned = max((number for name, target, number in self.calls_seen if target is None and name in watched), default=0)
        late: dict[str, None] = {}
        for name, node in self._uses(stage_of):
            own, place = stage_of[name], self.order.get(node, len(self.order))
            before = max((stage_of[target_of(call)] for call in calls if self.order[call] < place), default=0)
            behind = max((stage_of[target_of(call)] for call in calls if self.order[call] > place), default=0)
            if before > own and (behind > own or place < learned):
                late[name] = None
        return tuple(late)

    def _uses(self, targets: Collection[str]) -> Iterator[tuple[str, fx.Node]]:
        """Calls of targets, and nodes outside of them that are handed one of their tensors."""
        for node in self.flat.nodes:
            if node.op == "call_module" and target_of(node) in targets:
                yield target_of(node), node
            for read in node.all_input_nodes:
                owner = next((name for name in outward(str(read.target)) if name in targets), None) if read.op == "get_attr" else None
                if owner is not None:
                    yield owner, node

    @property
    def by_input(self) -> list[list[str]]:
        """Targets in the order of their first calls, together those that follow each other and are handed the very same values."""
        names = set(self.targets)
        nodes = [(place, node) for place, node in enumerate(self.flat.nodes) if node.op == "call_module" and target_of(node) in names]
        times = Counter(target_of(node) for _, node in nodes)
        groups: dict[str, list[str]] = {}  # by the first member
        before: tuple[int, fx.Node] | None = None
        for place, node in nodes:
            name = target_of(node)
            if times[name] > 1:
                groups.setdefault(name, [name])
                before = None
            elif before is not None and self._same_input(*before, place, node):
                groups[next(reversed(groups))].append(name)
                before = (place, node)
            else:
                groups[name] = [name]
                before = (place, node)
        return list(groups.values())

    def _same_input(self, earlier: int, one: fx.Node, later: int, other: fx.Node) -> bool:
        """Say whether two calls are handed the same values, and nothing between them may write to these."""
        if one.args != other.args or one.kwargs != other.kwargs:
            return False
        memory = {_storage(node) for node in other.all_input_nodes}
        between = [node for node in islice(self.flat.nodes, earlier + 1, later) if node.meta.get("effect")]
        return not any(
            memory & set(node.meta.get("writes", ())) or set(other.all_input_nodes) & set(node.all_input_nodes) for node in between
        )

    @property
    def guard_nodes(self) -> list[fx.Node]:
        """Guards of the whole forward, in program order."""
        return [node for node in self.flat.nodes if "guard" in node.meta]


def target_of(node: fx.Node) -> str:
    """Return the dotted name of the module that a node calls; that of the model itself is empty."""
    return "" if node.target == ROOT else str(node.target)


def find_module(model: nn.Module, target: str) -> nn.Module:
    """Find the module that a node calls.

    Args:
        model: the model.
        target: of a call_module node.

    Returns:
        The module as it is now.
    """
    return model if target == ROOT else model.get_submodule(target)


def build_program(
    model: nn.Module, recorder: Recorder, output: Any, signature: Any, groups: Mapping[str, int], reassigned: Collection[str]
) -> Program:
    """Cut a recorded forward into segments.

    Args:
        model: that was recorded.
        recorder: after the forward.
        output: encoded result.
        signature: of the batch.
        groups: target to number of its group; the targets of a group share a stage.
        reassigned: dotted names of what the forward has set on modules, which must be read where it was read.

    Returns:
        The program.

    Raises:
        Refusal: the forward calls no target.
    """
    flat = recorder.builder.graph
    order = {node: number for number, node in enumerate(flat.nodes)}
    flat.output(output)
    # Backwards, so that what only such a node needed goes as well.
    for node in reversed(list(flat.nodes)):
        if node.meta.get("size") and not node.users:
            flat.erase_node(node)
    called = {target_of(node) for node in flat.nodes if node.op == "call_module"}
    light = frozenset(name for name in called if _is_light_module(find_module(model, name)))
    program = Program(
        flat, [], signature, [], [], recorder.busy, frozenset(reassigned), calls_seen=tuple(recorder.calls), order=order, light=light
    )
    program.cut(groups)
    return program


# Functions and methods that cost no more than a pass over memory; of numbers such as sizes any do.
_LIGHT = frozenset(("getattr", "getitem", "to", "float", "type_as", "view", "reshape", "pow", "square", "mean", "var", "rsqrt", "sqrt"))
_LIGHT |= frozenset(("add", "sub", "mul", "div", "truediv", "layer_norm", "rms_norm"))


def _is_light_module(module: nn.Module) -> bool:
    """True for a norm: no modules inside, and weights of one dimension."""
    sides = {one.dim() for one in module.parameters(recurse=False)}
    return next(module.children(), None) is None and sides == {1}


class _Cutter:
    """Finds the segment of each node, and copies them out."""

    def __init__(self, flat: fx.Graph, groups: Mapping[str, int], reassigned: Collection[str], light: Collection[str]) -> None:
        self._flat = flat
        self._light = set(light).difference(groups)
        self._reassigned = reassigned
        self.stages: dict[int, list[str]] = {}  # group to its targets, in the order of first calls
        self.starts: list[fx.Node] = []
        self._segment: dict[fx.Node, int] = {}
        self._target_calls: dict[int, list[fx.Node]] = {}
        for node in flat.nodes:
            self._place(node, groups)
        self._begin_where_less_waits()
        self._index_of = {group: index + 1 for index, group in enumerate(self.stages)}
        self._last = len(self.stages)
        self._ends = {node: max((self._segment[user] for user in node.users), default=self._segment[node]) for node in flat.nodes}
        self._own, self._live = ([list[fx.Node]() for _ in range(self._last + 1)] for _ in range(2))  # a segment's nodes, and what it gets
        for node in flat.nodes:
            self._own[self._segment[node]].append(node)
            for index in range(self._segment[node] + 1, self._ends[node] + 1) if not self._is_repeated(node) else ():
                self._live[index].append(node)

    def _place(self, node: fx.Node, groups: Mapping[str, int]) -> None:
        name = target_of(node)
        group = groups.get(name) if node.op == "call_module" else None
        if group is not None:
            if group not in self.stages:
                self.stages[group] = []
                self.starts.append(node)
            if name not in self.stages[group]:
                self.stages[group].append(name)
            self._target_calls.setdefault(group, []).append(node)
        self._segment[node] = len(self.stages)

    def _begin_where_less_waits(self) -> None:
        """Move what costs little from the end of a segment to the beginning of the next one, where less is live ahead of it."""
        nodes = list(self._flat.nodes)
        place = {node: number for number, node in enumerate(nodes)}
        last = {node: max((place[user] for user in node.users), default=place[node]) for node in nodes}
        for index, start in enumerate(self.starts):
            at = place[start]
            live = {node for node in nodes[:at] if last[node] >= at and not self._is_repeated(node)}
            least, first = _bytes(list(live)), at
            while at and self._segment[nodes[at - 1]] == index and self._is_light(nodes[at - 1]):
                at -= 1
                live = (live - {nodes[at]}) | {used for used in nodes[at].all_input_nodes if not self._is_repeated(used)}
                if _bytes(list(live)) < least:
                    least, first = _bytes(list(live)), at
            self._segment.update((node, index + 1) for node in nodes[first : place[start]])
            self.starts[index] = nodes[first]

    def _is_light(self, node: fx.Node) -> bool:
        """True for what may run twice at little cost: it writes to nothing, and nobody decides by it."""
        if node.meta.get("effect") or "guard" in node.meta or node.op == "placeholder":
            return False
        name = getattr(node.target, "__name__", str(node.target)).strip("_")
        return (
            self._is_repeated(node)
            or bool(node.meta.get("size"))
            or (target_of(node) in self._light if node.op == "call_module" else name in _LIGHT)
        )

    def spans(self) -> list[int]:
        return [0, *(max(self._segment[node] for node in self._target_calls[group]) for group in self.stages)]

    def _is_repeated(self, node: fx.Node) -> bool:
        """True for what every segment reads for itself: constants, and state that the forward does not set."""
        return isinstance(node.target, Constant) or (node.op == "get_attr" and node.target not in self._reassigned)

    def build(self, index: int) -> Segment:
        """Copy the nodes of one segment into a graph of their own."""
        graph, copies = fx.Graph(), {}
        live, own = self._live[index], self._own[index]
        needed = {used for node in own for used in node.all_input_nodes}
        # The first segment has the placeholders of the batch among its own nodes.
        if index > 0:
            copies = {node: graph.placeholder(node.name) for node in live if node in needed}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # a constant or a parameter of an earlier segment
                copies[node] = _copy_node(graph, node, copied)
            return copies[node]

        for node in own:
            if node.op != "output" and not (self._is_repeated(node) and not any(self._segment[user] == index for user in node.users)):
                copies[node] = _copy_node(graph, node, copied)
        is_last = index == self._last
        result = (
            self._flat.output_node().args[0]
            if is_last
            else {node.name: node for node in own if node.op != "output" and self._ends[node] > index and not self._is_repeated(node)}
        )
        graph.output(fx.map_arg(result, copied))
        group = list(self.stages)[index - 1] if index else None
        calls = [] if group is None else self._target_calls[group]
        written = frozenset().union(*(node.meta.get("writes", ()) for node in own))
        return Segment(
            targets=() if group is None else tuple(self.stages[group]),
            graph=graph,
            live_in=tuple(node.name for node in live),
            mutates=frozenset(node.name for node in live if _storage(node) in written),
            live_bytes=_bytes(live),
            calls=tuple(node.name for node in calls if self._segment[node] == index),
            is_last=is_last,
        )


def _copy_node(graph: fx.Graph, node: fx.Node, copied: Any) -> fx.Node:
    if node.op == "placeholder":
        made = graph.placeholder(str(node.target))
    else:
        made = graph.create_node(node.op, node.target, fx.map_arg(node.args, copied), fx.map_arg(node.kwargs, copied), name=node.name)
    made.meta = dict(node.meta)
    place = node.meta.get("place")
    # torch.fx prints this above the node: the line of the model that it comes from.
    if place is not None:
        line = linecache.getline(place.file, place.line).strip()
        made.meta["stack_trace"] = f'File "{place.file}", line {place.line}, in {place.function}\n  {line}\n'
    return made


def _storage(node: fx.Node) -> Any:
    return node.meta["tensor"][2] if "tensor" in node.meta else None


def _bytes(nodes: Sequence[fx.Node]) -> int:
    return sum({node.meta["tensor"][2]: node.meta["tensor"][3] for node in nodes if "tensor" in node.meta}.values())


# Which samples stop at which stage: the orders of all recorded graphs, merged.


class Stop(NamedTuple):
    """One stage of a run.

    Attributes:
        targets: dotted names, in the order of first calls.
        samples: sample to the segment of its program that begins here.
    """

    targets: tuple[str, ...]
    samples: dict[int, int]


def schedule(programs: Sequence[Program], groups: Mapping[str, int]) -> list[Stop]:
    """Put the stages of all samples into one order.

    Args:
        programs: one for each sample.
        groups: target to the number of the stage it shares.

    Returns:
        The stages; each group of targets has exactly one.

    Raises:
        Unrepeatable: two samples reach the targets in contradicting orders.
    """
    routes = [[groups[segment.targets[0]] for segment in program.segments[1:]] for program in programs]
    at = dict.fromkeys(range(len(programs)), 0)
    stops: list[Stop] = []
    closed: set[int] = set()
    while waiting := [sample for sample in at if at[sample] < len(routes[sample])]:
        group = _next_group(routes, at, waiting)
        here = {sample: at[sample] + 1 for sample in waiting if routes[sample][at[sample]] == group}
        targets = tuple(dict.fromkeys(name for sample, segment in here.items() for name in programs[sample].segments[segment].targets))
        if group in closed:
            raise Unrepeatable(
                f"{', '.join(targets)}: batch {min(here)} reaches this sequential target after its stage, because batches call the targets "
                'in different orders; use pipeline="basic" or other sequential targets'
            )
        closed.add(group)
        stops.append(Stop(targets, here))
        for sample in here:
            at[sample] += 1
    return stops


def _next_group(routes: Sequence[Sequence[int]], at: Mapping[int, int], waiting: Sequence[int]) -> int:
    """Choose a stage that no sample will reach later; the first in the order of the model where there are several, or none."""
    heads = sorted({routes[sample][at[sample]] for sample in waiting})
    later = {group for sample in waiting for group in routes[sample][at[sample] + 1 :]}
    return next((group for group in heads if group not in later), heads[0])


_REMEDY = 'use pipeline="basic" or other sequential targets'


def check_inside(program: Program, segment: int, targets: Collection[str], inside: Collection[str], sample: int) -> None:
    """Refuse watched modules that a forward calls again outside of their stage, after it.

    Args:
        program: of the sample.
        segment: that begins with the stage.
        targets: of the stage.
        inside: watched modules inside the targets.
        sample: number of the batch, for the error.

    Raises:
        CalibrationError: there is one.
    """
    position = {name: index for index, one in enumerate(program.segments) for name in one.targets}
    for name, owner, where in program.calls:
        later = where >= segment if owner is None else owner not in targets and position.get(owner, 0) > segment
        if name in inside and later:
            raise CalibrationError(
                f"{name}: batch {sample} calls it outside {', '.join(targets) or 'the model'}, the sequential target that it "
                f"lies in, and after that, so its statistics miss this call; {_REMEDY}"
            )
