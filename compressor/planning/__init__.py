"""What a recipe would do to a model, and what the run would cost, before anything runs."""

from __future__ import annotations

from compressor.planning.planner import Plan, plan, plan_recipe

__all__ = ["Plan", "plan", "plan_recipe"]
