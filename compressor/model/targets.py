"""Patterns to modules: which layers of a model a recipe means.

The patterns are those of compressed-tensors, so that recipes and checkpoints carry over: a class name (`Linear`, base classes count), an
exact dotted name, or `re:` and a regular expression that must match from the start of the dotted name. A pattern that matches nothing is
a mistake worth stopping for: a typo in `ignore` quantizes a layer that had to stay as it was. Only a `re:` in `ignore` may match nothing,
since published recipes name parts of other models there; that is noted. A pattern that names no module may name parameters
(`re:.*q_proj.weight`), and `__ALL_PRUNABLE__` names linear layers and convolutions. In experts that were taken apart `gate_proj`,
`up_proj` and `down_proj` are names, too, where the files of the model have others (`w1`), since recipes use them for every model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import TargetError
from compressor.nn.experts import usual_name
from compressor.spelling import nearest

_REGEX_PREFIX = "re:"
_ALSO = "_also_called"
_CLASSES = {"__ALL_PRUNABLE__": ("Linear", "_ConvNd")}  # words of llm-compressor for classes


def ends_of(model: Any) -> tuple[Any, Any]:
    """Give head and embedding of a model.

    Args:
        model: of transformers.

    Returns:
        Each None where the model has none, or does not say which, as one with several.
    """
    found = []
    for find in (model.get_output_embeddings, model.get_input_embeddings):
        try:
            found.append(find())
        except NotImplementedError:
            found.append(None)
    return found[0], found[1]


def text_config(config: Any) -> Any:
    """Give the part of a config that is about text.

    Args:
        config: of transformers, or any other.

    Returns:
        The whole of it where it has no such part, or does not say which, as that of a model with several (Musicgen).
    """
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:
        return config


def resolve_targets(model: nn.Module, targets: Sequence[str], ignore: Sequence[str] = (), called: str = "targets") -> dict[str, nn.Module]:
    """Find the modules that `targets` name and `ignore` does not.

    Args:
        model: searched in the order of `named_modules`; the root itself is never a target.
        targets: patterns of the modules that are wanted.
        ignore: patterns of modules that are left out.
        called: what errors call the first.

    Returns:
        Dotted name to module, in the order of the model; a module that the model holds under several names comes once, under its first.

    Raises:
        TargetError: a pattern matches no module (other than a `re:` in `ignore`) or is no regular expression (all of them are named,
            with the nearest names), or every matched module is ignored, or `ignore` names a module whose parts are targets and stay so.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> list(resolve_targets(model, ["Linear"], ignore=["re:2"]))
        ['0']
    """
    named = _named(model)
    return _resolved(model, named, _match_all(named, _as_list(targets)), ignore, called)


def resolve_layers(
    model: nn.Module, targets: Sequence[str], ignore: Sequence[str], fits: Callable[[nn.Module], bool]
) -> dict[str, nn.Module]:
    """Find the layers that `targets` mean: of what a pattern matches those that fit, or, where none does, those below what it matches.

    Args:
        model: searched in the order of `named_modules`; the root itself is never a target.
        targets: patterns of layers, or of modules that hold them.
        ignore: patterns of modules that are left out.
        fits: whether a module is a layer of the wanted kind.

    Returns:
        Dotted name to module, as `resolve_targets` gives them; modules that do not fit where a pattern leads to nothing that does.

    Raises:
        TargetError: as `resolve_targets` raises it.
    """
    named = _named(model)
    wanted = _match_all(named, _as_list(targets))
    return _resolved(model, named, {pattern: _layers(pattern, modules, fits) for pattern, modules in wanted.items()}, ignore)


def loose_patterns(model: nn.Module, targets: Sequence[str], ignore: Sequence[str], fits: Callable[[nn.Module], bool]) -> list[str]:
    """Say what patterns matched that mean something else than whole lists of layers.

    Args:
        model: as for `resolve_layers`.
        targets: patterns of layers, or of modules that hold them.
        ignore: patterns of modules that are left out.
        fits: whether a module is a layer of the wanted kind.

    Returns:
        A sentence each: targets that match modules which hold layers, and `re:` in `ignore` that match nothing, or nothing but names of
        parameters.
    """
    named = _named(model)
    said = []
    for pattern, modules in _match_all(named, _as_list(targets)).items():
        others = [module for module in modules if not fits(module)]
        if others:
            kinds = ", ".join(sorted({type(module).__name__ for module in others})[:3])
            number = len(_ids({pattern: _layers(pattern, modules, fits)}))
            said.append(f"targets {pattern!r} mean {number} layers, and match {len(others)} modules that are none ({kinds})")
    for pattern, modules in _match_all(named, _as_list(ignore)).items():
        if not modules:
            said.append(f"ignore {pattern!r} {_explain(pattern, named)}")
        elif not any(matches(name, module, pattern) for name, module in named):
            said.append(f"ignore {pattern!r} names parameters, and leaves out the {len(modules)} modules that hold them")
    return said


def owners_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Say by which names parameters are known; those that have several are tied.

    Args:
        model: on any device; not modified.

    Returns:
        By `id` of the parameter; a module that a model holds in several places counts once, for it is one.
    """
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{key}" if name else key)
    return owners


