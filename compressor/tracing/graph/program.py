"""A recorded forward, cut into stages: one torch.fx graph before the first target, and one for each target with what follows it.

A stage begins where its target is called for the first time. Its graph goes on to where the next stage begins, so running all graphs one
after another is the forward. A target that is called again later keeps its one stage: to calibrate it, the graphs up to its last call
are run on copies.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from compressor.data.layouts import has_memory
from compressor.tracing.graph.nested_values import Modes
from compressor.tracing.graph.nodes import Constant, GuardFailure, Refusal
from compressor.tracing.graph.recorder import Recorder

ROOT = "_root"  # how graphs name the model itself, whose dotted name is empty


@dataclass
class Segment:
    """The graph from one stage's beginning to the next one's.

    Attributes:
        targets: dotted names of the stage's targets; empty before the first stage.
        graph: placeholders are what it needs, its output what later segments need, by name; for the last one, the model's output.
        live_in: all values that cross into it, also those that only pass through.
        mutates: those of them that it writes to.
        live_bytes: memory of what crosses into it, of the batch that was recorded.
        calls: names of the nodes that call the stage's targets.
        is_last: its output is the model's.
    """

    targets: tuple[str, ...]
    graph: fx.Graph
    live_in: tuple[str, ...]
    mutates: frozenset[str] = frozenset()
    live_bytes: int = 0
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
        reads: where a node's own code reads a Python value off the data that it may hand on unseen; empty where none does.
        readers: dotted names of all modules that do so.
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

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets in the order of their stages."""
        return tuple(name for segment in self.segments for name in segment.targets)

    @property
    def guard_nodes(self) -> list[fx.Node]:
        """Guards of the whole forward, in program order."""
        return [node for node in self.flat.nodes if "guard" in node.meta]


def find_module(model: nn.Module, target: str) -> nn.Module:
    """Find the module that a node calls.

    Args:
        model: the model.
        target: of a call_module node.

    Returns:
        The module as it is now.
    """
    return model if target == ROOT else model.get_submodule(target)


def build_program(recorder: Recorder, output: Any, signature: Any, groups: Mapping[str, int], reassigned: Collection[str]) -> Program:
    """Cut a recorded forward into segments.

    Args:
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
    for node in reversed(list(flat.nodes)):
        if node.meta.get("size") and not node.users:
            flat.erase_node(node)
    cutter = _Cutter(flat, groups, reassigned)
    if not cutter.stages:
        raise Refusal("trace: the forward calls none of the sequential targets; give a batch that reaches them, or other targets")
    segments = [cutter.build(index) for index in range(len(cutter.stages) + 1)]
    starts = [order[node] for node in cutter.starts]
    calls = [(name, target, sum(start <= number for start in starts)) for name, target, number in recorder.calls]
    return Program(flat, segments, signature, cutter.spans(), calls, recorder.busy, frozenset(reassigned))


class _Cutter:
    """Finds the segment of each node, and copies them out."""

    def __init__(self, flat: fx.Graph, groups: Mapping[str, int], reassigned: Collection[str]) -> None:
        self._flat = flat
        self._reassigned = reassigned
        self.stages: dict[int, list[str]] = {}  # group to its targets, in the order of first calls
        self.starts: list[fx.Node] = []
        self._segment: dict[fx.Node, int] = {}
        self._target_calls: dict[int, list[fx.Node]] = {}
        for node in flat.nodes:
            self._place(node, groups)
        self._index_of = {group: index + 1 for index, group in enumerate(self.stages)}
        self._last = len(self.stages)
        self._ends = {node: max((self._segment[user] for user in node.users), default=self._segment[node]) for node in flat.nodes}

    def _place(self, node: fx.Node, groups: Mapping[str, int]) -> None:
        name = "" if node.target == ROOT else node.target
        group = groups.get(str(name)) if node.op == "call_module" else None
        if group is not None:
            if group not in self.stages:
                self.stages[group] = []
                self.starts.append(node)
            if name not in self.stages[group]:
                self.stages[group].append(str(name))
            self._target_calls.setdefault(group, []).append(node)
        self._segment[node] = len(self.stages)

    def spans(self) -> list[int]:
        last = [max(self._segment[node] for node in self._target_calls[group]) for group in self.stages]
        return [0, *last]

    def _is_repeated(self, node: fx.Node) -> bool:
        """True for what every segment reads for itself: constants, and state that the forward does not set."""
        return isinstance(node.target, Constant) or (node.op == "get_attr" and node.target not in self._reassigned)

    def _live_into(self, index: int) -> list[fx.Node]:
        return [node for node in self._flat.nodes if self._segment[node] < index <= self._ends[node] and not self._is_repeated(node)]

    def build(self, index: int) -> Segment:
        """Copy the nodes of one segment into a graph of their own."""
        graph, copies = fx.Graph(), {}
        live = self._live_into(index)
        own = [node for node in self._flat.nodes if self._segment[node] == index]
        needed = {used for node in own for used in node.all_input_nodes}
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
    if place is not None:
        line = linecache.getline(place.file, place.line).strip()
        made.meta["stack_trace"] = f'File "{place.file}", line {place.line}, in {place.function}\n  {line}\n'
    return made


def _storage(node: fx.Node) -> Any:
    return node.meta["tensor"][2] if "tensor" in node.meta else None


def _bytes(nodes: Sequence[fx.Node]) -> int:
    return sum({node.meta["tensor"][2]: node.meta["tensor"][3] for node in nodes if "tensor" in node.meta}.values())


def signature_of(batch: Any) -> Any:
    """Describe what the graph of one batch takes for granted about another.

    Args:
        batch: dict or tuple.

    Returns:
        Names with number of dimensions, dtype and device of each tensor; other values as they are.
    """

    def describe(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return repr(item)
        return (item.ndim, item.dtype, item.device.type, *(() if has_memory(item) else (item.layout, item.is_nested)))

    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return tuple((name, describe(item)) for name, item in items)


# Running recorded graphs: node by node, in the modes of torch that each node was recorded in, freeing values as they die.

CallModule = Callable[[fx.Node, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def call_plainly(node: fx.Node, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module as the model does.

    Args:
        node: that calls it.
        module: the module.
        args: its arguments.
        kwargs: its named arguments.

    Returns:
        What it returns.
    """
    del node
    return module(*args, **kwargs)


