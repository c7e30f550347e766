"""One module under examination: how to call it, watch its forward, and leave it exactly as it was.

Every check works on the module itself, never on a copy, since copying is one of the things that is checked. `untouched` is what makes that
safe: it keeps the attributes of every submodule, and bytes, versions and gradients of every tensor, and puts them back.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from compressor.errors import UserInputError
from compressor.random_state import random_numbers_kept
from harness.lifecycle.driving.torch_settings import EnteredModes
from harness.modules.tensors import held_tensors, same_bits
from harness.reporting.record import Claim
from harness.tolerance.bits import without_bytes

ForwardKind = Literal["forward_pre", "forward"]
Kind = Literal["forward_pre", "forward", "full_backward_pre", "full_backward"]
Owner = Literal["own", "global"]
_CheckFunction = Callable[["Subject"], list[str]]
Watcher = Callable[[tuple[Any, ...], dict[str, Any]], None]


PROBE = "harness_probe"
"""Name of the attribute, buffer or key that some checks add for a moment."""


class NotApplicableError(Exception):
    """A check has nothing to look at on this module; the text says why."""


@dataclass
class Subject:
    """A module, and inputs that it takes.

    Attributes:
        module: the module itself.
        given: the caller's inputs, positional and keyword ones; a forward gets copies, since it may write to what it is given.
        not_seen: what the check that runs could not look at, in words.
    """

    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    not_seen: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, module: object, inputs: object) -> Subject:
        """Check what the caller gave.

        Args:
            module: should be an nn.Module whose parameters exist.
            inputs: a tuple of positional inputs (a NamedTuple too), a mapping of keyword inputs, or one positional input (a list too).

        Returns:
            The subject.

        Raises:
            UserInputError: no module, a lazy one that has not seen an input, or one of TorchScript or torch.compile; one that holds
                tensors without plain bytes; inputs that cannot be copied.
        """
        if not isinstance(module, nn.Module):
            what = f"the class {module.__name__}" if isinstance(module, type) else f"{type(module).__name__} object"
            raise UserInputError(f"verify_module: {what} is no nn.Module object; give a module that is built")
        if "_modules" not in vars(module):
            raise UserInputError(f"verify_module: {type(module).__name__} has not called super().__init__() in its __init__; call it first")
        if any(isinstance(part, torch.jit.ScriptModule) or hasattr(part, "_orig_mod") for part in module.modules()):
            raise UserInputError(
                f"verify_module: {type(module).__name__} is, or holds, what torch.jit or torch.compile has made, and nobody can put that "
                "back; give the module that it was made from"
            )
        if any(torch.nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            raise UserInputError(f"verify_module: {type(module).__name__} has parameters without a shape; call it once before")
        for kind in filter(None, map(without_bytes, held_tensors(module))):
            raise UserInputError(
                f"verify_module: {type(module).__name__} holds a {kind} tensor, whose values can neither be compared nor put back; give a "
                "module of dense tensors"
            )
        args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, tuple) else (inputs,)
        subject = cls(module, (args, dict(inputs) if isinstance(inputs, Mapping) else {}))
        try:
            subject.inputs()
        except (TypeError, RuntimeError, copy.Error) as error:
            raise UserInputError(f"verify_module: the inputs cannot be copied ({error}); give some that copy.deepcopy takes") from error
        return subject

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a fresh copy of the positional and the keyword inputs."""
        tensors = [leaf for leaf in tree_leaves(self.given) if isinstance(leaf, Tensor)]
        # Those that deepcopy refuses: with a history of gradients, and of other layouts.
        return copy.deepcopy(self.given, {id(one): one.clone() for one in tensors if not one.is_leaf or without_bytes(one)})

    def call(self) -> Any:
        """Call the module on its inputs, with the same random numbers each time; the caller's RNG state stays."""
        return run(self.module, *self.inputs())

    def repeats(self) -> bool:
        """Say whether two calls on the same inputs and random numbers give one output; else none can be held against it.

        Returns:
            False where the module keeps something from call to call, or draws numbers of its own; a note says so.
        """
        if same_bits(self.call(), self.call()):
            return True
        self.not_seen.append("outputs were not compared: a second call on the same inputs gives another one")
        return False

    def by_keyword(self) -> dict[str, Any]:
        """Return all inputs by the names that forward gives them.

        Returns:
            Name -> input.

        Raises:
            NotApplicableError: forward gives an input no name.
        """
        signature = inspect.signature(self.module.forward)
        args, kwargs = self.inputs()
        bound = signature.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
                raise NotApplicableError(f"forward takes {name!r} without a name")
            named |= value if kind == inspect.Parameter.VAR_KEYWORD else {name: value}
        if not named:
            raise NotApplicableError("forward takes no input")
        if self.module._forward_pre_hooks:
            self._refuse_unless_taken(named)
        return named

    def _refuse_unless_taken(self, kwargs: dict[str, Any]) -> None:
        """A hook of the module's own may read positional inputs, which a call by names does not give it."""
        try:
            run(self.module, (), copy.deepcopy(kwargs))
        except Exception as error:
            why = f"beside a pre-hook of its own it does not take its inputs by name: {type(error).__name__}: {error}"
            raise NotApplicableError(why) from error

    def in_order(self) -> tuple[Any, ...]:
        """Return all inputs as positional ones.

        Returns:
            The inputs in forward's order.

        Raises:
            NotApplicableError: forward takes one of them by name only.
        """
        args, kwargs = self.inputs()
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        if bound.kwargs:
            raise NotApplicableError(f"forward takes {sorted(bound.kwargs)} by name only")
        return bound.args

    @contextmanager
    def watched_forward(self, on_call: Watcher) -> Iterator[None]:
        """Tell what each forward of the module gets; `untouched` takes the watcher away.

        Args:
            on_call: gets the positional and the keyword inputs, before the real forward does.

        Yields:
            Nothing.
        """
        real = self.module.forward

        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            on_call(args, kwargs)
            return real(*args, **kwargs)

        with untouched(self.module):
            self.module.forward = forward
            yield

    @contextmanager
    def hooks(self) -> Iterator[Hooks]:
        """Register hooks for a while.

        Yields:
            What registers them.
        """
        with untouched(self.module), ExitStack() as stack:
            yield Hooks(self.module, stack)


