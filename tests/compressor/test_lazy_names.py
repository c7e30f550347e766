"""Names of a package are found where they are defined, and no others."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

import compressor
from compressor.object_reference import lazy_names


def test_a_name_is_imported_from_its_home_and_others_are_no_attributes() -> None:
    look_up, names = lazy_names("some.package", {"dumps": "json", "Path": "pathlib"})
    assert look_up("dumps")([1]) == "[1]"
    assert names() == ["Path", "dumps"]
    with pytest.raises(AttributeError, match=r"module 'some\.package' has no attribute 'loads'"):
        look_up("loads")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("modifiers", "AWQModifier"),
        ("modifiers.quantization", "GPTQModifier"),
        ("modifiers.gptq", "GPTQModifier"),
        ("modifiers.pruning", "WandaPruningModifier"),
        ("modifiers.pruning.constant", "ConstantPruningModifier"),
        ("modifiers.pruning.sparsegpt", "SparseGPTModifier"),
        ("modifiers.obcq", "SparseGPTModifier"),
        ("modifiers.awq", "AWQModifier"),
        ("modifiers.smoothquant", "SmoothQuantModifier"),
        ("modifiers.transform.smoothquant", "SmoothQuantModifier"),
        ("modifiers.transform", "QuIPModifier"),
        ("modifiers.autoround", "AutoRoundModifier"),
        ("modifiers.logarithmic_equalization", "LogarithmicEqualizationModifier"),
        ("core", "EventType"),
        ("core.events", "Event"),
        ("core.state", "State"),
        ("transformers", "oneshot"),
        ("modifiers.quantization.gptq", "GPTQModifier"),
        ("modifiers.quantization.quantization.base", "QuantizationModifier"),
        ("modifiers.transform.awq.base", "AWQModifier"),
        ("entrypoints", "oneshot"),
        ("entrypoints.oneshot", "oneshot"),
        ("entrypoints", "model_free_ptq"),
        ("entrypoints.model_free", "model_free_ptq"),
    ],
)
def test_names_are_found_where_llmcompressor_has_them(module: str, name: str) -> None:
    assert getattr(importlib.import_module(f"compressor.{module}"), name) is getattr(compressor, name)


def test_no_module_hides_a_public_name_that_its_package_gives() -> None:
    """Importing a module makes it an attribute of its package, before which no `__getattr__` is asked."""
    importlib.import_module("compressor.entrypoints.oneshot")
    homes = [module for name, module in sys.modules.items() if name.startswith("compressor") and "__getattr__" in vars(module)]
    assert len(homes) > 5
    hidden = [name for home in homes for name in compressor.__all__ if isinstance(vars(home).get(name), ModuleType)]
    assert set(hidden) <= {"model_free"}  # a module of entrypoints there, too


def test_what_is_nowhere_is_no_module_and_no_name() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'compressor\.modifiers\.awg'"):
        importlib.import_module("compressor.modifiers.awg")
    with pytest.raises(AttributeError, match="AWGModifier"):
        importlib.import_module("compressor.modifiers.awq").AWGModifier  # noqa: B018
