"""Patterns to modules: which layers of a model a recipe means.

The patterns are those of compressed-tensors, so that recipes and checkpoints carry over: a class name (`Linear`, base classes count), an
exact dotted name, or `re:` and a regular expression that must match from the start of the dotted name. A pattern that matches nothing is
always a mistake worth stopping for: a typo in `ignore` quantizes a layer that had to stay as it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from compressor.errors import TargetError
from compressor.spelling import nearest

_REGEX_PREFIX = "re:"


def resolve_targets(model: nn.Module, targets: Sequence[str], ignore: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Find the modules that `targets` name and `ignore` does not.

    Args:
        model: searched in the order of `named_modules`; the root itself is never a target.
        targets: patterns of the modules that are wanted.
        ignore: patterns of modules that are left out.

    Returns:
        Dotted name to module, in the order of the model; a module that the model holds under several names comes once, under its first.

    Raises:
        TargetError: a pattern matches no module or is no regular expression (all of them are named, with the nearest names), or every
            matched module is ignored, or `ignore` names a module whose parts are targets and stay so.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> list(resolve_targets(model, ["Linear"], ignore=["re:2"]))
        ['0']
    """
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    wanted = _match_all(named, _as_list(targets))
    left_out = _match_all(named, _as_list(ignore))
    _check_all_match({"targets": wanted, "ignore": left_out}, named)
    wanted_ids, left_out_ids = _ids(wanted), _ids(left_out)
    found = {name: module for name, module in model.named_modules() if name and id(module) in wanted_ids - left_out_ids}
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
    if pattern.startswith(_REGEX_PREFIX):
        return re.match(pattern.removeprefix(_REGEX_PREFIX), name) is not None
    return pattern == name or pattern in _class_names(module)


def check_patterns(patterns: Sequence[str], *, required: bool) -> None:
    """Refuse patterns that can match nothing in any model, before there is one.

    Args:
        patterns: as for `resolve_targets`.
        required: at least one must be there.

    Raises:
        TargetError: none where one is needed, an empty one, or one that is no regular expression.
    """
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


def _match_all(named: list[tuple[str, nn.Module]], patterns: list[str]) -> dict[str, list[nn.Module]]:
    """Modules per pattern; a pattern that is no regular expression matches none."""
    return {pattern: [m for name, m in named if _regex_fault(pattern) is None and matches(name, m, pattern)] for pattern in patterns}


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
        if not modules
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
        near = nearest(pattern, [*sorted(classes), *names], count=3)
    return "matches no module" + (f" (nearest: {', '.join(near)})" if near else "")
