"""Hooks that belong to the object that made them, can be switched off for a while, and can all be taken away at once.

Everything lives on the instance: two modifiers, two sessions and two threads do not see each other's hooks or switches. A hook is
registered with torch's own `register_*_hook`, so the order of hooks stays torch's.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, MappingProxyType
from typing import Any, Literal
from weakref import WeakSet

from pydantic import BaseModel, PrivateAttr
from torch import nn
from torch.utils.hooks import RemovableHandle

from compressor.errors import LifecycleError

HookKind = Literal["forward", "forward_pre", "full_backward", "full_backward_pre"]

# Each kind of hook, and the options that torch's register method takes for it.
HOOK_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "forward": ("with_kwargs", "always_call"),
        "forward_pre": ("with_kwargs", "prepend"),
        "full_backward": (),
        "full_backward_pre": (),
    }
)

# Where torch keeps forward hooks, and what it was told of each.
_TABLES = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_TOLD = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
_OF_MODIFIERS: WeakSet[Callable[..., Any]] = WeakSet()


def raised_in_hook(error: BaseException) -> bool:
    """Say whether an error left a hook of a modifier, and not the model's own code.

    Args:
        error: caught.

    Returns:
        True where one of its frames calls such a hook.
    """
    calls = {hook.__code__ for hook in _OF_MODIFIERS if isinstance(hook, FunctionType)}
    return any(frame.f_code in calls for frame, _ in traceback.walk_tb(error.__traceback__))


def hand_over_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let a module that takes the place of another run the hooks of the model's author, of both directions. Changes the tables of both.

    Hooks of modifiers stay with the old one. Where neither carries such hooks, both modules share their tables, so that the author's
    handles, which know the table of the old one, take a hook off both.

    Args:
        old: the module that goes.
        new: the module that comes; one that holds the old one leaves it its hooks.
    """
    if any(module is old for module in new.modules()):
        return
    tables = (*_TABLES, *_BACKWARD)
    owned = {
        key for table in tables for key, hook in getattr(old, table).items() if isinstance(hook, FunctionType) and hook in _OF_MODIFIERS
    }
    apart = bool(owned) or any(getattr(new, table) for table in tables)  # handles of hooks that the new one has know its own tables
    new._is_full_backward_hook = old._is_full_backward_hook
    for table in (*tables, *_TOLD):
        kept, own = getattr(old, table), getattr(new, table)
        if apart:
            own.update({key: value for key, value in kept.items() if key not in owned})
        else:
            kept.update(own)
            setattr(new, table, kept)


@contextmanager
def without_modifier_hooks(model: nn.Module, but: Collection[str] = ()) -> Iterator[None]:
    """Take the forward hooks of all modifiers off for the duration: for a forward that none of them is to see. Changes the tables.

    Args:
        model: hooks of its author stay.
        but: dotted names of modules whose hooks stay, too.

    Yields:
        Nothing.
    """
    tables = [getattr(module, table) for name, module in model.named_modules() if name not in but for table in _TABLES]
    before = [(table, OrderedDict(table)) for table in tables if table]
    asleep = [{key for key, hook in hooks.items() if isinstance(hook, FunctionType) and hook in _OF_MODIFIERS} for _, hooks in before]
    try:
        for (table, _), keys in zip(before, asleep, strict=True):
            for key in keys:
                del table[key]
        yield
    finally:
        for (table, hooks), keys in zip(before, asleep, strict=True):
            now = OrderedDict(table)
            first = next((place for place, key in enumerate(now) if key in hooks), len(now))
            ahead = list(now)[:first]  # what came meanwhile, such as a rotation, stays
            kept = [key for key in hooks if key in keys or key in now]  # in their order
            table.clear()
            table.update({key: hooks.get(key) or now[key] for key in dict.fromkeys([*ahead, *kept, *now])})


class HooksMixin(BaseModel):
    """Owner of hooks on modules."""

    # In the order of registration: where each hook sits and of which kind it is.
    _hook_handles: dict[RemovableHandle, tuple[nn.Module, HookKind]] = PrivateAttr(default_factory=dict)
    _num_disabled: int = PrivateAttr(default=0)

    def register_hook(
        self,
        module: nn.Module,
        fn: Callable[..., Any],
        kind: HookKind,
        with_kwargs: bool = False,
        always_call: bool = False,
        prepend: bool = False,
    ) -> RemovableHandle:
        """Put a hook on a module; it belongs to this object and sleeps inside `disable_hooks`. Changes the module.

        Args:
            module: the module to watch.
            fn: the hook, with torch's signature for this kind.
            kind: which of torch's hooks; see HOOK_OPTIONS.
            with_kwargs: as in torch: the hook also gets the keyword arguments.
            always_call: as in torch: the hook runs after an exception in forward, too.
            prepend: as in torch: the hook runs before those that are there, and sees what the module is called with.

        Returns:
            torch's handle, for `remove_hooks`.

        Raises:
            LifecycleError: an unknown kind, or an option that this kind of hook does not have.
        """
        given = {"with_kwargs": with_kwargs, "always_call": always_call, "prepend": prepend}
        if kind not in HOOK_OPTIONS:
            raise LifecycleError(f"register_hook: kind={kind!r} is no kind of hook; give one of {', '.join(HOOK_OPTIONS)}")
        for option, value in given.items():
            if value and option not in HOOK_OPTIONS[kind]:
                raise LifecycleError(f"register_hook: {option}=True does not exist for kind={kind!r}; leave it out")

        @wraps(fn)
        def call_unless_disabled(*args: Any, **kwargs: Any) -> Any:
            return None if self._num_disabled else fn(*args, **kwargs)

        _OF_MODIFIERS.add(call_unless_disabled)
        register = getattr(module, f"register_{kind}_hook")
        handle: RemovableHandle = register(call_unless_disabled, **{option: given[option] for option in HOOK_OPTIONS[kind]})
        self._hook_handles[handle] = (module, kind)
        return handle

    def hooked_modules(self) -> list[tuple[nn.Module, HookKind]]:
        """Say where hooks of this object sit now.

        Returns:
            The module and the kind of every hook, in the order of registration.
        """
        return list(self._hook_handles.values())

    def remove_hooks(self, handles: Iterable[RemovableHandle] | None = None) -> None:
        """Take hooks of this object off their modules. Changes the modules.

        Args:
            handles: the hooks to remove; all of this object where None.

        Raises:
            LifecycleError: a handle that this object does not own (any more); nothing is removed.
        """
        chosen = set(self._hook_handles if handles is None else handles)
        if not chosen <= self._hook_handles.keys():
            raise LifecycleError("remove_hooks: a handle was given that is not registered here; give each handle to its owner, once")
        for handle in chosen:
            handle.remove()
            del self._hook_handles[handle]

    @contextmanager
    def disable_hooks(self) -> Iterator[None]:
        """Put the hooks of this object to sleep; contexts nest, and only the outermost exit wakes them.

        Yields:
            Nothing.
        """
        self._num_disabled += 1
        try:
            yield
        finally:
            self._num_disabled -= 1
