"""Have llm-compressor resolve the recipes of recipes.yaml on tiny models, and record which module gets what in resolutions.json.

Run `python -m tests.compressor.recipe.published.record --peer-python PYTHON`, whose environment has llmcompressor.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.metadata
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import nn

FOLDER = Path(__file__).parent
RESOLUTIONS = FOLDER / "resolutions.json"
LIBRARIES = ("llmcompressor", "compressed-tensors", "transformers", "torch")
# Fields of both libraries' arguments that say what a tensor becomes; of observers, those that do not just take the range.
FIELDS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder", "scale_dtype", "observer")
RANGES = (None, "minmax", "memoryless_minmax", "static_minmax")


@functools.cache
def published() -> dict[str, Any]:
    """Read the models and recipes."""
    content: dict[str, Any] = yaml.load((FOLDER / "recipes.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)  # in C: ten times as fast
    return content


def build(name: str) -> nn.Module:
    """Build one of the models, on the device that is torch's default."""
    import transformers

    entry = published()["models"][name]
    model_class = getattr(transformers, entry["class"])
    model: nn.Module = model_class(model_class.config_class(**copy.deepcopy(entry["config"]))).eval()
    return model


def recipe_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe as a file would hold it."""
    given = entry.get("recipe") or {"quant_stage": {"quant_modifiers": entry["modifiers"]}}
    return copy.deepcopy(dict(given))


def scheme_text(scheme: Any) -> str:
    """Write a scheme of either library as one line."""
    parts = ("weights", "input_activations", "output_activations")
    return "; ".join(f"{part} {args_text(getattr(scheme, part))}" for part in parts if getattr(scheme, part, None) is not None)


def args_text(args: Any) -> str:
    """Write the arguments of one tensor as one line."""
    said = {name: getattr(args, name, None) for name in FIELDS}
    said = {name: getattr(value, "value", value) for name, value in said.items()}
    if said["observer"] in RANGES or args.dynamic is True:
        said["observer"] = None
    if args.dynamic in (True, "local") or said["strategy"] not in ("group", "tensor_group"):
        said["scale_dtype"] = None  # what is in no file
    said |= {"symmetric": None if args.symmetric else "false", "dynamic": args.dynamic or None}
    blocks = said["block_structure"]
    said |= {"block_structure": blocks and "x".join(map(str, blocks)), "actorder": "group" if said["actorder"] == "group" else None}
    return " ".join(f"{name}={value}" for name, value in said.items() if value is not None)


def collapsed(found: Mapping[str, str], names: Iterable[str]) -> dict[str, list[str]]:
    """Turn module -> what it gets into what -> modules.

    Modules of all layers and experts become one name with `*`, and what lies in one module one text: `model.layers.*.mlp: up_proj`.
    """
    every: dict[str, set[str]] = {}
    for name in names:
        every.setdefault(starred(name), set()).add(name)
    result: dict[str, list[str]] = {}
    for what in sorted(set(found.values())):
        mine = {name for name, one in found.items() if one == what}
        stars = {starred(name) for name in mine}
        whole = {star for star in stars if every[star] <= mine}
        parents: dict[str, list[str]] = {}
        for name in sorted(whole | {name for name in mine if starred(name) not in whole}):
            parent, _, leaf = name.rpartition(".")
            parents.setdefault(parent, []).append(leaf)
        result[what] = [f"{parent}: {' '.join(leaves)}" for parent, leaves in parents.items()]
    return result


def starred(name: str) -> str:
    """Write a name without the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def resolved_by_peer(entry: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Resolve one recipe with llm-compressor. Changes the model."""
    from llmcompressor.modifiers.quantization.quantization.mixin import QuantizationMixin
    from llmcompressor.modifiers.transform.awq.base import AWQModifier

    names = [name for name, _ in model.named_modules() if name]
    modifiers = _modifiers_of_peer(entry)
    for modifier in modifiers:
        if isinstance(modifier, QuantizationMixin) and modifier.has_config():
            modifier.initialize_quantization(model)
    schemes = {name: scheme_text(one) for name, module in model.named_modules() if (one := getattr(module, "quantization_scheme", None))}
    schemes = {name: text for name, text in schemes.items() if text}  # of keys and values alone, all others get an empty one
    result: dict[str, Any] = {"schemes": collapsed(schemes, names)}
    result |= {"pruned": collapsed({name: what for one in modifiers for name, what in _pruned_by_peer(one, model)}, names)}
    result |= {"turned": _turned_by_peer(modifiers, model, names)}
    try:
        scales = [pair for modifier in modifiers for pair in _scales_of_peer(modifier, model, AWQModifier)]
        result |= {"scales": collapsed({source: ", ".join(sorted({starred(one) for one in readers})) for source, readers in scales}, names)}
    except ValueError as error:
        result |= {"scales refused": str(error)[:160]}
    return {key: value for key, value in result.items() if value}


def _modifiers_of_peer(entry: Mapping[str, Any]) -> list[Any]:
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.recipe import Recipe

    if set(entry.get("modifiers", ())) == {"AWQModifier"} and "scheme" in entry["modifiers"]["AWQModifier"]:
        return list(AWQModifier(**entry["modifiers"]["AWQModifier"]))  # its old form is a function there
    return list(Recipe.create_instance(json.dumps(recipe_of(entry))).modifiers)


def _scales_of_peer(modifier: Any, model: nn.Module, awq: type) -> list[tuple[str, list[str]]]:
    if isinstance(modifier, awq):
        from llmcompressor.modifiers.transform.awq.dynamic_mappings import get_layer_mappings_from_model

        modifier.mappings = modifier.mappings or get_layer_mappings_from_model(model)
        modifier._set_resolved_mappings(model)
        return [(one.smooth_name, one.balance_names) for one in modifier._resolved_mappings]
    if type(modifier).__name__ != "SmoothQuantModifier":
        return []
    names = {module: name for name, module in model.named_modules()}
    modifier.mappings = modifier._infer_mappings_from_model(model)
    return [(one.smooth_name, [names[layer] for layer in one.balance_layers]) for one in modifier._resolve_mappings(model)]


def _pruned_by_peer(modifier: Any, model: nn.Module) -> list[tuple[str, str]]:
    """As `SparseGPTModifier.on_calibration_start` of llmcompressor 0.14 finds them."""
    if type(modifier).__name__ != "SparseGPTModifier":
        return []
    from compressed_tensors.utils import match_named_modules, match_targets

    found = []
    for outer, layer in match_named_modules(model, modifier.targets):
        for inner, module in match_named_modules(layer, ["Linear", "Conv1d", "Conv2d", "Conv3d"]):
            name = f"{outer}.{inner}".rstrip(".")
            if not match_targets(name, module, modifier.ignore):
                found.append((name, f"{modifier.sparsity} {modifier.mask_structure}"))
    return found


def _turned_by_peer(modifiers: list[Any], model: nn.Module, names: list[str]) -> dict[str, list[str]]:
    """Where a rotation acts to the modules that it acts on: on rows or columns of a weight, or on what a module is handed."""
    from compressed_tensors.utils import match_named_modules
    from llmcompressor.core import State

    found: dict[str, dict[str, str]] = {}
    for modifier in modifiers:
        if hasattr(modifier, "transform_config"):
            modifier.on_initialize(State(model=model))
            for group in modifier.transform_config.config_groups.values():
                for one in group.apply:
                    where = str(getattr(one.location, "value", one.location))
                    found.setdefault(where, {}).update({name: where for name, _ in match_named_modules(model, one.targets, one.ignore)})
    return {where: lines for one in found.values() for where, lines in collapsed(one, names).items()}


def record() -> None:
    """Resolve everything, in the interpreter of the peer, and write it."""
    from llmcompressor.modeling.moe.linearize import linearize_moe

    content = published()
    models = {}
    resolved = []
    for entry in content["recipes"]:
        if entry["model"] not in models:
            models[entry["model"]] = linearize_moe(build(entry["model"]))
        model = copy.deepcopy(models[entry["model"]])
        try:
            one = resolved_by_peer(entry, model)
        except ValueError as error:
            one = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        resolved.append({"recipe": entry["of"][0], **one})
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    head = json.dumps({"made_by": "tests/compressor/recipe/published/record.py", **versions})
    lines = ",\n ".join(json.dumps(one) for one in resolved)
    RESOLUTIONS.write_text(f'{{"made": {head},\n"resolved": [\n {lines}\n]}}\n', encoding="utf-8")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.compressor.recipe.published.record", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with llmcompressor; by default this one")
    args = parser.parse_args()
    if args.peer_python is not None:
        return subprocess.run([args.peer_python, "-P", __file__], check=False).returncode
    record()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
