"""Running recorded graphs: node by node, in the modes of torch that each node was recorded in, freeing values as they die."""

from __future__ import annotations

import copy
import enum
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn

from compressor.errors import CalibrationError
from compressor.tracing.graph.nested_values import DATA_SIZED, Modes
from compressor.tracing.graph.nodes import Constant, GuardFailure
from compressor.tracing.graph.program import Program, Segment, find_module, target_of

# What torch goes by when it calls the hooks of a forward.
_HOOKS: tuple[str, ...] = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_HOOKS += ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
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
            # As early as Python would let go of it, so that no more is in memory than in a plain forward.
            for dead in last_uses.get(node, ()):
                env.pop(dead, None)
    return result


def needed_to_show(segment: Segment, names: Collection[str]) -> list[fx.Node] | None:
    """Collect what must run so that some modules can be shown what they are handed, without being called.

    Args:
        segment: in which they are called.
        names: dotted names.

    Returns:
        Nodes in program order, the calls among them; None where a call needs what another one computes.
    """
    nodes = list(segment.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module" and target_of(node) in names]
    needed = set(Needs(nodes).of([used for call in calls for used in call.all_input_nodes]))
    if not needed.isdisjoint(calls):
        return None
    return [node for node in nodes if node in needed or node in calls]


def show_inputs(nodes: Iterable[fx.Node], values: dict[str, Any], model: nn.Module, call: CallModule) -> None:
    """Run what `needed_to_show` has collected.

    Args:
        nodes: in program order.
        values: by name: what the graph of the segment needs.
        model: whose modules are called.
        call: shows a module its arguments, or calls it where it is none of those.
    """
    env: dict[fx.Node, Any] = {}
    with torch.no_grad(), _ambient() as ambient:
        for node in nodes:
            env[node] = values[str(node.target)] if node.op == "placeholder" else run_node(node, env, model, call, ambient)


OF_ALL_MODULES = torch.nn.modules.module


def show_to_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    """Run the pre-hooks of a module as a call of it would.

    Args:
        module: is not called.
        args: what it is handed.
        kwargs: by name.
        name: dotted name, for the error.

    Raises:
        CalibrationError: a hook writes to what it is shown, which waits for the call itself.
    """
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and not value.is_inference()]
    before = [value._version for value in given]
    for key, hook in module._forward_pre_hooks.items():
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        else:
            result = hook(module, args)
            args = args if result is None else result if isinstance(result, tuple) else (result,)
    if before != [value._version for value in given]:
        raise CalibrationError(f"{name}: a calibration hook writes to the input that it is shown; let it write to a copy")


def copy_alone(module: nn.Module, *, with_hooks: bool) -> nn.Module:
    """Copy a module that has no others inside.

    Args:
        module: not modified.
        with_hooks: the copy has the hooks that the module has now; else none.

    Returns:
        A module with weights of its own.
    """
    copied = copy.copy(module)
    copied._parameters = {
        name: one if one is None else nn.Parameter(one.detach().clone(), False) for name, one in module._parameters.items()
    }
    copied._buffers = {name: one if one is None else one.clone() for name, one in module._buffers.items()}
    for table in _HOOKS:
        setattr(copied, table, copy.copy(getattr(module, table)) if with_hooks else OrderedDict())
    return copied


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
        # The forward had switched autocast, gradients or a kernel around this call.
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
    if isinstance(target, Constant) and target.place is not None:
        return model.get_submodule(target.place)
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
        # What nobody uses dies where it is made.
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


