"""Where a model is cut: the sequential targets, usually its decoder layers, and why they were chosen.

Nobody has to name them. A model repeats its layers in a ModuleList (or Sequential), so the outermost lists with repeated children are
taken; class names that models declare for other purposes are not trusted, several architectures leave them empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from compressor.errors import TargetError
from compressor.model.targets import outward, resolve_targets
from compressor.settings.kinds import MODULE, TEXTS, Kind
from compressor.settings.options import checked


@dataclass(frozen=True)
class Partition:
    """The sequential targets of a model.

    Attributes:
        targets: dotted name to module, in the order of the model; the name "" is the model itself.
        reason: why these, in one line, for the plan and the log.
        inferred: False where the user named them.
    """

    targets: dict[str, nn.Module]
    reason: str
    inferred: bool = True


def module_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """List a module and all modules below it.

    Args:
        model: the root.
        name: the module; "" for the root.

    Returns:
        Dotted names, in the order of the model.
    """
    return tuple(below for below, _ in model.get_submodule(name).named_modules(prefix=name))


@checked(model=MODULE)
def infer_targets(model: nn.Module) -> Partition:
    """Find the layers of a model: children of its outermost lists that hold modules of one class more than once.

    A list counts when its children are built of further modules (layers, not embeddings or heads) and a class among them repeats, so
    hybrid stacks of two kinds of layers count too. A model without such a list becomes one single target: it is calibrated whole.

    Args:
        model: the model; not modified.

    Returns:
        At least one target.
    """
    found: dict[str, nn.Module] = {}
    lines = []
    for name, module in model.named_modules():
        # Outermost lists come first in `named_modules`; what they hold (experts, branches) is no stack of its own.
        if not found.keys().isdisjoint(outward(name)) or not _is_stack(module):
            continue
        layers = {f"{name}.{child}" if name else child: layer for child, layer in module.named_children() if not _is_scripted(layer)}
        found |= layers
        classes = Counter(type(layer).__name__ for layer in layers.values())
        lines.append(f"{name or 'the model'} repeats " + " and ".join(f"{kind} {num}x" for kind, num in classes.items()))
    if not found:
        return Partition({"": model}, "no list of repeated layers was found, so the whole model is calibrated at once")
    return Partition(found, "; ".join(lines))


@checked(model=MODULE, patterns=Kind(lambda value: value is None or TEXTS.holds(value), "a list of texts, or None"))
def partition(model: nn.Module, patterns: Sequence[str] | None) -> Partition:
    """Return the targets that the user names, or infer them.

    Args:
        model: the model; not modified.
        patterns: class names, dotted names or `re:` patterns; None to infer.

    Returns:
        Targets of which none lies inside another.

    Raises:
        TargetError: a pattern matches nothing or TorchScript, or a target lies inside another.
    """
    if patterns is None:
        return infer_targets(model)
    targets = resolve_targets(model, patterns, called="sequential_targets")
    for name, module in targets.items():
        if _is_scripted(module):
            raise TargetError(f"sequential_targets: {name or 'the model'} is TorchScript, where no hook looks inside; name other modules")
        outer = next((other for other in outward(name) if other != name and other in targets), None)
        if outer is not None:
            raise TargetError(f"sequential_targets: {name} lies inside {outer}, and both are targets; name only one of the two levels")
    return Partition(targets, f"named by {', '.join(patterns)}", inferred=False)


def _is_stack(module: nn.Module) -> bool:
    """True for a list that repeats a class of composite layers."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    children = [child for child in module.children() if not _is_scripted(child)]
    kinds = Counter(type(child) for child in children)
    # One class twice is a repetition; lists of branches that are all different are not.
    return len(kinds) < len(children) and all(_is_layer(child) for child in children)


def _is_scripted(module: nn.Module) -> bool:
    """True for TorchScript: no hook looks inside, and most of it takes none."""
    return isinstance(module, torch.jit.ScriptModule)


def _is_layer(module: nn.Module) -> bool:
    """True for what can be called (a list cannot) and is built of further modules with parameters."""
    is_callable = type(module).forward is not nn.Module.forward
    return is_callable and any(next(below.parameters(), None) is not None for below in module.children())


def taken_apart(targets: Collection[str]) -> set[str]:
    """Name the modules that hold a target; a graph does not call them.

    Args:
        targets: dotted names.

    Returns:
        Dotted names.
    """
    found = {""} if any(targets) else set()
    for target in targets:
        parts = target.split(".")
        found |= {".".join(parts[:number]) for number in range(1, len(parts))}
    return found - set(targets)
