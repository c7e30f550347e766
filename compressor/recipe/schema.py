"""The JSON schema of recipe files, from the same classes that read them, so that editors can complete and check recipes."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind, models_json_schema

from compressor.modifiers.registry import find_modifier, known_modifiers
from compressor.recipe.build import GROUP_PATTERN, RUN_TYPES, STAGE_PATTERN, UNREAD

# A setting may always be written as a reference to an argument instead.
_REFERENCE = {"type": "string", "pattern": r"\$\{\w+\}"}


class _Lenient(GenerateJsonSchema):
    """Allows anything for a setting that JSON cannot describe, such as a function in a third party's modifier."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - pydantic's name

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        """Answer pydantic's question about a type without a schema: anything goes."""
        del schema, error_info
        return {}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe with all modifiers that are known by name."""
    classes = {name: find_modifier(name) for name in known_modifiers()}
    inputs: list[Any] = [(cls, "validation") for cls in classes.values()]
    references, definitions = models_json_schema(inputs, ref_template="#/$defs/{model}", schema_generator=_Lenient)
    by_name = {name: references[cls, "validation"] for name, cls in classes.items()}
    defs: dict[str, Any] = definitions.get("$defs", {})
    for reference in by_name.values():
        _allow_arguments(defs[reference["$ref"].rpartition("/")[2]])
    modifiers = {name: {"anyOf": [reference, {"type": "null"}]} for name, reference in by_name.items()}
    anywhere = {"^[^:]+:[^:]+$": {"type": ["object", "null"], "description": "a modifier as package.module:Class"}}
    defs["modifiers"] = {
        "description": "modifiers by name, or a list of them in which one type may stand twice",
        "anyOf": [{"$ref": "#/$defs/one_or_more"}, {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/item"}}],
    }
    defs["item"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/one_or_more"}]}
    defs["one_or_more"] = {
        "type": "object",
        "minProperties": 1,
        "properties": modifiers,
        "patternProperties": anywhere,
        "additionalProperties": False,
    }
    args = {"type": "object", "description": "values for ${name}"}
    inside = {"args": args, "run_type": {"enum": list(RUN_TYPES)}, "modifiers": {"$ref": "#/$defs/modifiers"}, **modifiers}
    groups = {GROUP_PATTERN: {"$ref": "#/$defs/modifiers"}, **anywhere}
    defs["stage"] = {"type": "object", "properties": inside, "patternProperties": groups, "additionalProperties": False}
    unread = {name: {"description": "for readers; changes nothing"} for name in UNREAD}
    flat = {**defs["stage"], "properties": {**inside, **unread}, "description": "a recipe of one stage", "minProperties": 1}
    staged = {
        "type": "object",
        "description": "a recipe of several stages",
        "minProperties": 1,
        "properties": {"args": args, **unread},
        "patternProperties": {STAGE_PATTERN: {"$ref": "#/$defs/stage"}},
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "compressor recipe",
        "anyOf": [staged, flat, {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/item"}}],
        "$defs": defs,
    }


def _allow_arguments(definition: dict[str, Any]) -> None:
    """Let every setting of a modifier also be `${name}`. Changes the definition."""
    settings = definition["properties"]
    for name, setting in settings.items():
        settings[name] = {"anyOf": [setting, _REFERENCE], **{key: setting[key] for key in ("description", "default") if key in setting}}
