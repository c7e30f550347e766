"""Recipes: YAML, JSON, Markdown, dicts or modifier objects become an ordered list of modifiers, and back."""

from __future__ import annotations

from compressor.recipe.build import Stage
from compressor.recipe.recipe import Recipe, load_recipe
from compressor.recipe.schema import recipe_schema

__all__ = ["Recipe", "Stage", "load_recipe", "recipe_schema"]