def share_values(one: Tensor, other: Tensor) -> bool:
    """Say whether writing to one of two tensors may change the other.

    Args:
        one: strided, on any device.
        other: strided, of the same storage.

    Returns:
        True where they have an element in common; rows, or columns, of one tensor side by side have none.
    """
    if not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = _span(one), _span(other)
    if end <= other_start or other_end <= start:
        return False
    if one.dtype != other.dtype or (one.storage_offset(), one.shape, one.stride()) == (other.storage_offset(), other.shape, other.stride()):
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    marks.as_strided(one.size(), one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.size(), other.stride(), other.storage_offset()).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one behind its last."""
    first, size = int(tensor.storage_offset()), tensor.element_size()
    last = first + sum(stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    return first * size, (last + 1) * size


def overlaps_itself(tensor: Tensor) -> bool:
    """Say whether writing to one element of a tensor may change another: as in what `expand` and `as_strided` give.

    Args:
        tensor: strided, on any device.

    Returns:
        True where two elements may lie in one place of memory.
    """
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def other_names(model: nn.Module) -> dict[str, list[str]]:
    """Find the modules that a model holds in several places.

    Args:
        model: on any device; not modified.

    Returns:
        The name that `named_modules` gives such a module, to its further ones; of the parts of such a module none, for they move with it.
    """
    first = {id(module): name for name, module in model.named_modules()}
    found: dict[str, list[str]] = {}
    for parent, holder in model.named_modules():
        for child, module in holder._modules.items():
            name = f"{parent}.{child}" if parent else child
            if module is not None and first[id(module)] != name:
                found.setdefault(first[id(module)], []).append(name)
    return found


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """Find every name of every module, also of the parts of one that stands in several places.

    Args:
        model: on any device; not modified.

    Returns:
        The name that `named_modules` gives a module, to all that it has, that one first.
    """
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(name)
    return {names[0]: names for names in found.values()}


def put_module(model: nn.Module, name: str, new: nn.Module, others: Mapping[str, Sequence[str]]) -> None:
    """Put a module in the place of another, wherever the model holds that one. Changes the model.

    Args:
        model: it changes.
        name: of the module that goes, as `named_modules` has it.
        new: the module that comes.
        others: further names of modules, of `other_names`.
    """
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    old = getattr(holder, child, None)
    setattr(holder, child, new)
    for other in others.get(name, ()):
        if model.get_submodule(other) is old:
            model.set_submodule(other, new)


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]


def _layers(pattern: str, modules: list[nn.Module], fits: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """What fits, where none does what fits below, else all; of names and classes others stay, for whoever refuses them."""
    own = [module for module in modules if fits(module)]
    if own:
        return own if pattern.startswith(_REGEX_PREFIX) else modules
    return [part for module in modules for part in module.modules() if fits(part)] or modules


def _resolved(
    model: nn.Module, named: list[tuple[str, nn.Module]], wanted: dict[str, list[nn.Module]], ignore: Sequence[str], called: str = "targets"
) -> dict[str, nn.Module]:
    left_out = _match_all(named, _as_list(ignore))
    _check_all_match({called: wanted, "ignore": left_out}, named)
    wanted_ids, left_out_ids = _ids(wanted), _ids(left_out)
    chosen_ids = wanted_ids - left_out_ids
    found = {name: module for name, module in model.named_modules() if name and id(module) in chosen_ids}
    if wanted and not found:
        raise TargetError(
            f"ignore: {_quoted(left_out)} leaves none of the {len(wanted_ids)} modules that targets {_quoted(wanted)} match; "
            "ignore fewer or target more"
        )
    _check_parts(named, left_out, wanted_ids, found)
    return found


def _check_parts(
    named: list[tuple[str, nn.Module]], left_out: dict[str, list[nn.Module]], wanted_ids: set[int], found: dict[str, nn.Module]
) -> None:
    """Refuse to ignore a module whose parts are targets: a pattern means the modules that it matches, not what lies inside of them."""
    for pattern, modules in left_out.items():
        ids = {id(module) for module in modules}
        if ids & wanted_ids:
            continue
        outer = next((name for name, module in named if id(module) in ids and any(part.startswith(f"{name}.") for part in found)), None)
        if outer is not None:
            part = next(part for part in found if part.startswith(f"{outer}."))
            meant = f"re:{outer.replace('.', '[.]')}[.]"
            if pattern.startswith(_REGEX_PREFIX) and pattern.endswith("$"):
                meant = f"{pattern.removesuffix('$')}[.]"
            more = "" if len(ids) == 1 else f" (it names {len(ids)} modules: so for each, or by one expression)"
            raise TargetError(
                f"model: ignore {pattern!r} names {outer}, which is no target, and leaves what lies inside of it, such as {part}, to be "
                f"changed; write {meant!r} to ignore all of it{more}"
            )


def matches(name: str, module: nn.Module, pattern: str) -> bool:
    """Tell whether one pattern means one module.

    Args:
        name: dotted name of the module in its model.
        module: the module, for class names.
        pattern: class name, exact dotted name, or `re:` and a regular expression.

    Returns:
        True if the pattern means the module.
    """
    names = _names_of(name, module)
    if pattern.startswith(_REGEX_PREFIX):
        return any(re.match(pattern.removeprefix(_REGEX_PREFIX), one) for one in names)
    return pattern in names or not set(_CLASSES.get(pattern, (pattern,))).isdisjoint(_class_names(module))


def outward(name: str) -> Iterator[str]:
    """Yield a dotted name, then the names of the modules around it from the inside out; the last is "", the model itself."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def closeness(name: str, module: nn.Module, patterns: Sequence[str]) -> tuple[int, str] | None:
    """Tell how closely a list of patterns means one module, in the order in which compressed-tensors prefers schemes.

    Args:
        name: dotted name of the module in its model.
        module: the module, for class names.
        patterns: targets of one scheme.

    Returns:
        0 for its whole name, 1 for a regular expression, 2 for its class, and the pattern, since of one kind the first in the alphabet
        holds there; None where only something around or in it is meant.
    """
    names = _names_of(name, module)
    kinds = {pattern: 0 if pattern in names else 1 if pattern.startswith(_REGEX_PREFIX) else 2 for pattern in patterns}
    return min(((kinds[pattern], pattern) for pattern in patterns if matches(name, module, pattern)), default=None)


