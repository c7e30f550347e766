"""Which recipes can be carried out without a forward, and what to say of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.errors import RecipeError, SchemeError
from compressor.modifiers.quantization import QuantizationModifier
from compressor.numerics import QuantizationScheme
from compressor.numerics.scheme import PRESETS
from compressor.recipe import Recipe, load_recipe
from compressor.settings.verbs import ConvertSettings

_WITHOUT_DATA = {"FP8": "FP8_DYNAMIC", "NVFP4": "NVFP4A16"}


def recipe_of(settings: ConvertSettings) -> tuple[Recipe, QuantizationModifier]:
    """Read what the user asks for.

    Args:
        settings: of the conversion.

    Returns:
        The recipe, and its one modifier.

    Raises:
        RecipeError: the recipe asks for something else than rounding.
        SchemeError: a scheme does not exist, or needs calibration data.
    """
    source = settings.recipe if settings.recipe is not None else QuantizationModifier(**_arguments(settings))
    recipe = load_recipe(source, run_type="oneshot")
    return recipe, convertible(recipe)


def convertible(recipe: Recipe) -> QuantizationModifier:
    """Check that a recipe can be carried out on weights by themselves.

    Args:
        recipe: any.

    Returns:
        Its one modifier.

    Raises:
        RecipeError: the recipe asks for something else than rounding.
        SchemeError: a scheme needs calibration data.
    """
    odd = next((one for one in recipe.modifiers if type(one) is not QuantizationModifier), None)
    if odd is not None:
        raise RecipeError(f"{odd.label}: it needs more than the weights by themselves; run the recipe by oneshot")
    if len(recipe.modifiers) != 1:
        raise RecipeError(f"recipe: {len(recipe.modifiers)} modifiers were given; give one, with config_groups for several schemes")
    (modifier,) = recipe.modifiers
    assert isinstance(modifier, QuantizationModifier)
    _check_needs_no_data(modifier)
    return modifier


def _arguments(settings: ConvertSettings) -> dict[str, Any]:
    """How a QuantizationModifier is told the same."""
    targets, ignore = ([value] if isinstance(value, str) else list(value) for value in (settings.targets, settings.ignore))
    scheme, patterns = settings.scheme, {"targets": targets, "ignore": ignore}
    if isinstance(scheme, QuantizationScheme) or (isinstance(scheme, Mapping) and "weights" in scheme):
        return {"config_groups": {"group_0": scheme}, **patterns}
    return {"scheme": dict(scheme) if isinstance(scheme, Mapping) else scheme, **patterns}


def _check_needs_no_data(modifier: QuantizationModifier) -> None:
    if modifier.kv_format is not None:
        raise SchemeError("kv_cache_scheme: queries, keys and values are seen in forwards only; use oneshot")
    if modifier.start is not None:
        raise RecipeError(f"{modifier.label}: start={modifier.start} is for training, and this is none; leave it out")
    if modifier.calibration_need == "none":
        return
    for scheme in modifier.target_schemes():
        inputs = scheme.input_activations
        is_static = inputs is not None and inputs.dynamic is not True
        if is_static or (scheme.weights is not None and scheme.weights.observer_kind == "imatrix"):
            name = next((name for name, one in PRESETS.items() if one.model_copy(update={"targets": scheme.targets}) == scheme), "it")
            what = "has static scales of inputs" if is_static else "weighs errors by inputs"
            instead = f"take {_WITHOUT_DATA[name]}" if name in _WITHOUT_DATA else "take one with dynamic inputs"
            raise SchemeError(f"scheme: {name} {what}, which only calibration data can give; {instead}, or use oneshot")