@dataclass(frozen=True)
class ModuleCheck:
    """One statement about a module, and the function that looks for deviations from it.

    Attributes:
        claim: name and statement.
        run: returns one line per deviation; raises NotApplicableError where there is nothing to look at.
        calls: it calls the module, so it needs inputs that the module takes.
    """

    claim: Claim
    run: Callable[[Subject], list[str]]
    calls: bool


def collect(checks: list[ModuleCheck]) -> Callable[..., Callable[[_CheckFunction], _CheckFunction]]:
    """Make the decorator that adds checks to a list; the statement of a check is the first line of its docstring.

    Args:
        checks: where they go; changed by every use of the decorator.

    Returns:
        The decorator: it takes the name, and `calls=False` for a check that never calls the module.
    """

    def check(name: str, calls: bool = True) -> Callable[[_CheckFunction], _CheckFunction]:
        def add(function: _CheckFunction) -> _CheckFunction:
            statement = (function.__doc__ or "").splitlines()[0].removesuffix(".").replace("`", "")
            checks.append(ModuleCheck(Claim(name, statement), function, calls))
            return function

        return add

    return check


@dataclass
class Hooks:
    """Hooks on one module that the end of the block removes."""

    module: nn.Module
    stack: ExitStack

    def register(self, whose: Owner, kind: Kind, hook: Callable[..., Any], **options: bool) -> None:
        """Register a hook on the module, or a global one.

        Args:
            whose: which of the two.
            kind: which of torch's hooks.
            hook: with torch's signature for this kind and these options.
            **options: torch's own.
        """
        (self.own if whose == "own" else self.everywhere)(kind, hook, **options)

    def own(self, kind: Kind, hook: Callable[..., Any], **options: bool) -> RemovableHandle:
        """Register a hook on the module.

        Args:
            kind: which of torch's hooks.
            hook: with torch's signature for this kind.
            **options: torch's own, such as `prepend`.

        Returns:
            torch's handle.
        """
        handle: RemovableHandle = getattr(self.module, f"register_{kind}_hook")(hook, **options)
        self.stack.callback(handle.remove)
        return handle

    def everywhere(self, kind: Kind, hook: Callable[..., Any], **options: bool) -> None:
        """Register a global hook; it only sees the module.

        Args:
            kind: which of torch's global hooks.
            hook: with torch's signature for this kind.
            **options: torch's own, such as `always_call`.
        """

        def only_here(module: nn.Module, *seen: Any) -> Any:
            return hook(module, *seen) if module is self.module else None

        handle: RemovableHandle = getattr(torch_module, f"register_module_{kind}_hook")(only_here, **options)
        self.stack.callback(handle.remove)


