"""Which modules a recipe says that write and read hidden states, held against what a forward of the model shows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from compressor.errors import RecipeError, TargetError
from compressor.mappings.basis import Basis
from compressor.mappings.pairs import ScalePair
from compressor.model.targets import check_patterns, matches

# Fields of llm-compressor's SpinQuantMapping.
_WRITERS = ("embedding", "attn_o", "mlp_out")
_READERS = ("attn_q", "attn_k", "attn_v", "mlp_in", "lm_head")
_OTHERS = ("attn", "attn_head_dim")


def check_written(mappings: Any, norm_mappings: Any) -> None:
    """Refuse what has not the form of mappings, before a model is at hand.

    Args:
        mappings: a table of roles with a pattern, or a list of patterns, each; None.
        norm_mappings: a list of tables with `norm` and `linears`; None.

    Raises:
        RecipeError: anything else, or a pattern that is none.
    """
    if mappings is not None:
        for role, patterns in _roles(mappings):
            if role not in (*_WRITERS, *_READERS, *_OTHERS):
                raise RecipeError(f"mappings: {role!r} is no role; choose from {', '.join((*_WRITERS, *_READERS, *_OTHERS))}")
            if role != "attn_head_dim":
                check_patterns(list(patterns), required=True)
    for norm, linears in _norms(norm_mappings):
        check_patterns([norm, *linears], required=True)


def notes_of_written(
    model: nn.Module, basis: Basis | None, values: Sequence[tuple[ScalePair, int]], mappings: Any, norm_mappings: Any, where: str
) -> list[str]:
    """Hold the roles of a recipe against what was proved.

    Args:
        model: not modified.
        basis: of hidden states that are turned; None where they are not.
        values: of heads that are turned, with their sizes.
        mappings: see `check_written`.
        norm_mappings: see `check_written`.
        where: the modifier, for errors.

    Returns:
        Sentences on modules that are turned as well, without being named.

    Raises:
        TargetError: a pattern matches nothing, or a module that does not do what its role says.
    """
    if basis is None:
        return []
    readers = {*basis.readers, *(name for pair in basis.norms for name in pair.readers)}
    notes = []
    named: dict[str, set[str]] = {"writes": set(), "reads": set()}
    for role, patterns in _roles(mappings) if mappings is not None else ():
        if role == "attn_head_dim":
            _check_size(patterns[0], values, where)
            continue
        found = _matching(model, patterns, f"{where}: mappings: {role}")
        for verb, roles, known in (("writes", _WRITERS, set(basis.writers)), ("reads", _READERS, readers)):
            if role in roles:
                _refuse_strangers(found, known, f"{where}: mappings: {role}", f"{verb} hidden states")
                named[verb] |= found
    if mappings is not None:
        for verb, known in (("write", set(basis.writers)), ("read", readers)):
            left = sorted(known - named[f"{verb}s"])
            if left:
                notes.append(f"{where}: {_some(left)} {verb} hidden states, too, and were turned with what the mappings name")
    by_norm = {pair.source: set(pair.readers) for pair in basis.norms}
    for norm, linears in _norms(norm_mappings):
        norms = _matching(model, [norm], f"{where}: norm_mappings: norm")
        _refuse_strangers(norms, by_norm.keys(), f"{where}: norm_mappings", "is a norm of hidden states")
        reached = set().union(*(by_norm[name] for name in norms))
        _refuse_strangers(
            _matching(model, linears, f"{where}: norm_mappings: linears"), reached, f"{where}: norm_mappings", f"reads {norm}"
        )
    return notes


def _roles(mappings: Any) -> Iterator[tuple[str, list[Any]]]:
    table = mappings if isinstance(mappings, Mapping) else getattr(mappings, "__dict__", None)
    if not isinstance(table, Mapping) or not table:
        raise RecipeError(f"mappings: {mappings!r} is none; give a table of roles, such as embedding, attn_o and mlp_in, with patterns")
    for role, value in table.items():
        if value is not None:
            yield str(role), list(value) if isinstance(value, list | tuple) else [value]


def _norms(norm_mappings: Any) -> Iterator[tuple[str, list[str]]]:
    if not isinstance(norm_mappings, list | tuple | None):
        raise RecipeError(f"norm_mappings: {norm_mappings!r} is no list; give a norm and linears that read it, for each")
    for item in norm_mappings or ():
        table = item if isinstance(item, Mapping) else getattr(item, "__dict__", {})
        norm, linears = table.get("norm"), table.get("linears")
        linears = [linears] if isinstance(linears, str) else linears
        if not isinstance(norm, str) or not isinstance(linears, list | tuple) or not linears:
            raise RecipeError(f"norm_mappings: {item!r} is none; give a norm and linears that read it")
        yield norm, list(linears)


def _matching(model: nn.Module, patterns: Sequence[str], where: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name, module in model.named_modules() if name and matches(name, module, pattern)}
        if not own:
            raise TargetError(f"{where}: {pattern!r} matches no module of {type(model).__name__}; correct it, or leave the mappings out")
        found |= own
    return found


def _refuse_strangers(found: Collection[str], known: Collection[str], where: str, what: str) -> None:
    strangers = sorted(set(found) - set(known))
    if strangers:
        raise TargetError(f"{where}: {_some(strangers)}: no forward shows that it {what}; correct it, or leave the mappings out")


def _check_size(given: Any, values: Sequence[tuple[ScalePair, int]], where: str) -> None:
    wrong = next((f"{pair.source} has heads of {size}" for pair, size in values if size != given), None)
    if wrong is not None:
        raise TargetError(f"{where}: mappings: attn_head_dim={given}, but {wrong}; correct it, or leave it out")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if names[3:] else "")
