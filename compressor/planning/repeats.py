"""Layers of one kind take the same memory: a forward on shapes runs three of each, and the others are taken for the second.

DeepSeek-V3 has 58 layers of 256 experts, and each operation on the meta device is written in Python.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

NUM_RUN = 3  # the first, which may be handed something else, the second, and the last, which reads for the last time what all share
_NUMBERED = re.compile(r"idx|index|(layer|block)_(id|num|number)$")  # attributes in which a layer keeps its number
_PLAIN = (int, float, str, bool, type(None))


def repeated_layers(model: nn.Module, places: Collection[str]) -> dict[str, str]:
    """Find layers that need not run.

    Args:
        model: its lists of modules are looked through, those inside of others not.
        places: dotted names of modules at which the forward is looked at.

    Returns:
        Dotted name of a layer to that of the one it is taken for, which comes before it.
    """
    found: dict[str, str] = {}
    for name, layers in _outermost_lists(model, ""):
        own_modules = [list(layer.modules()) for layer in layers]
        if len({id(module) for modules in own_modules for module in modules}) < sum(map(len, own_modules)):
            continue  # what one layer shares with another is called in both
        seen: dict[str, set[str]] = defaultdict(set)
        for place in (place.removeprefix(f"{name}.") for place in places if place.startswith(f"{name}.")):
            own, _, inside = place.partition(".")
            seen[own].add(inside)
        kinds: dict[Any, list[str]] = defaultdict(list)
        for number, layer in enumerate(layers):
            kind = _kind(layer, number), _of_config(model, number, len(layers)), frozenset(seen[str(number)])
            kinds[kind].append(f"{name}.{number}")
        for alike in (alike for alike in kinds.values() if len(alike) > NUM_RUN):
            found |= dict.fromkeys(alike[2:-1], alike[1])
    return found


def _outermost_lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for child_name, child in module.named_children():
        below = f"{name}.{child_name}".removeprefix(".")
        if isinstance(child, nn.ModuleList) and len(child) > NUM_RUN:
            yield below, child
        else:
            yield from _outermost_lists(child, below)


def _kind(layer: nn.Module, number: int) -> Any:
    """All that tells a layer from others but the values of its tensors and its number."""
    return tuple((name, type(module), *_traits(module, number)) for name, module in layer.named_modules())


def _traits(module: nn.Module, number: int) -> Any:
    tensors = (*module._parameters.items(), *module._buffers.items())
    plain = ((key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN) and not key.startswith("_"))
    return (
        tuple((name, tuple(one.shape), one.dtype) for name, one in tensors if one is not None),
        tuple((key, type(value), None if value == number and _NUMBERED.search(key) else value) for key, value in plain),
    )


def _of_config(model: nn.Module, number: int, length: int) -> Any:
    """What the config lists for each layer, such as `layer_types`."""
    listed = vars(getattr(model, "config", None) or object).items()
    return tuple((key, repr(value[number])) for key, value in listed if isinstance(value, list | tuple) and len(value) == length)


@dataclass(frozen=True)
class _Shape:
    size: torch.Size
    dtype: torch.dtype
    place: int | None  # among what the layer is handed, where it hands that on


def shapes_of(output: Any, handed: Any) -> Any:
    """Keep of what a layer gives the shapes alone.

    Args:
        output: containers of tensors.
        handed: its arguments.

    Returns:
        What `filled` takes.
    """
    places = {id(one): place for place, one in enumerate(tree_leaves(handed))}
    return tree_map_only(Tensor, lambda one: _Shape(one.shape, one.dtype, places.get(id(one))), output)


def filled(shapes: Any, handed: Any, make: Callable[[torch.Size, torch.dtype], Tensor]) -> Any:
    """Return what a layer would give.

    Args:
        shapes: of what a layer like it has given.
        handed: its own arguments.
        make: makes what is not handed on; hidden states of the shape of the first argument stand for those that come of them.

    Returns:
        Containers of tensors.
    """
    leaves = tree_leaves(handed)

    def tensor(shape: _Shape) -> Any:
        if shape.place is not None:
            return leaves[shape.place]
        first = next((one for one in leaves if isinstance(one, Tensor)), None)
        is_alike = first is not None and (first.shape, first.dtype) == (shape.size, shape.dtype)
        return first if is_alike else make(shape.size, shape.dtype)

    return tree_map_only(_Shape, tensor, shapes)


@contextmanager
def standing_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Call something else in place of the forward of a module; its hooks run as they did.

    Args:
        module: is as it was afterwards.
        forward: takes what the module is handed.

    Yields:
        Nothing.
    """
    before = vars(module).copy()
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if "forward" in before:
            vars(module)["forward"] = before["forward"]
        else:
            del vars(module)["forward"]


def outside(names: Iterable[str], layers: Collection[str]) -> list[str]:
    """Leave out what is one of some layers, or lies inside.

    Args:
        names: dotted names.
        layers: dotted names.

    Returns:
        The other names, in their order.
    """
    return [name for name in names if not any(name[: len(name) - len(rest)] in layers for rest in _ends(name))]


def _ends(name: str) -> Iterator[str]:
    yield ""
    for place, letter in enumerate(name):
        if letter == ".":
            yield name[place:]