def call_also(module: nn.Module, name: str) -> None:
    """Let patterns name a module by another dotted name, too. Changes the module.

    Args:
        module: of the model.
        name: such as that of the files.
    """
    module.__dict__[_ALSO] = name


def _names_of(name: str, module: nn.Module) -> tuple[str, ...]:
    """Names by which a pattern may mean a module: its own, in an expert that of llm-compressor, and that of `call_also`."""
    usual, also = usual_name(module), module.__dict__.get(_ALSO)
    names = (name, usual and f"{name.rpartition('.')[0]}.{usual}", also)
    return tuple(one for one in names if one is not None)


def check_patterns(patterns: Sequence[str], *, required: bool) -> None:
    """Refuse patterns that can match nothing in any model, before there is one.

    Args:
        patterns: as for `resolve_targets`.
        required: at least one must be there.

    Raises:
        TargetError: no list of texts, none where one is needed, an empty one, or one that is no regular expression.
    """
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TargetError(f"{patterns!r} is no list of patterns; give names of classes or modules, such as [Linear]")
    if required and not patterns:
        raise TargetError("[] names no module, so nothing would be changed; name some, such as [Linear]")
    for pattern in patterns:
        if not pattern.removeprefix(_REGEX_PREFIX).strip():
            raise TargetError(f"{pattern!r} is an empty pattern; give a class name, a dotted name, or re: and a regular expression")
        fault = _regex_fault(pattern)
        if fault is not None:
            raise TargetError(f"{pattern!r} is not a regular expression ({fault}); correct it")


