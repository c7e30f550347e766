"""Which name in a recipe means which modifier class.

Four ways, looked up in this order: the table below; a class given to `register_modifier`; an entry point of the group
`compressor.modifiers` of an installed package; and `package.module:Class`, which needs no registration. A class is imported when it is
first asked for, so that knowing the names costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TypeVar

from compressor.errors import RecipeError
from compressor.lifecycle import Modifier
from compressor.object_reference import resolve, subclass_names
from compressor.spelling import suggest

ENTRY_POINT_GROUP = "compressor.modifiers"

# The modifiers of this package: name -> module:Class.
MODIFIERS: Mapping[str, str] = MappingProxyType(
    {
        "AWQModifier": "compressor.modifiers.transforms.awq:AWQModifier",
        "AutoRoundModifier": "compressor.modifiers.autoround:AutoRoundModifier",
        "ConstantPruningModifier": "compressor.modifiers.pruning.magnitude:ConstantPruningModifier",
        "GPTQModifier": "compressor.modifiers.gptq:GPTQModifier",
        "LogarithmicEqualizationModifier": "compressor.modifiers.transforms.smoothing:LogarithmicEqualizationModifier",
        "MagnitudePruningModifier": "compressor.modifiers.pruning.magnitude:MagnitudePruningModifier",
        "QuIPModifier": "compressor.modifiers.transforms.quip:QuIPModifier",
        "QuantizationModifier": "compressor.modifiers.quantization:QuantizationModifier",
        "ScaleTuningModifier": "compressor.modifiers.scale_tuning:ScaleTuningModifier",
        "SmoothQuantModifier": "compressor.modifiers.transforms.smoothing:SmoothQuantModifier",
        "REAPPruningModifier": "compressor.modifiers.pruning.reap:REAPPruningModifier",
        "SparseGPTModifier": "compressor.modifiers.pruning.sparsegpt:SparseGPTModifier",
        "SpinQuantModifier": "compressor.modifiers.transforms.spinquant:SpinQuantModifier",
        "WandaPruningModifier": "compressor.modifiers.pruning.wanda:WandaPruningModifier",
    }
)

# Modifiers of llm-compressor 0.14 by the names in its recipes: one that is not among ours is a gap, no misspelling.
PEER_MODIFIERS = frozenset(
    {
        "AWQModifier",
        "AutoRoundModifier",
        "ConstantPruningModifier",
        "GPTQModifier",
        "IMatrixGatherer",
        "LogarithmicEqualizationModifier",
        "MagnitudePruningModifier",
        "QuIPModifier",
        "QuantizationModifier",
        "REAPPruningModifier",
        "SmoothQuantModifier",
        "SparseGPTModifier",
        "SpinQuantModifier",
        "WandaPruningModifier",
    }
)

# Classes given to register_modifier. A table of names, as the entry points are; no run keeps anything here.
_registered: dict[str, type[Modifier]] = {}

ModifierClass = TypeVar("ModifierClass", bound=type[Modifier])


def register_modifier(cls: ModifierClass) -> ModifierClass:
    """Make a modifier class known to recipes under its class name; also usable as a decorator.

    Args:
        cls: a concrete subclass of Modifier.

    Returns:
        The class itself.

    Raises:
        RecipeError: no modifier class, or the name means another class already.
    """
    checked = _check_class(cls, "register_modifier")
    name = checked.__name__
    if name in MODIFIERS or _registered.get(name, checked) is not checked:
        raise RecipeError(f"register_modifier: {name} is the name of another modifier already; rename the class")
    _registered[name] = checked
    return cls


def known_modifiers() -> list[str]:
    """Return every name that a recipe may use without `module:Class`, sorted; nothing is imported."""
    return sorted({*MODIFIERS, *_registered, *(point.name for point in _entry_points())})


def find_modifier(name: str) -> type[Modifier]:
    """Return the class that a name in a recipe means.

    Args:
        name: a known name, or `package.module:Class`.

    Returns:
        The class.

    Raises:
        RecipeError: the name is not known, cannot be imported, is claimed twice, or means no concrete modifier class.
    """
    if name in MODIFIERS:
        return _import_class(MODIFIERS[name], name)
    if name in _registered:
        return _registered[name]
    if ":" in name:
        return _import_class(name, name)
    points = {point.value for point in _entry_points() if point.name == name}
    if len(points) > 1:
        raise RecipeError(f"{name}: installed packages claim this name for {', '.join(sorted(points))}; write one of these in the recipe")
    if points:
        return _import_class(points.pop(), name)
    if name in PEER_MODIFIERS:
        raise RecipeError(
            f"{name}: this modifier of llm-compressor is not available here; take it out of the recipe, "
            f"or use one of {', '.join(known_modifiers())} (or write package.module:Class)"
        )
    raise RecipeError(f"{name}: there is no such modifier; {suggest(name, known_modifiers())} (or write package.module:Class)")


def modifier_name(cls: type[Modifier]) -> str:
    """Return the name under which a recipe finds a class: the short one if it means this class, else `module:Class`.

    Args:
        cls: a modifier class.

    Returns:
        The name; for a class inside a function it is a record only, which `find_modifier` cannot follow.
    """
    try:
        known = find_modifier(cls.__name__) is cls
    except RecipeError:
        known = False
    return cls.__name__ if known else f"{cls.__module__}:{cls.__qualname__}"


def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _import_class(reference: str, name: str) -> type[Modifier]:
    found = resolve(reference, "modifier", where=name, error=RecipeError, names=subclass_names(Modifier)).value
    return _check_class(found, name)


def _check_class(found: object, name: str) -> type[Modifier]:
    if not (isinstance(found, type) and issubclass(found, Modifier)):
        raise RecipeError(f"{name}: {found!r} is no subclass of compressor.lifecycle.Modifier; derive the class from it")
    if inspect.isabstract(found):
        raise RecipeError(f"{name}: {found.__name__} is abstract; define {', '.join(sorted(found.__abstractmethods__))}")
    return found
