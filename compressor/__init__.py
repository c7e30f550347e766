"""Model compression that proves itself: takes a model, a recipe and data; gives a compressed checkpoint.

Public names are imported on first use, so that `import compressor` and the command line answer without loading torch.
"""

from __future__ import annotations

import sys
from typing import Any

from compressor.object_reference import OtherHomes, lazy_names
from compressor.settings.llmcompressor import MODULES, NAMES

_PUBLIC = {
    "oneshot": "compressor.entrypoints.oneshot",
    "model_free": "compressor.conversion.convert",
    "ConvertResult": "compressor.conversion.convert",
    "model_free_ptq": "compressor.conversion.llmcompressor",
    "train": "compressor.training_run",
    "TrainResult": "compressor.training_run",
    "plan": "compressor.planning",
    "OneshotResult": "compressor.entrypoints.oneshot",
    "Modifier": "compressor.lifecycle",
    "Session": "compressor.lifecycle",
    "EventType": "compressor.lifecycle",
    "Event": "compressor.lifecycle",
    "State": "compressor.lifecycle",
    "register_modifier": "compressor.modifiers.registry",
    "GPTQModifier": "compressor.modifiers.gptq",
    "QuantizationModifier": "compressor.modifiers.quantization",
    "AutoRoundModifier": "compressor.modifiers.autoround",
    "ScaleTuningModifier": "compressor.modifiers.scale_tuning",
    "ConstantPruningModifier": "compressor.modifiers.pruning.magnitude",
    "MagnitudePruningModifier": "compressor.modifiers.pruning.magnitude",
    "QuIPModifier": "compressor.modifiers.transforms.quip",
    "SpinQuantModifier": "compressor.modifiers.transforms.spinquant",
    "REAPPruningModifier": "compressor.modifiers.pruning.reap",
    "SparseGPTModifier": "compressor.modifiers.pruning.sparsegpt",
    "WandaPruningModifier": "compressor.modifiers.pruning.wanda",
    "AWQModifier": "compressor.modifiers.transforms.awq",
    "LogarithmicEqualizationModifier": "compressor.modifiers.transforms.smoothing",
    "SmoothQuantModifier": "compressor.modifiers.transforms.smoothing",
    "QuantizationArgs": "compressor.numerics",
    "QuantizationScheme": "compressor.numerics",
    "QuantizedLinear": "compressor.nn",
    "QuantizedKVCache": "compressor.nn.attention.kv_cache",
    "leaf": "compressor.tracing.graph.torch_patches",
    "load_compressed": "compressor.model.checkpoints.load",
    "load_recipe": "compressor.recipe",
    "CompressorError": "compressor.errors",
}

__all__ = sorted(_PUBLIC)
__version__ = "0.1.0"


_look_up, _names = lazy_names(__name__, _PUBLIC)


def look_up(name: str) -> Any:
    """Find a public name, from wherever somebody imports it.

    Args:
        name: of `__all__`.

    Returns:
        What it names.

    Raises:
        ImportError: it is a name of llm-compressor that has no place here; says what to do instead.
    """
    if name in NAMES:
        raise ImportError(f"compressor: {name} of llm-compressor has no place here; {NAMES[name]}")
    return _look_up(name)


__getattr__ = look_up
sys.meta_path.append(OtherHomes(MODULES, look_up))


def __dir__() -> list[str]:
    return [*_names(), "__version__"]