def run_segment(
    segment: Segment, values: dict[str, Any], model: nn.Module, call: CallModule = call_plainly, until: Collection[str] = ()
) -> Any:
    """Run the graph of one segment.

    Args:
        segment: its graph is read as it is now.
        values: by name: what the graph needs, or the batch for the first one; values are let go as they die.
        model: whose modules are called.
        call: calls a module.
        until: dotted names; stop after the last call of one of these modules, and return nothing.

    Returns:
        Values by name that later segments need; for the last segment, what the model returns.
    """
    env: dict[fx.Node, Any] = {}
    last_uses = _last_uses(segment.graph.nodes)
    ends = [node for node in segment.graph.nodes if node.op == "call_module" and node.target in until][-1:]
    result: Any = None
    with torch.no_grad(), _ambient() as ambient:
        for node in segment.graph.nodes:
            if node.op == "output":
                result = _resolve(node.args[0], env)
            elif node.op == "placeholder":
                env[node] = values[str(node.target)]
            else:
                env[node] = run_node(node, env, model, call, ambient)
            if node in ends:
                break
            for dead in last_uses.get(node, ()):
                env.pop(dead, None)
    return result


def run_program(program: Program, inputs: dict[str, Any], model: nn.Module, call: CallModule = call_plainly) -> Any:
    """Run a whole recorded forward.

    Args:
        program: the forward.
        inputs: batch by name.
        model: whose modules are called.
        call: calls a module.

    Returns:
        What the model returns.
    """
    values, result = dict(inputs), None
    for index, segment in enumerate(program.segments):
        result = run_segment(segment, values, model, call)
        if not segment.is_last:
            values = next_values(program, index, values, result)
    return result


