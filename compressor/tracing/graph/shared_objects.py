"""Helper objects and shared containers of a forward: caches, contexts, dictionaries that modules hand on to each other.

They become objects of the run: every batch gets a copy of what they were when a module first saw them. What Python code does to them
between two module calls is found by comparison and repeated; what a module did to them is guarded, because Python may look at it.
"""

from __future__ import annotations

import copy
import enum
import operator
import re
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from compressor.random_state import foreign_random
from compressor.tracing.graph.encoder import Encoder
from compressor.tracing.graph.nested_values import BY_REFERENCE, find_tensor, is_named_tuple, is_record, structure, tree_leaves
from compressor.tracing.graph.nodes import GraphBuilder, Refusal, Template, replace_items, set_attributes
from compressor.tracing.symbolic import is_symbolic

_SIMPLE = (bool, int, float, complex, str, bytes, Tensor, nn.Module, enum.Enum, *BY_REFERENCE)


@dataclass
class _Shared:
    """An object of the run: its node and what is known of its parts (the part itself and its structure)."""

    value: Any
    node: fx.Node
    parts: dict[Any, tuple[Any, Any]] = field(default_factory=dict)


class SharedObjects:
    """Follows the helper objects of one forward."""

    def __init__(self, builder: GraphBuilder, encoder: Encoder, bind: Callable[[fx.Node, Any], Any]) -> None:
        """Start with none; `bind` gives nodes to what a call has put into an object."""
        self._builder = builder
        self._encoder = encoder
        self._bind = bind
        self._shared: dict[int, _Shared] = {}
        self._containers: list[tuple[Any, Any]] = []  # containers of the running call and copies of them from before it
        self._untracked: list[tuple[Any, Any]] = []  # objects that must not change, and their structure

    def before(self, args: Any, plain_args: Any) -> None:
        """Prepare for a call: make objects of the run, bring them up to date, and remember what the call may change.

        Args:
            args: arguments as Python passes them.
            plain_args: the same without symbolic numbers.
        """
        self._untracked = []
        containers: list[Any] = []
        _collect(args, containers)
        self._containers = [(one, copy.copy(one)) for one in containers if id(one) not in self._shared]
        if plain_args is not args:
            copies: list[Any] = []
            _collect(plain_args, copies)
            self._untracked = [(one, _outline(one)) for one in copies if not any(one is other for other in containers)]
        for value in tree_leaves(args):
            if self._is_helper(value) and id(value) not in self._shared:
                self._lift(value)
            elif not isinstance(value, _SIMPLE) and value is not None and not is_symbolic(value) and id(value) not in self._shared:
                self._untracked.append((value, _outline(value)))
        for shared in list(self._shared.values()):
            self._bring_up_to_date(shared)

    def found_shared(self) -> bool:
        """Look for containers that the call has changed, and make them objects of the run.

        Returns:
            True if there is a new one, so that the call must refer to it.
        """
        found = False
        for value, earlier in reversed(self._containers):  # the inner ones first, so that the outer ones refer to them
            if _outline(value) != _outline(earlier):
                node = self._builder.emit("call_function", type(value), (self._encoder.encode(earlier),))
                self._register(value, node, _parts(earlier))
                found = True
        for value, outline in self._untracked:
            if _outline(value) != outline:
                raise self._builder.refuse(
                    f"a module changes a {type(value).__name__} that it is given, and that cannot be repeated for each batch; use a dict "
                    'or an object with attributes, or engine="suspend"'
                )
        return found

    def after(self) -> None:
        """Bind and guard what the call has changed in objects of the run."""
        for shared in list(self._shared.values()):
            now = _parts(shared.value)
            changed = _differences(shared.parts, now)
            if not changed and now.keys() == shared.parts.keys():
                continue
            for key in changed:
                self._bind_part(shared, key, now[key])
            made = self._builder.emit("call_function", structure, (shared.node,), size=True)
            self._builder.guard(made, structure(shared.value), "helper")
            shared.parts = _known(_parts(shared.value))

    def adopt(self, node: fx.Node, value: Any) -> None:
        """Take an object that a call returned for an object of the run.

        Args:
            node: of the call.
            value: the object.
        """
        if isinstance(value, enum.Enum) or self._encoder.owns(value):
            return
        self._register(value, node, {})
        self.after()

    def _is_helper(self, value: Any) -> bool:
        if isinstance(value, _SIMPLE) or is_symbolic(value) or callable(value) or is_record(value) or self._encoder.owns(value):
            return False
        return isinstance(getattr(value, "__dict__", None), dict)

    def _lift(self, value: Any) -> None:
        traced = {name: part for name, part in vars(value).items() if find_tensor(part, self._encoder.owns) is not None}
        bare = copy.copy(value)
        for name in traced:
            object.__delattr__(bare, name)
        name = re.sub(r"\W", "_", type(value).__name__) + f"_{len(self._shared)}"
        node = self._builder.emit("call_function", Template(bare, self._builder.model, name), (self._encoder.encode(traced),))
        self._register(value, node, _parts(value))

    def _register(self, value: Any, node: fx.Node, parts: dict[Any, Any]) -> None:
        self._shared[id(value)] = _Shared(value, node, _known(parts))
        self._encoder.objects[id(value)] = (node, value)

    def _bring_up_to_date(self, shared: _Shared) -> None:
        """Repeat what Python code has done to an object since the last call."""
        now = _parts(shared.value)
        changed = _differences(shared.parts, now)
        removed = tuple(key for key in shared.parts if key not in now)
        if not changed and not removed:
            return
        if isinstance(shared.value, list | dict):
            contents = shared.value if type(shared.value) in (list, dict) else None
            if contents is None:
                raise self._builder.refuse(f'a {type(shared.value).__name__} is changed between two module calls; use engine="suspend"')
            encoded = (
                [self._encoder.encode(one) for one in contents]
                if isinstance(contents, list)
                else {key: self._encoder.encode(one) for key, one in contents.items()}
            )
            self._builder.emit("call_function", replace_items, (shared.node, encoded), effect=True)
        else:
            values = {key: self._encoder.encode(now[key]) for key in changed}
            self._builder.emit("call_function", set_attributes, (shared.node, values, removed), effect=True)
        shared.parts = _known(now)

    def _bind_part(self, shared: _Shared, key: Any, part: Any) -> None:
        """Give nodes to the tensors that a call has put into an object; deeper objects are covered by the guard on its structure."""
        reader = operator.getitem if isinstance(shared.value, list | dict) else getattr
        if type(part) in (list, dict):  # the object's own container, which later calls may change through it
            if id(part) not in self._shared:
                self._register(part, self._builder.emit("call_function", reader, (shared.node, key), size=True), _parts(part))
            inner = self._shared[id(part)]
            for name, item in _parts(part).items():
                self._bind_part(inner, name, item)
            inner.parts = _known(_parts(part))
        elif isinstance(part, Tensor | tuple) and all(isinstance(one, Tensor) for one in tree_leaves(part)):
            self._bind(self._builder.emit("call_function", reader, (shared.node, key), size=True), part)


