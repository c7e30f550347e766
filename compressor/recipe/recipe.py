"""A recipe is an ordered list of modifiers in named stages; it is read strictly, and written so that reading gives an equal one."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from compressor.errors import RecipeError, SchemeError
from compressor.lifecycle import Flags, Modifier
from compressor.modifiers.gptq import Mode
from compressor.modifiers.pruning.magnitude import ConstantPruningModifier
from compressor.modifiers.quantization import QuantizationModifier
from compressor.modifiers.registry import modifier_name
from compressor.modifiers.schemes.base import SchemeModifier
from compressor.recipe.build import DEFAULT_STAGE, Builder, Stage, escape, named_values
from compressor.recipe.source import read_document
from compressor.spelling import suggest
from compressor.yaml_text import YamlDumper

_FILLED_IN = {"index", "group"}
_EMBEDDING = "Embedding"
RecipeSource: TypeAlias = "str | Path | Mapping[str, Any] | Recipe | Modifier | Sequence[Any]"


@dataclass(frozen=True)
class Recipe:
    """What a run will do, in order.

    Attributes:
        stages: the named parts, in order.
        text: the text that was read, for the record; a dump where modifier objects or data were given.
    """

    stages: tuple[Stage, ...]
    text: str = field(default="", compare=False, repr=False)

    @staticmethod
    def create_instance(path_or_modifiers: RecipeSource, target_stage: str | None = None) -> Recipe:
        """Read a recipe, as llm-compressor calls `load_recipe`.

        Args:
            path_or_modifiers: what `load_recipe` takes.
            target_stage: the only stage that is wanted; None for all.

        Returns:
            The recipe.
        """
        return load_recipe(path_or_modifiers, stage=target_stage)

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """All modifiers of all stages, in order."""
        return tuple(modifier for stage in self.stages for modifier in stage.modifiers)

    def check_oneshot(self, ranks: int = 1) -> list[str]:
        """Refuse what a run in one shot cannot do, before it begins.

        Args:
            ranks: processes that share it.

        Returns:
            What a user must know of settings that change nothing there, a sentence each.

        Raises:
            RecipeError: a modifier was used before, counts steps, cannot share its work, or none changes anything.
        """
        used = next((one for one in self.modifiers if one.flags != Flags()), None)
        if used is not None:
            raise RecipeError(f"{used.label}: it was used in an earlier run, and remembers it; make a new one")
        notes = [note for modifier in self.modifiers for note in modifier.check_oneshot()]
        unable = next((one for one in self.modifiers if one.across_ranks is None and one.calibration_need != "none"), None)
        if unable is not None and ranks > 1:
            raise RecipeError(
                f"{unable.label}: learns from calibration data in a way that {ranks} ranks cannot share; run it in one process (a modifier "
                "of your own says by `across_ranks` that it can)"
            )
        if all(type(one) is ConstantPruningModifier for one in self.modifiers):
            names = ", ".join(one.label for one in self.modifiers)
            raise RecipeError(f"recipe: {names} would leave every tensor of the model as it is; give modifiers that change something")
        return notes

    def dump(self) -> str:
        """Write the recipe as YAML that `load_recipe` reads back as an equal one; arguments are resolved, defaults are left out.

        Returns:
            The text; llm-compressor reads it too, unless one type stands twice in a group.

        Raises:
            RecipeError: a setting of a modifier cannot be written as text.
        """
        data = {f"{stage.name}_stage": _stage_data(stage) for stage in self.stages}
        return yaml.dump(data, Dumper=YamlDumper, sort_keys=False, default_flow_style=None, width=120)

    def to_dict(self) -> dict[str, Any]:
        """Give what `dump` writes as data for programs, in lists, so that the order of modifiers outlives sorted keys.

        Returns:
            `stages`, in order: each with its `name`, `run_type` (None for any) and `modifiers`, a mapping of the type to its settings each.

        Raises:
            RecipeError: a setting of a modifier cannot be written as text.
        """
        stages = [{"name": stage.name, "run_type": stage.run_type, "modifiers": _listed(stage)} for stage in self.stages]
        return {"stages": stages}


def load_recipe(
    source: RecipeSource,
    args: Mapping[str, Any] | Sequence[str] | None = None,
    run_type: str | None = None,
    mode: str | None = None,
    stage: str | None = None,
) -> Recipe:
    """Read a recipe, strictly: what means nothing is an error that names the line and the nearest valid name.

    Args:
        source: path of a .yaml, .json or .md file (YAML between `---` lines on top); the text of one; the data that such a text gives; a
            recipe; a modifier; or a list of modifiers, whose `index` and `group` are filled in on the objects themselves.
        args: values for `${name}` in the recipe, in place of the recipe's own `args`: a mapping, or texts `name=value`.
        run_type: `oneshot` or `train`: for which run; a recipe that says it is for the other is refused.
        mode: `fast`, `default` or `best`, in place of what the recipe says, for all modifiers that have modes.
        stage: name of the stage to take, with or without its `_stage`; by default all.

    Returns:
        The recipe.

    Raises:
        RecipeError: the recipe cannot be read, means nothing somewhere, or holds no modifier; or there is no such mode.

    Example:
        >>> recipe = load_recipe("quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: W4A16, ignore: [lm_head]}}}")
        >>> recipe.modifiers[0].group
        'quant'
    """
    read = _of_stage(_read(source, named_values(args)), stage)
    recipe = _followed(_in_mode(read, mode, _modifier_objects(source) is not None))
    for one in recipe.stages:
        if run_type is not None and one.run_type not in (None, run_type):
            raise RecipeError(
                f"recipe: the stage {one.name} has run_type={one.run_type}, and this is {run_type}; run it by {one.run_type}, "
                "or leave run_type out"
            )
    return recipe


def _read(source: Any, args: Mapping[str, Any]) -> Recipe:
    objects = _modifier_objects(source)
    if objects is None and not isinstance(source, Recipe):
        assert not isinstance(source, Modifier)
        document = read_document(source)
        builder = Builder(document, args)
        recipe = _lent(_in_parts(Recipe(builder.build(), document.text)), builder.places)
        return recipe if recipe.text else Recipe(recipe.stages, recipe.dump())
    if args:
        raise RecipeError(f"recipe: args={dict(args)} was given with modifier objects, which hold no ${{name}}; set their fields instead")
    if isinstance(source, Recipe):
        return source
    assert objects is not None
    recipe = _lent(_in_parts(Recipe((Stage(DEFAULT_STAGE, _filled_in(objects)),))), {})
    return Recipe(recipe.stages, recipe.dump())


def _of_stage(recipe: Recipe, stage: str | None) -> Recipe:
    """Leave out all other stages; modifiers are numbered anew."""
    if stage is None:
        return recipe
    names = [one.name for one in recipe.stages]
    kept = tuple(one for one in recipe.stages if one.name in (stage, stage.removesuffix("_stage")))
    if not kept:
        raise RecipeError(f"stage: the recipe has none that is called {stage!r}; {suggest(stage, names)}")
    return _numbered(kept)


def _in_mode(recipe: Recipe, mode: str | None, holds_objects: bool) -> Recipe:
    """Set the mode that was asked for; modifiers that a caller holds are left to him."""
    if mode is None:
        return recipe
    if mode not in get_args(Mode):
        raise RecipeError(f"mode: {mode!r} does not exist; {suggest(mode, get_args(Mode))}")
    with_modes = [modifier for modifier in recipe.modifiers if "mode" in type(modifier).model_fields]
    if holds_objects or not with_modes:
        why = "modifier objects; set their field" if holds_objects else "a recipe whose modifiers have none; leave it out"
        raise RecipeError(f"mode: {mode!r} was given with {why}")
    for modifier in with_modes:
        modifier.mode = mode  # type: ignore[attr-defined]
    return Recipe(recipe.stages, recipe.dump())


def _made(modifier: Modifier, method: Literal["parts", "followers"]) -> list[Modifier]:
    """What a modifier makes to stand in its place, or behind it."""
    found: Any = getattr(modifier, method)()
    if not isinstance(found, list | tuple) or not all(isinstance(one, Modifier) for one in found):
        raise RecipeError(f"{modifier.label}: {method}() returned {reprlib.repr(found)}, where a list of modifiers is due; return one")
    if method == "parts" and not found:
        raise RecipeError(f"{modifier.label}: parts() returned none, and nothing would do what it asks for; return [self] at least")
    return list(found)


def _in_parts(recipe: Recipe) -> Recipe:
    """Put in the place of each modifier those that do what it asks for; all of them keep its position, for errors."""
    stages = []
    for stage in recipe.stages:
        parts = []
        for modifier in stage.modifiers:
            for part in _made(modifier, "parts"):
                part.index, part.group = modifier.index, modifier.group
                parts.append(part)
        stages.append(replace(stage, modifiers=tuple(parts)))
    return replace(recipe, stages=tuple(stages))


def _lent(recipe: Recipe, places: Mapping[int, str]) -> Recipe:
    """Give solvers without schemes those of the QuantizationModifier before them, which keeps what no solver can do: embeddings.

    Args:
        recipe: its modifiers may change.
        places: where the modifiers stand, by position, for errors.

    Returns:
        The recipe, without modifiers that have nothing left to do.
    """
    kept = list(recipe.modifiers)
    for solver in [one for one in kept if isinstance(one, SchemeModifier) and one.lacks_schemes]:
        before = kept[: kept.index(solver)]
        lender = next((one for one in reversed(before) if type(one) is QuantizationModifier and one.start is None), None)
        if lender is not None and _lend(lender, solver):
            kept.remove(lender)
    for modifier in kept:
        try:
            modifier.check_settings()
        except SchemeError as error:
            raise RecipeError(f"{places.get(modifier.index or 0, 'recipe')}: {error}") from error
    if [modifier.index for modifier in kept] == list(range(len(recipe.modifiers))):
        return recipe
    stages = [replace(stage, modifiers=tuple(one for one in stage.modifiers if one in kept)) for stage in recipe.stages]
    return _numbered(tuple(stage for stage in stages if stage.modifiers))


def _lend(lender: QuantizationModifier, solver: SchemeModifier) -> bool:
    """Give schemes from one to the other; False where some stay, for embeddings. Changes both."""
    schemes = {f"group_{number}": scheme for number, scheme in enumerate([*lender.target_schemes(), *lender.attention_schemes()])}
    rest = {name: scheme.model_copy(update={"targets": [_EMBEDDING]}) for name, scheme in schemes.items() if _EMBEDDING in scheme.targets}
    others = {name: [target for target in scheme.targets if target != _EMBEDDING] for name, scheme in schemes.items()}
    groups = {name: schemes[name].model_copy(update={"targets": targets}) for name, targets in others.items() if targets}
    for name, value in {"config_groups": groups, "ignore": lender.ignore, "kv_cache_scheme": lender.kv_cache_scheme}.items():
        setattr(solver, name, value)
    lender.scheme, lender.targets, lender.config_groups, lender.kv_cache_scheme = None, ["Linear"], rest, None
    return not rest


def _followed(recipe: Recipe) -> Recipe:
    """Append what modifiers ask for behind them."""
    stages, changed = [], False
    for stage in recipe.stages:
        known = {type(modifier) for modifier in recipe.modifiers}
        made = [follower for modifier in stage.modifiers for follower in _made(modifier, "followers")]
        wanted = [follower for follower in made if type(follower) not in known]
        for follower in wanted:
            follower.group = stage.modifiers[-1].group
        changed = changed or bool(wanted)
        stages.append(replace(stage, modifiers=(*stage.modifiers, *wanted)))
    return _numbered(tuple(stages)) if changed else recipe


def _numbered(stages: tuple[Stage, ...]) -> Recipe:
    """Give modifiers the positions that they have now. Changes them."""
    made = Recipe(stages)
    for position, modifier in enumerate(made.modifiers):
        modifier.index = position
    return Recipe(stages, made.dump())


def _modifier_objects(source: object) -> list[Modifier] | None:
    """The modifiers of a (nested) list of objects, None where the source is no such list."""
    if isinstance(source, Modifier):
        return [source]
    if not isinstance(source, list | tuple):
        return None
    parts = [_modifier_objects(item) for item in source]
    found = [modifier for part in parts if part is not None for modifier in part]
    if found and None in parts:
        raise RecipeError(f"recipe: {source[parts.index(None)]!r} stands in a list of modifier objects; give only objects, or only data")
    return found or None


def _filled_in(modifiers: list[Modifier]) -> tuple[Modifier, ...]:
    if len({id(modifier) for modifier in modifiers}) < len(modifiers):
        raise RecipeError("recipe: one modifier object stands twice in the list; create a second object")
    for position, modifier in enumerate(modifiers):
        modifier.index = position
        modifier.group = modifier.group or DEFAULT_STAGE
    return tuple(modifiers)


def _stage_data(stage: Stage) -> dict[str, Any]:
    """The nested form that llm-compressor reads, where it can say it: groups in one piece and no type twice in a group."""
    head = {} if stage.run_type is None else {"run_type": stage.run_type}
    groups = [(group, list(members)) for group, members in groupby(stage.modifiers, key=lambda modifier: modifier.group)]
    names = {id(modifier): modifier_name(type(modifier)) for modifier in stage.modifiers}
    nested = all(group and "${" not in group and len({names[id(m)] for m in members}) == len(members) for group, members in groups)
    if nested and len({group for group, _ in groups}) == len(groups):
        return {**head, **{f"{group}_modifiers": {names[id(m)]: _settings(m) for m in members} for group, members in groups}}
    return {**head, "modifiers": _listed(stage)}


def _listed(stage: Stage) -> list[dict[str, Any]]:
    return [{modifier_name(type(one)): {"group": escape(one.group), **_settings(one)}} for one in stage.modifiers]


def _by_name(value: Any) -> str:
    """What torch writes as a name, and reads as one."""
    if isinstance(value, torch.device | torch.dtype):
        return str(value).removeprefix("torch.")
    raise PydanticSerializationError(f"{value!r} is a {type(value).__name__}")


def _dumped(modifier: Modifier, name: str) -> dict[str, Any]:
    """A setting without its defaults, unless these are what tells it apart, as the tag of a union's member."""
    options: dict[str, Any] = {"mode": "json", "include": {name}, "fallback": _by_name}
    short = modifier.model_dump(**options, exclude_defaults=True)
    value = getattr(modifier, name)
    if name not in short or not _holds_models(value):
        return short
    twin = modifier.model_copy()
    try:
        type(modifier).__pydantic_validator__.validate_assignment(twin, name, short[name])
    except ValidationError:
        return modifier.model_dump(**options)
    return short if getattr(twin, name) == value else modifier.model_dump(**options)


def _holds_models(value: object) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, BaseModel) or any(_holds_models(one) for one in items)


def _settings(modifier: Modifier) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name in (one for one in type(modifier).model_fields if one not in _FILLED_IN):
        try:
            data |= _dumped(modifier, name)
        # Of pydantic, of codecs for bytes, and of what is no truth value, as the comparison of a tensor with the default.
        except (ValueError, RuntimeError, TypeError) as error:
            raise RecipeError(f"{modifier.label}: setting {name} cannot be written into a recipe ({error}); use plain values") from error
    return dict(escape(data))
