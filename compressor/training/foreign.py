"""Whose code is looked into by the guards: a user's is, that of libraries is not."""

from __future__ import annotations

import sys

_LIBRARIES = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "transformers", "tokenizers", "datasets", "peft", "accelerate", "einops", "safetensors"),
        *("compressor", "numpy", "scipy", "sklearn", "pandas", "PIL", "matplotlib", "rich", "tqdm", "pydantic", "pydantic_core", "onnx"),
        *("pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis", "huggingface_hub", "wandb", "tensorboard", "lightning"),
    }
)
_FOREIGN = _LIBRARIES | sys.stdlib_module_names


def is_foreign(module_name: str | None) -> bool:
    """Say whether code is a library's that no user changes while it trains, or that speaks for itself.

    Args:
        module_name: the module that defines it.

    Returns:
        True for the standard library, torch, transformers and their like, and this package.
    """
    return (module_name or "").split(".", 1)[0] in _FOREIGN
