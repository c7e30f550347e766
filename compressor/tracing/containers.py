"""What holds other objects, or bytes: copied one level deep, compared, and filled again with what was there.

A container is a dict, list, set, deque, bytearray or array.array, a class (it holds its attributes), or an object of a class with
`__slots__` (it holds what lies in them).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from operator import is_
from types import MemberDescriptorType
from typing import Any

RAW = (bytearray, array)
CONTAINERS = (dict, list, set, deque, *RAW)
_BUILTIN = frozenset({dict, OrderedDict, list, set})


def slots_of(value: object) -> dict[str, MemberDescriptorType]:
    """List what gives access to the slots of an object: no `__setattr__` of a class has a say there.

    Args:
        value: anything.

    Returns:
        By class and name; empty for an object without slots.
    """
    return {
        f"{cls.__qualname__}.{name}": member
        for cls in type(value).__mro__
        if "__slots__" in vars(cls)
        for name, member in vars(cls).items()
        if isinstance(member, MemberDescriptorType)
    }


def attributes_of(value: object) -> dict[str, Any] | None:
    """Give the attributes that an object holds beside its slots; no code of its class has a say there.

    Args:
        value: anything.

    Returns:
        The very dict; None of an object without.
    """
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


def content(container: Any) -> Any:
    """Copy what a container holds, one level deep.

    Args:
        container: see above.

    Returns:
        A dict, list, set, or bytes; of an object with slots a dict of those that hold something.
    """
    if isinstance(container, type):
        return dict(vars(container))
    if isinstance(container, dict):
        return dict.copy(container)
    if isinstance(container, RAW):
        return memoryview(container).tobytes()
    if isinstance(container, set):
        return set.copy(container)
    return [*container] if isinstance(container, list | deque) else in_slots(container)


def in_slots(value: object) -> dict[str, Any]:
    """Give what lies in the slots of an object.

    Args:
        value: anything.

    Returns:
        By class and name.
    """
    held = {}
    for name, member in slots_of(value).items():
        try:
            held[name] = member.__get__(value, type(value))
        except AttributeError:  # nothing has been put there
            continue
    return held


def holds(container: Any, kept: Any) -> bool:
    """Say whether a container holds the very same objects as before, in the same order.

    Args:
        container: see above.
        kept: its `content` from before.

    Returns:
        True if so.
    """
    if not kept and type(container) in _BUILTIN:  # as most are: the hooks of a module alone are a dozen
        return not container
    if isinstance(container, set):
        return len(container) == len(kept) and {*map(id, container)} == {*map(id, kept)}
    if isinstance(kept, bytes):
        return bool(content(container) == kept)
    if isinstance(kept, dict):
        now = vars(container) if isinstance(container, type) else container if isinstance(container, dict) else content(container)
        return len(now) == len(kept) and all(map(is_, now.values(), kept.values())) and list(now) == list(kept)
    return len(container) == len(kept) and all(map(is_, container, kept))


def fill(container: Any, kept: Any) -> None:
    """Let a container hold what it held. Changes it.

    Args:
        container: see above.
        kept: its `content` from before.
    """
    if isinstance(container, type):
        for key in [key for key in {**kept, **vars(container)} if kept.get(key, container) is not vars(container).get(key, container)]:
            setattr(container, key, kept[key]) if key in kept else delattr(container, key)
    # By the methods of the base class: those of a subclass may do more than hold.
    elif isinstance(container, OrderedDict):
        OrderedDict.clear(container)
        OrderedDict.update(container, kept)
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, kept)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), kept)
    elif isinstance(container, RAW):
        container[:] = array(container.typecode, kept) if isinstance(container, array) else kept
    elif isinstance(container, set | deque):
        container.clear()
        container.update(kept) if isinstance(container, set) else container.extend(kept)
    else:
        _fill_slots(container, kept)


def _fill_slots(value: object, kept: dict[str, Any]) -> None:
    now = in_slots(value)
    for name, member in slots_of(value).items():
        if name in kept:
            member.__set__(value, kept[name])
        elif name in now:
            member.__delete__(value)
