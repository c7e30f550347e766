"""`model_free_ptq`, as scripts written for llm-compressor 0.14 call it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compressor.conversion.convert import ConvertResult, model_free
from compressor.errors import UserInputError
from compressor.numerics import QuantizationScheme

_DONE_ANYWAY = "FP8BlockDequantizer"


def model_free_ptq(
    model_stub: str | Path,
    save_directory: str | Path,
    scheme: Any = None,
    config: Any = None,
    ignore: str | Iterable[str] = (),
    max_workers: int = 1,
    device: Any = None,
    converter: Any = None,
) -> ConvertResult:
    """Call `model_free` by the names of llm-compressor.

    Args:
        model_stub: the model; `model` there.
        save_directory: `output_dir` there.
        scheme: name of a preset, or a QuantizationScheme, also one of compressed-tensors.
        config: None; several schemes are a recipe with `config_groups`.
        ignore: modules that stay as they are.
        max_workers: `workers` there.
        device: None is `auto`; a single one.
        converter: None, or an `FP8BlockDequantizer`: fp8 weights in blocks are read as floats without being told.

    Returns:
        What `model_free` gives.

    Raises:
        UserInputError: an argument asks for something that is not done here.
    """
    if config is not None:
        raise UserInputError("config: a quantization config was given; call model_free(recipe=...) with its groups as config_groups")
    if converter is not None and type(converter).__name__ != _DONE_ANYWAY:
        raise UserInputError(
            f"converter: {type(converter).__name__} was given, and of quantized bases fp8 in blocks alone is read, without a converter; "
            "convert the base to floats first"
        )
    if isinstance(device, list | tuple):
        if len(device) != 1:
            raise UserInputError(f"device: {len(device)} devices were given, and all workers share one; give one of them")
        device = device[0]
    if hasattr(scheme, "model_dump") and not isinstance(scheme, QuantizationScheme):
        scheme = scheme.model_dump(mode="json")
    names = ignore if isinstance(ignore, str) else list(ignore)
    chosen = "auto" if device is None else device
    return model_free(model_stub, output_dir=save_directory, scheme=scheme, ignore=names, workers=max_workers, device=chosen)
