"""The Python variables that a step's functions reach: what they close over, their defaults, and the globals they name.

A replay runs no Python. So a counter in a closure would stand still, and a flag that changes between steps would not be seen: the guards
compare these variables like any other fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from traceback import walk_tb
from types import CellType, FunctionType
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from compressor.errors import GuardDriftError, ReplayError
from compressor.training.guards.frozen_value import MISSING, is_foreign
from compressor.training.guards.reach import Getter, Walk, runs
from compressor.training.guards.said_names import behind, home
from compressor.training.step.step import HasPlanKey, TrainStep

# Hooks that torch runs for every module, and for every optimizer.
_MODULE_HOOKS: tuple[dict[Any, Any], ...] = (
    *(torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks),
    *(torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks),
)
_OPTIMIZER_HOOKS: tuple[dict[Any, Any], ...] = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
GLOBAL_HOOKS = (*_MODULE_HOOKS, *_OPTIMIZER_HOOKS)
T = TypeVar("T")
# What has been found of which step since a look began.
_seen_in_look: ContextVar[dict[tuple[object, TrainStep], Any] | None] = ContextVar("seen_in_look", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Nothing of a step runs in here, so that what its functions reach is found once, whoever asks for it.

    Yields:
        None: within a look that has begun already, that one goes on.

    Raises:
        GuardDriftError: an object that is looked at raises.
    """
    token = _seen_in_look.set({}) if _seen_in_look.get() is None else None
    try:
        yield
    except Exception as error:  # the user's own code raises what it likes
        raised = _raised_by_object(error)
        if raised is None:
            raise
        raise GuardDriftError(raised) from error
    finally:
        if token is not None:
            _seen_in_look.reset(token)


def _raised_by_object(error: Exception) -> str | None:
    """Say which code of the user's raised; None where it was none, so that a bug of ours is not taken for one of theirs."""
    frames = [one for one in walk_tb(error.__traceback__) if not is_foreign(one[0].f_globals.get("__name__"))]
    if isinstance(error, ReplayError) or not (frames or isinstance(error, ReferenceError)):
        return None
    code, line = (frames[-1][0].f_code, frames[-1][1]) if frames else (None, 0)
    where = "weakref.proxy" if code is None else f"{code.co_name} at {Path(code.co_filename).name}:{line}"
    return (
        f"{where}: it raises {type(error).__name__} ({error}) when the guards look at an object that the step reaches; "
        "let the object give its class, its attributes and its items, or let the step not reach it"
    )


def once_a_look(find: Callable[[TrainStep], T]) -> Callable[[TrainStep], T]:
    """Let a function that finds something of a step run once in a look.

    Args:
        find: what it returns is not changed by its callers.

    Returns:
        A function that does the same.
    """

    @wraps(find)
    def found(step: TrainStep) -> T:
        seen = _seen_in_look.get()
        if seen is None:
            with one_look():
                return find(step)
        if (find, step) not in seen:
            seen[find, step] = find(step)
        return seen[find, step]

    return found


def variables(step: TrainStep, *, with_modules: bool = False) -> list[tuple[str, Getter]]:
    """List the variables that the functions of a step reach: its loss function, forward methods, hooks, and functions that modules keep.

    Args:
        step: the step; not changed.
        with_modules: variables that hold a module count too.

    Returns:
        Name for messages, and a function that gives the value of the moment.
    """
    found = _reached(step)[0]
    return found if with_modules else [(name, getter) for name, getter in found if not isinstance(getter(), nn.Module)]


def other_modules(step: TrainStep) -> dict[str, nn.Module]:
    """List modules that the functions of a step reach beside the model, such as a teacher or a criterion.

    Args:
        step: the step; not changed.

    Returns:
        Name to module, submodules included.
    """
    return {name: module for module, name in _reached(step)[1].others.items()}


def reached_classes(step: TrainStep) -> dict[type, Mapping[str, Any]]:
    """List the classes that the functions of a step reach, by an object or by name.

    Args:
        step: the step; not changed.

    Returns:
        Class to a live view of its attributes; those of libraries are left out.
    """
    return {base: vars(base) for cls in _reached(step)[1].classes for base in cls.__mro__ if not is_foreign(base.__module__)}


def said_by_loss(step: TrainStep) -> Set[str]:
    """List the attributes that the loss function, modules and hooks name, and what they call.

    Args:
        step: the step; not changed.

    Returns:
        Names.
    """
    return _reached(step)[2]


@once_a_look
def _reached(step: TrainStep) -> tuple[list[tuple[str, Getter]], Walk, frozenset[str]]:
    found: list[tuple[str, Getter]] = []
    for name, tensor in (*step.parameters().items(), *step.model.named_buffers()):
        own = [key for key in vars(tensor) if not key.startswith("_dynamo_")]  # with those torch.compile marks what it compiles
        found += [(f"attribute '{key}' of {name}", partial(vars(tensor).get, key)) for key in own]
    walk = Walk(frozenset(step.model.modules()))
    found += walk.follow(_roots(step))
    said = frozenset(walk.said)
    return [*found, *walk.follow(_roots_beside(step))], walk, said


def _roots(step: TrainStep) -> Iterator[tuple[str, Any]]:
    yield "loss_fn", step.loss_fn
    yield from ((name or "the model", module) for name, module in step.model.named_modules())
    for name, parameter in step.parameters().items():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        hooks = (*(parameter._backward_hooks or {}).values(), *(after or {}).values())
        yield from ((f"a hook of {name}", hook) for hook in hooks if runs(hook))
    yield from (("a hook of all modules", hook) for table in _MODULE_HOOKS for hook in table.values() if runs(hook))


def _roots_beside(step: TrainStep) -> Iterator[tuple[str, Any]]:
    yield from _zero_roots(step.optimizer)
    yield from _update_roots(step.optimizer) if step.update_is_captured else ()
    for number, modifier in enumerate(step.modifiers):  # one with a plan key speaks for itself, and so do those of this package
        if not isinstance(modifier, HasPlanKey) and not is_foreign(type(modifier).__module__):
            yield f"on_event() of modifier {number}", modifier.on_event


def _zero_roots(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Give a `zero_grad()` of one's own, which is captured with the step even where the update is not."""
    function = behind(optimizer.zero_grad)
    if not isinstance(function, FunctionType) or not is_foreign(home(function)):
        yield "zero_grad() of the optimizer", optimizer.zero_grad


def _update_roots(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    yield from (("a hook of the optimizer", hook) for hook in hooks if runs(hook))
    yield from (("a hook of all optimizers", hook) for table in _OPTIMIZER_HOOKS for hook in table.values() if runs(hook))
    if not is_foreign(type(optimizer).__module__):
        yield "step() of the optimizer", optimizer.step


def put(getter: Getter, value: object) -> None:
    """Set a variable that was found. Changes what holds it; what nobody can set stays.

    Args:
        getter: gives its value.
        value: the value that it is to have.
    """
    assert isinstance(getter, partial)
    holder = getattr(getter.func, "__self__", None)  # of a dict's own `get`
    target, *rest = (holder, *getter.args) if isinstance(holder, dict) else getter.args
    if isinstance(target, CellType):
        target.cell_contents = value
    elif isinstance(target, ContextVar):
        target.set(value)
    elif isinstance(target, dict) and value is MISSING:
        target.pop(rest[0], None)
    elif isinstance(target, dict):
        target[rest[0]] = value
    elif rest:
        setattr(target, rest[0], value)
