"""What the checkpoint says of a guilty module: the modifier and the stage of the recipe that made it, and how its weight compares."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.entrypoints.inspection import read_run_record
from compressor.errors import RecipeError
from compressor.modifiers.registry import modifier_name
from compressor.modifiers.schemes.base import SchemeModifier
from compressor.nn import QuantizedLayer
from compressor.nn.attention.kv_cache import kv_args
from compressor.recipe import Stage, load_recipe
from harness.bisect.attention import LITTLE, MOST, guilty_states
from harness.bisect.difference import Comparer
from harness.bisect.models import Pair
from harness.tolerance.measures import decibels, noise_and_signal
from harness.validation.format.record import RECORD_FILE, read_record

FAR_DB = 8.0
"""So much below the usual a weight is suspect: more than one bit."""


@dataclass(frozen=True)
class Blame:
    """One guilty module.

    Attributes:
        module: dotted name.
        alone: difference with nothing but it compressed.
        rest: difference of its layer with all compressed but it and the modules named before it.
        modifier: class that compression.json names for it; or why none is known.
        stage: stage of the recipe in which that modifier stands; None where it is not known.
        scheme: format, as compression.json names it; None where it is not known.
        recorded_error: relative error of the weight at the time of compression; None where it is not known.
        weight_sqnr_db: of the weight in the file against the base's; None where the two cannot be compared.
        usual_sqnr_db: median of the modules of the same last name; None where there is no other.
        part: "weight", "input" (its quantizer) or "both"; of an attention "queries", "keys", "values" or those joined by "and", whose
            scales they are; None where the module has one of them only.
    """

    module: str
    alone: float
    rest: float
    modifier: str
    stage: str | None = None
    scheme: str | None = None
    recorded_error: float | None = None
    weight_sqnr_db: float | None = None
    usual_sqnr_db: float | None = None
    part: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return asdict(self)


def who_made(module: str, folder: Path, kv_format: str | None = None) -> dict[str, Any]:
    """Ask compression.json about a module.

    Args:
        module: dotted name.
        folder: the compressed checkpoint.
        kv_format: of the keys and values where their scales are what is asked about: these are the recipe's, no module's.

    Returns:
        The fields modifier, stage, scheme and recorded_error of a Blame.

    Raises:
        ModelError: a part of the record is of another kind than a run writes.
    """
    record = read_record(folder)
    if record is None:
        return {"modifier": f"unknown: the folder holds no {RECORD_FILE} that can be read"}
    read_run_record(folder)  # which refuses a part of another kind
    recipe, modules = record.get("recipe"), record.get("modules")
    if kv_format is not None:
        modifiers = [one for stage in _stages(recipe) for one in stage.modifiers]
        made = [modifier_name(type(one)) for one in modifiers if isinstance(one, SchemeModifier) and one.kv_format is not None]
        who = made[0] if made else f"unknown: no modifier of the recipe in {RECORD_FILE} quantizes keys and values"
        return {"modifier": who, "stage": stage_of(who, recipe), "scheme": kv_format}
    entry = modules.get(module) if isinstance(modules, Mapping) else None
    if not isinstance(entry, Mapping):
        return {"modifier": f"none: {RECORD_FILE} does not name this module, so no modifier should have changed it"}
    modifier = str(entry.get("modifier"))
    return {
        "modifier": modifier,
        "stage": stage_of(modifier, recipe),
        "scheme": entry.get("scheme"),
        "recorded_error": entry.get("error"),
    }


def stage_of(modifier: str, recipe: Any) -> str | None:
    """Return the stage of a recipe in which a modifier stands.

    Args:
        modifier: name of its class.
        recipe: text, as compression.json holds it.

    Returns:
        Names of the stages, joined; None where it stands in none, or the recipe cannot be read.
    """
    names = [stage.name for stage in _stages(recipe) if any(modifier_name(type(one)) == modifier for one in stage.modifiers)]
    return " and ".join(f"{name}_stage" for name in names) or None


def _stages(recipe: Any) -> tuple[Stage, ...]:
    try:
        return load_recipe(recipe).stages if isinstance(recipe, str) else ()
    except RecipeError:
        return ()


def weight_sqnr(pair: Pair, names: Sequence[str]) -> dict[str, float]:
    """Compare weights with the base's.

    Args:
        pair: both models.
        names: of modules.

    Returns:
        dB by name; without those that have no weight, or another shape.
    """
    found = {}
    for name in names:
        ours, theirs = (_weight(model.get_submodule(name)) for model in (pair.base, pair.compressed))
        if ours is not None and theirs is not None and ours.shape == theirs.shape:
            found[name] = decibels(*noise_and_signal(theirs.cpu(), ours.cpu()))
    return found


def _weight(module: nn.Module) -> Tensor | None:
    if isinstance(module, QuantizedLayer):
        return module.dequantized_weight()
    weight = module._parameters.get("weight")
    return None if weight is None else weight.detach()


def usual_sqnr(name: str, found: Mapping[str, float]) -> float | None:
    """Return the median of the modules that have the same last name.

    Args:
        name: of a module.
        found: dB by name.

    Returns:
        dB; None where there is no other.
    """
    same = [value for other, value in found.items() if other != name and other.rpartition(".")[2] == name.rpartition(".")[2]]
    return statistics.median(same) if same else None


def suspects(found: Mapping[str, float], known: Collection[str]) -> dict[str, tuple[float, float]]:
    """Return modules whose weight is FAR_DB farther from the base's than is usual for their last name.

    Args:
        found: dB by name.
        known: modules that are named already.

    Returns:
        Weight and usual value, by name.
    """
    usual = {name: usual_sqnr(name, found) for name in found if name not in known}
    return {name: (found[name], value) for name, value in usual.items() if value is not None and found[name] < value - FAR_DB}


def guilty_part(pair: Pair, name: str, alone: float, compare: Comparer) -> str | None:
    """Find out whether the weight or the quantizer of the input makes the difference, or which scales of an attention: a pass for each.

    Args:
        pair: both models.
        name: of the module.
        alone: its difference.
        compare: measures.

    Returns:
        weight, input or both; queries, keys or values; None where only one of them is quantized, or none makes the difference.
    """
    layer, base = pair.compressed.get_submodule(name), pair.base.get_submodule(name)
    if kv_args(layer) is not None:
        return guilty_states(layer, base, alone, lambda twin: compare.instead(name, twin))
    if not isinstance(layer, QuantizedLayer) or layer.scheme.input_activations is None or not isinstance(base, nn.Linear):
        return None
    twin = copy.deepcopy(base)
    with torch.no_grad():
        twin.weight.copy_(layer.dequantized_weight())
        own, given = getattr(twin, "bias", None), getattr(layer, "bias", None)
        if isinstance(own, Tensor) and isinstance(given, Tensor):
            own.copy_(given)
    of_weight = compare.instead(name, twin)
    if math.isinf(alone):
        return "weight" if math.isinf(of_weight) else "input"
    return "weight" if of_weight > MOST * alone else "input" if of_weight < LITTLE * alone else "both"