class Needs:
    """What must run so that some nodes of a graph can.

    Attributes:
        writers: the calls that write to something through a node, by that node, in program order.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        """Look at all nodes of the graph, in program order."""
        self._order = {node: number for number, node in enumerate(nodes)}
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            for used in node.all_input_nodes if node.meta.get("effect") else ():
                self.writers.setdefault(used, []).append(node)

    def of(self, goals: Sequence[fx.Node]) -> list[fx.Node]:
        """Collect what some nodes need.

        Args:
            goals: nodes that are wanted.

        Returns:
            The goals and everything before them that they need, writes to what they need included; in program order.
        """
        last = max((self._order[goal] for goal in goals), default=-1)
        needed, todo = set(goals), list(goals)
        while todo:
            node = todo.pop()
            for other in (*node.all_input_nodes, *self.writers.get(node, ())):
                if other not in needed and self._order[other] <= last:
                    needed.add(other)
                    todo.append(other)
        return sorted(needed, key=self._order.__getitem__)


_Kinds = TypeVar("_Kinds", bound=enum.Flag)


def dependences(
    nodes: Iterable[fx.Node], kinds: Callable[[fx.Node], _Kinds], asked: Collection[fx.Node]
) -> Iterator[tuple[fx.Node, tuple[_Kinds, _Kinds]]]:
    """Go through a graph once, and tell of some nodes on what kinds of others they depend, those before them that write to these included.

    Args:
        nodes: all of the graph, in program order.
        kinds: what a node itself is.
        asked: nodes of the graph.

    Yields:
        Each node that is asked for, with the kinds of those on whose values, and not only shapes, its own value depends, and the kinds of
        all that it needs.
    """
    wanted, known = set(asked), _Dependences(kinds)
    for node in nodes:
        known.add(node)
        if node in wanted:
            yield node, (known.values[node], known.needs[node])


class _Dependences(Generic[_Kinds]):
    """Kinds of nodes on which others depend, of the graph up to the node that was added last."""

    def __init__(self, kinds: Callable[[fx.Node], _Kinds]) -> None:
        self._kinds = kinds
        self.values, self.shapes, self.needs = dict[fx.Node, _Kinds](), dict[fx.Node, _Kinds](), dict[fx.Node, _Kinds]()

    def add(self, node: fx.Node) -> None:
        self.values[node] = self.needs[node] = own = self._kinds(node)
        self.shapes[node] = own & ~own
        self._read(node)
        waiting = [node] if node.meta.get("effect") else []
        while waiting:  # what is written to depends on the writer from here on, and with it all that has used it
            changed = waiting.pop()
            written = [used for used in changed.all_input_nodes if changed.meta.get("effect") and self._join(used, changed)]
            waiting += written + [user for user in changed.users if user in self.values and self._read(user)]

    def _join(self, used: fx.Node, writer: fx.Node) -> bool:
        before = self.values[used], self.needs[used]
        self.values[used] |= self.values[writer]
        self.needs[used] |= self.needs[writer]
        return before != (self.values[used], self.needs[used])

    def _read(self, node: fx.Node) -> bool:
        """Take over from what a node uses; tell whether it depends on more than before."""
        before = self.values[node], self.shapes[node], self.needs[node]
        goes_by_value, is_sized_by_data = not _asks_shape(node), _is_data_sized(node)
        for used in node.all_input_nodes:
            is_number = not _carries_shape(used)
            self.values[node] |= self.values[used] if goes_by_value or is_number else self.shapes[used]
            self.shapes[node] |= self.values[used] if is_sized_by_data or is_number else self.shapes[used]
            self.needs[node] |= self.needs[used]
        return before != (self.values[node], self.shapes[node], self.needs[node])


# Answers of a tensor that depend on its shape and not on its values.
_SHAPE_ATTRIBUTES = frozenset(("shape", "ndim", "nbytes"))
_SHAPE_METHODS = frozenset(
    ("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_contiguous", "__len__", "data_ptr")
)


def _asks_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SHAPE_METHODS
    return node.target is len or (node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES)


def _carries_shape(node: fx.Node) -> bool:
    """True for tensors and what holds them; a number among the arguments of a shape-giving call is a value."""
    return not node.meta.get("number")


def _is_data_sized(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "repeat_interleave":  # by a number of repeats, or by a tensor of them
        repeats = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
        return isinstance(repeats, fx.Node) and "tensor" in repeats.meta and "output_size" not in node.kwargs
    if name in DATA_SIZED or (name == "where" and len(node.args) == 1):
        return True
    return node.target is operator.getitem and len(node.args) == 2 and isinstance(node.args[1], fx.Node | tuple) and _indexes_by_mask(node)


def _indexes_by_mask(node: fx.Node) -> bool:
    index: Any = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, fx.Node) and part.meta.get("tensor", (0, None))[1] is torch.bool for part in parts)