def next_values(program: Program, index: int, values: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Bring together what lives on after a segment.

    Args:
        program: the forward.
        index: of the segment that has run.
        values: what was live before it.
        made: what it made.

    Returns:
        What is live after it, by name.
    """
    live = program.segments[index + 1].live_in
    both = {**values, **made}
    return {name: both[name] for name in live}


def run_nodes(nodes: Iterable[fx.Node], inputs: dict[str, Any], model: nn.Module, call: CallModule = call_plainly) -> None:
    """Run some nodes of a whole graph, for the guards among them.

    Args:
        nodes: closed under what they need, in program order.
        inputs: batch by name.
        model: whose modules are called.
        call: calls a module.

    Raises:
        GuardFailure: a guard does not hold.
    """
    env: dict[fx.Node, Any] = {}
    with torch.no_grad(), _ambient() as ambient:
        for node in nodes:
            env[node] = inputs[str(node.target)] if node.op == "placeholder" else run_node(node, env, model, call, ambient)


def run_node(node: fx.Node, env: dict[fx.Node, Any], model: nn.Module, call: CallModule, ambient: Modes) -> Any:
    """Run one node.

    Args:
        node: neither placeholder nor output.
        env: values of earlier nodes.
        model: whose modules are called.
        call: calls a module.
        ambient: modes of torch where a node names none.

    Returns:
        The value of the node.
    """
    args, kwargs = _resolve(node.args, env), _resolve(node.kwargs, env)
    state: Modes | None = node.meta.get("state")
    try:
        if state is None:
            return _dispatch(node, args, kwargs, model, call)
        state.restore()
        try:
            return _dispatch(node, args, kwargs, model, call)
        finally:
            ambient.restore()
    except GuardFailure as failure:
        failure.node_name = node.name
        raise
    except Exception as error:  # whatever it is goes on as it is, with its place
        error.add_note(f"node {node.name} of the recorded graph, {node.meta.get('place', 'unknown place')}")
        raise


def _dispatch(node: fx.Node, args: Any, kwargs: Any, model: nn.Module, call: CallModule) -> Any:
    if node.meta.get("context"):
        return copy_context().run(_with_context, node, lambda: _plain_dispatch(node, args, kwargs, model, call))
    return _plain_dispatch(node, args, kwargs, model, call)


def _with_context(node: fx.Node, function: Callable[[], Any]) -> Any:
    """Set the context variables that the forward had set around a call."""
    for variable, value in node.meta["context"]:
        variable.set(value)
    return function()


def _plain_dispatch(node: fx.Node, args: Any, kwargs: Any, model: nn.Module, call: CallModule) -> Any:
    target: Any = node.target
    if node.op == "call_module":
        return call(node, find_module(model, target), args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    if node.op == "get_attr":
        owner, _, name = target.rpartition(".")
        return getattr(model.get_submodule(owner), name)
    return target(*args, **kwargs)


def _resolve(value: Any, env: dict[fx.Node, Any]) -> Any:
    """Put values in the place of nodes; the containers of torch.fx become plain ones again."""
    if isinstance(value, fx.Node):
        return env[value]
    if isinstance(value, tuple):
        items = [_resolve(item, env) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_resolve(item, env) for item in value]
    if isinstance(value, dict):
        return {key: _resolve(item, env) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(part, env) for part in (value.start, value.stop, value.step)))
    return value


def _last_uses(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for node, end in last.items():
        ends.setdefault(end, []).append(node)
    return ends


@contextmanager
def _ambient() -> Iterator[Modes]:
    """Give the modes of torch that stand now, with casts of weights computed anew: a cache would serve those of replaced weights."""
    outside = Modes.current()
    ambient = outside._replace(autocast_cache=False)
    ambient.restore()
    try:
        yield ambient
    finally:
        outside.restore()


def needed_for(goals: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Collect what must run so that some nodes can.

    Args:
        goals: nodes that are wanted.
        nodes: all nodes of the graph, in program order.

    Returns:
        The goals and everything before them that they need, writes to what they need included; in program order.
    """
    order = {node: number for number, node in enumerate(nodes)}
    last = max((order[goal] for goal in goals), default=-1)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes[: last + 1]:
        if node.meta.get("effect"):
            for used in node.all_input_nodes:
                writers.setdefault(used, []).append(node)
    needed, todo = set(goals), list(goals)
    while todo:
        node = todo.pop()
        for other in (*node.all_input_nodes, *writers.get(node, ())):
            if other not in needed and order[other] <= last:
                needed.add(other)
                todo.append(other)
    return [node for node in nodes[: last + 1] if node in needed]