def _collect(value: Any, found: list[Any]) -> None:
    """List the lists and dicts inside a value."""
    if type(value) in (list, dict):
        found.append(value)
    if type(value) in (list, tuple) or is_named_tuple(value):
        for item in value:
            _collect(item, found)
    elif type(value) is dict:
        for item in value.values():
            _collect(item, found)


def _outline(value: Any) -> Any:
    """Describe a container by the identity of its items, another object by its structure and the identity of its parts."""
    parts = {key: id(part) for key, part in _parts(value).items()}
    return parts if isinstance(value, list | dict) else (parts, structure(value))


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list):
        return dict(enumerate(value))
    return dict(vars(value)) if isinstance(getattr(value, "__dict__", None), dict) else {}


def _known(parts: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    return {key: (part, structure(part)) for key, part in parts.items()}


def _differences(known: dict[Any, tuple[Any, Any]], now: dict[Any, Any]) -> list[Any]:
    """List the keys whose part is another object than it was, or built in another way."""
    return [key for key, part in now.items() if key not in known or known[key][0] is not part or known[key][1] != structure(part)]


# What a forward may do besides calling torch and modules: catch exceptions, draw other random numbers, write to state, set variables.

_UNSET = object()


class SideEffects:
    """How things stood when a forward began, to be compared with how it leaves them.

    Attributes:
        caught: where a call raised something that the forward has caught; None if none did.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look at random generators, parameters, buffers and context variables."""
        self.caught: str | None = None
        self._python_random, self._seed = foreign_random(), torch.initial_seed()
        self._versions = {name: (tensor, tensor._version) for name, tensor in _state(model)}
        self._context, self._modes = copy_context(), _modes()

    def check(self) -> None:
        """Refuse a forward that did what a graph cannot repeat.

        Raises:
            Refusal: it caught an exception, drew from Python's or numpy's generators, seeded torch's, or wrote to parameters or buffers in
                place, which paused forwards may do if none sees what another wrote.
        """
        if self.caught is not None:
            raise Refusal(f'{self.caught}: whether it is raised depends on the batch; use engine="suspend"')
        if foreign_random() != self._python_random:
            raise Refusal(
                "forward: it draws from the random generators of Python or numpy, whose numbers would be frozen in a graph; draw with "
                'torch, or use engine="suspend"'
            )
        if torch.initial_seed() != self._seed:
            raise Refusal('forward: it seeds torch\'s random generator, which a graph cannot repeat; use engine="suspend"')
        written = [name for name, (tensor, version) in self._versions.items() if tensor._version != version]
        if written:
            raise Refusal(written_in_place(written[0]))

    def context(self, builder: GraphBuilder, encoder: Encoder) -> tuple[tuple[ContextVar[Any], Any], ...]:
        """Collect the context variables that the forward has set around a call, but for collectors, which only take notes.

        Args:
            builder: refuses.
            encoder: knows what belongs to the model.

        Returns:
            Variable and value.

        Raises:
            Refusal: one of them holds a tensor, or a mode of torch is entered around the call.
        """
        entered = [mode for mode in _modes() if not isinstance(mode, _HARMLESS) and not any(mode is one for one in self._modes)]
        entered = [mode for mode in entered if not type(mode).__module__.startswith(__package__)]
        if entered:
            raise builder.refuse(
                f"a {type(entered[0]).__name__} (a mode of torch) is entered around the call of a module, where no graph would be in "
                'it; enter it inside of the module, or use engine="suspend"'
            )
        found = []
        for variable, value in copy_context().items():
            if self._context.get(variable, _UNSET) is value or isinstance(value, TorchFunctionMode | dict | list | set):
                continue
            if find_tensor(value, encoder.owns) is not None:
                raise builder.refuse(
                    f"context variable {variable.name} hands a tensor to the module that is called, past its arguments; pass it as an "
                    'argument, or use engine="suspend"'
                )
            found.append((variable, value))
        return tuple(found)


_HARMLESS = (DeviceContext,)  # says where tensors are made, which is the same for all batches


def _modes() -> list[Any]:
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def written_in_place(name: str) -> str:
    """Say what is wrong with a tensor that every forward rewrites.

    Args:
        name: of a parameter or buffer.

    Returns:
        The message.
    """
    return (
        f"{name}: every forward writes to it, and all samples share it; keep what changes in a buffer or attribute, and put a new tensor "
        'there (self.name = ...) instead of writing to it, or use pipeline="basic"'
    )


def exchanged(name: str) -> str:
    """Say what is wrong with a module or parameter in whose place every forward puts another.

    Args:
        name: of the parameter that is no longer there.

    Returns:
        The message.
    """
    return (
        f"{name}: forward puts another module or parameter in its place, if only for a while, and all samples share the model; choose by "
        'calling one or the other (self.b(x) in place of self.a(x)), or use pipeline="basic"'
    )


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_inference():
            yield name, tensor


def modules_around(model: nn.Module, targets: Container[int]) -> set[nn.Module]:
    """Find the modules that hold a target, and are none themselves.

    Args:
        model: the model.
        targets: ids of the targets.

    Returns:
        What a recorder takes apart.
    """
    found: set[nn.Module] = set()

    def holds(module: nn.Module) -> bool:
        below = [holds(child) for child in module.children()]
        if any(below):
            found.add(module)
        return any(below) or id(module) in targets

    holds(model)
    return {module for module in found if id(module) not in targets}