def _as_list(patterns: Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _class_names(module: nn.Module) -> list[str]:
    """Names of the module's class and of its bases below nn.Module."""
    return [cls.__name__ for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]


class _Index:
    """Where modules stand by name and by class: a model of experts has ten thousands of both modules and patterns."""

    def __init__(self, named: list[tuple[str, nn.Module]]) -> None:
        self._named = named
        self._names: dict[str, int] = {}
        self._classes: dict[str, list[int]] = {}
        for place, (name, module) in enumerate(named):
            for own in _names_of(name, module):
                self._names[own] = place
            for word in _class_names(module):
                self._classes.setdefault(word, []).append(place)

    def literal(self, pattern: str) -> list[nn.Module]:
        """Modules whose name or class this is, else the one that has a parameter of this name."""
        places = {place for word in _CLASSES.get(pattern, (pattern,)) for place in self._classes.get(word, ())}
        places |= {self._names[pattern]} if pattern in self._names else set()
        holder, _, parameter = pattern.rpartition(".")
        if not places and holder in self._names and parameter in self._named[self._names[holder]][1]._parameters:
            places = {self._names[holder]}
        return [self._named[place][1] for place in sorted(places)]


def _match_all(named: list[tuple[str, nn.Module]], patterns: list[str]) -> dict[str, list[nn.Module]]:
    """Modules per pattern: by their own names, else by those of their parameters; a pattern that is no regular expression matches none."""
    index = _Index(named)
    return {pattern: index.literal(pattern) if not pattern.startswith(_REGEX_PREFIX) else _matching(named, pattern) for pattern in patterns}


def _matching(named: list[tuple[str, nn.Module]], pattern: str) -> list[nn.Module]:
    if _regex_fault(pattern) is not None:
        return []
    fits = re.compile(pattern.removeprefix(_REGEX_PREFIX)).match
    return [module for name, module in named if any(map(fits, _names_of(name, module)))] or [
        module
        for name, module in named
        if any(fits(f"{one}.{parameter}") for one in _names_of(name, module) for parameter in module._parameters)
    ]


def _regex_fault(pattern: str) -> str | None:
    if not pattern.startswith(_REGEX_PREFIX):
        return None
    try:
        re.compile(pattern.removeprefix(_REGEX_PREFIX))
    except re.error as error:
        return str(error)
    return None


def _ids(matched: dict[str, list[nn.Module]]) -> set[int]:
    return {id(module) for modules in matched.values() for module in modules}


def _quoted(patterns: dict[str, list[nn.Module]]) -> str:
    return ", ".join(map(repr, patterns))


def _check_all_match(fields: dict[str, dict[str, list[nn.Module]]], named: list[tuple[str, nn.Module]]) -> None:
    faults = [
        f"{field} {pattern!r} {_explain(pattern, named)}"
        for field, matched in fields.items()
        for pattern, modules in matched.items()
        if not modules and not (field == "ignore" and pattern.startswith(_REGEX_PREFIX) and _regex_fault(pattern) is None)
    ]
    if faults:
        raise TargetError(f"model: {'; '.join(faults)}; correct or remove {'it' if len(faults) == 1 else 'them'}")


def _explain(pattern: str, named: list[tuple[str, nn.Module]]) -> str:
    """Why a pattern matches nothing, and what was probably meant."""
    fault = _regex_fault(pattern)
    if fault is not None:
        return f"is not a regular expression ({fault})"
    names = [name for name, _ in named]
    leaves = {name.rpartition(".")[2] for name in names}
    if pattern.startswith(_REGEX_PREFIX):
        expression = pattern.removeprefix(_REGEX_PREFIX)
        if any(re.search(expression, name) for name in names):
            return f"matches no module from the start of its name (did you mean 're:.*{expression}'?)"
        word = re.sub(r"\W+", "", expression.rpartition(".")[2])
        near = nearest(word, sorted(leaves), count=3)
    elif pattern in leaves:
        return f"matches no module by its whole name (did you mean 're:.*{re.escape(pattern)}$'?)"
    else:
        classes = {class_name for _, module in named for class_name in _class_names(module)}
        shorter = [name for name in names if pattern.endswith(f".{name}") or name.endswith(f".{pattern}")]
        near = shorter[:3] or nearest(pattern, [*sorted(classes), *names], count=3)
    return "matches no module" + (f" (nearest: {', '.join(near)})" if near else "")