def run(module: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a module with fixed random numbers.

    Args:
        module: what to call.
        args: positional inputs.
        kwargs: keyword inputs.

    Returns:
        What it returns.
    """
    with random_numbers_kept(foreign=False, devices="all"):
        torch.manual_seed(0)
        return module(*args, **kwargs)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Put attributes, hooks and the bytes of tensors back at the end of the block, and take off modes of torch, whatever happened in it.

    Args:
        module: the module; its submodules are kept too.

    Yields:
        Nothing.
    """
    kept = [(part, type(part), _kept_attributes(part)) for part in module.modules()]
    tensors = held_tensors(module)
    contents = [(tensor, tensor.data, tensor.requires_grad, tensor.grad if tensor.is_leaf else None) for tensor in tensors]
    # Bytes of the memory: those of a tensor cannot be written where its elements share them, as in an expanded one.
    storages = {(storage.data_ptr(), storage.nbytes()): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    memories = [(storage, storage.clone()) for storage in storages.values()]
    versions = [tensor for tensor in tensors if not tensor.is_inference()]  # a graph made before looks at them in its backward
    modes = EnteredModes()
    for tensor, _, _, grad in contents:
        if grad is not None:
            tensor.grad = grad.detach().clone()
    try:
        with _unsafe_preserve_version_counter(tuple(versions)):
            yield
    finally:
        modes.put_back()  # before anything is written, which would go through them
        for storage, memory in memories:
            if storage.nbytes() != memory.nbytes():
                storage.resize_(memory.nbytes())
            storage.copy_(memory)
        for tensor, data, requires_grad, grad in contents:
            tensor.data = data
            if tensor.is_leaf:
                if tensor.requires_grad != requires_grad:  # an inference tensor refuses even what it has
                    tensor.requires_grad_(requires_grad)
                tensor.grad = grad
        for part, its_class, attributes in kept:
            if type(part) is not its_class:
                object.__setattr__(part, "__class__", its_class)
            _put_back(part, attributes)


_Contents = dict[str, tuple[Any, Any]]


def _kept_attributes(module: nn.Module) -> _Contents:
    """Each attribute, and the contents of those that are torch's (or anyone's) plain containers."""
    return {name: (value, value.copy() if isinstance(value, dict | set | list) else None) for name, value in vars(module).items()}


def _put_back(module: nn.Module, attributes: _Contents) -> None:
    now = vars(module)
    for name in set(now) - set(attributes):
        del now[name]
    for name, (value, contents) in attributes.items():
        now[name] = value
        if isinstance(value, dict | set):
            value.clear()
            value.update(contents)
        elif isinstance(value, list):
            value[:] = contents
